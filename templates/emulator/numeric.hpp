// Arithmetic as the GPU does it: 16-bit conversions bit for bit, flush to zero, NaN-dropping minimum and maximum.
#pragma once
#include "types.hpp"

namespace emu {

inline u32 bits_of(float x) {
  u32 u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}

inline float float_of(u32 u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

inline float f32_of_bf16(u32 h) { return float_of(h << 16); }

inline float f32_of_f16(u32 h) {
  const u32 sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return float_of(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = (float)mantissa * 0x1p-24f;  // exact: a subnormal f16 is a multiple of 2^-24
  return sign ? -magnitude : magnitude;
}

// Round to nearest even. PTX turns every NaN into 0x7fff.
inline u32 bf16_of_f32(float x) {
  const u32 u = bits_of(x);
  if (x != x) return 0x7fff;
  return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

inline u32 f16_of_f32(float x) {
  const u32 u = bits_of(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  if (x != x) return 0x7fff;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520, halfway to the next power of two, and above
  if (magnitude < 0x38800000u) {                        // below 2^-14: adding 1/2 rounds to a multiple of 2^-24
    return sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));
  }
  return sign | (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
}

// A subnormal becomes a zero of the same sign.
inline float flush(float x) { return (bits_of(x) & 0x7f800000u) == 0 ? float_of(bits_of(x) & 0x80000000u) : x; }

// Equal operands have equal bits or are zeros of either sign; +0 counts as larger than -0.
inline float max_drop_nan(float a, float b) {
  if (a == b) return float_of(bits_of(a) & bits_of(b));
  return a > b || b != b ? a : b;
}

inline float min_drop_nan(float a, float b) {
  if (a == b) return float_of(bits_of(a) | bits_of(b));
  return a < b || b != b ? a : b;
}

inline i64 floor_div(i64 a, i64 b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

}  // namespace emu
