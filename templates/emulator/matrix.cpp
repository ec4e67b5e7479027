// ldmatrix, stmatrix and mma, with the fragment layouts of the PTX manual: lane = 4 * group + quad lane.
#include <cstring>

#include "collective.hpp"
#include "numeric.hpp"

namespace emu {

void load_matrices(u32 (&x)[4], u32 addr, bool transposed, int line) {
  struct Load {
    u32 addr;
    u32* x;
  } lane{addr, x};
  const char* name = transposed ? "ldmatrix_x4_trans" : "ldmatrix_x4";
  warp_collective(name, lane, line, [=](Load* const* lanes) {
    const Fiber& fiber = *launch.current;
    Cta& cta = *fiber.cta;
    for (int m = 0; m < 4; m++) {
      u16 rows[8][8];
      for (int r = 0; r < 8; r++) {
        const u8* row = cta.shared.read(lanes[8 * m + r]->addr, 16, {fiber.warp(), WHOLE}, cta.clocks, line);
        memcpy(rows[r], row, 16);
      }
      for (int i = 0; i < WARP; i++) {
        const int g = i / 4, q = 2 * (i % 4);
        const u32 lo = transposed ? rows[q][g] : rows[g][q], hi = transposed ? rows[q + 1][g] : rows[g][q + 1];
        lanes[i]->x[m] = lo | hi << 16;
      }
    }
  });
}

void store_matrices(u32 addr, const u32 (&x)[4], bool transposed, int line) {
  struct Store {
    u32 addr;
    const u32* x;
  } lane{addr, x};
  const char* name = transposed ? "stmatrix_x4_trans" : "stmatrix_x4";
  warp_collective(name, lane, line, [=](Store* const* lanes) {
    const Fiber& fiber = *launch.current;
    Cta& cta = *fiber.cta;
    for (int m = 0; m < 4; m++) {
      u16 rows[8][8];
      for (int i = 0; i < WARP; i++) {
        const int g = i / 4, q = 2 * (i % 4);
        const u32 x = lanes[i]->x[m];
        (transposed ? rows[q][g] : rows[g][q]) = (u16)x;
        (transposed ? rows[q + 1][g] : rows[g][q + 1]) = (u16)(x >> 16);
      }
      for (int r = 0; r < 8; r++) {
        memcpy(cta.shared.write(lanes[8 * m + r]->addr, 16, {fiber.warp(), WHOLE}, cta.clocks, line), rows[r], 16);
      }
    }
  });
}

struct Multiply {
  float* d;
  const u32* a;
  const u32* b;
};

template <float (*Convert)(u32)>
static void multiply(Multiply* const* lanes) {
  float a[16][16], b[16][8], d[16][8];
  for (int i = 0; i < WARP; i++) {
    const int g = i / 4, q = 2 * (i % 4);
    for (int r = 0; r < 4; r++) {
      const int row = g + 8 * (r % 2), k = q + 8 * (r / 2);
      a[row][k] = Convert(lanes[i]->a[r] & 0xffff);
      a[row][k + 1] = Convert(lanes[i]->a[r] >> 16);
      d[g + 8 * (r / 2)][q + r % 2] = lanes[i]->d[r];
    }
    for (int r = 0; r < 2; r++) {
      b[q + 8 * r][g] = Convert(lanes[i]->b[r] & 0xffff);
      b[q + 8 * r + 1][g] = Convert(lanes[i]->b[r] >> 16);
    }
  }
  for (int row = 0; row < 16; row++) {
    for (int k = 0; k < 16; k++) {
      for (int col = 0; col < 8; col++) d[row][col] += a[row][k] * b[k][col];
    }
  }
  for (int i = 0; i < WARP; i++) {
    const int g = i / 4, q = 2 * (i % 4);
    for (int r = 0; r < 4; r++) lanes[i]->d[r] = d[g + 8 * (r / 2)][q + r % 2];
  }
}

void multiply_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], Element16 element, int line) {
  Multiply lane{d, a, b};
  if (element == Element16::bf16) {
    warp_collective("mma_m16n8k16_bf16", lane, line, multiply<f32_of_bf16>);
  } else {
    warp_collective("mma_m16n8k16_f16", lane, line, multiply<f32_of_f16>);
  }
}

}  // namespace emu
