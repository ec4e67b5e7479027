// The CPU meaning of prelude/sm80.cuh, function by function.
#pragma once
#include "device.hpp"

DI void cp_async_16(u32 dst, const void* src, int src_bytes, LINE) { emu::copy_async(dst, src, 16, src_bytes, line); }
DI void cp_async_8(u32 dst, const void* src, int src_bytes, LINE) { emu::copy_async(dst, src, 8, src_bytes, line); }
DI void cp_async_4(u32 dst, const void* src, int src_bytes, LINE) { emu::copy_async(dst, src, 4, src_bytes, line); }
DI void cp_async_commit(LINE) { emu::copy_async_commit(line); }
template <int N> DI void cp_async_wait(LINE) { emu::copy_async_wait(N, line); }

DI void ldmatrix_x4(u32& x0, u32& x1, u32& x2, u32& x3, u32 addr, LINE) {
  u32 x[4];
  emu::load_matrices(x, addr, false, line);
  x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3];
}
DI void ldmatrix_x4_trans(u32& x0, u32& x1, u32& x2, u32& x3, u32 addr, LINE) {
  u32 x[4];
  emu::load_matrices(x, addr, true, line);
  x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3];
}

DI void mma_m16n8k16_bf16(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                          LINE) {
  float d[4] = {d0, d1, d2, d3};
  const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  emu::multiply_m16n8k16(d, a, b, emu::Element16::bf16, line);
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
DI void mma_m16n8k16_f16(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                         LINE) {
  float d[4] = {d0, d1, d2, d3};
  const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  emu::multiply_m16n8k16(d, a, b, emu::Element16::f16, line);
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
