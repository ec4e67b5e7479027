// The CPU meaning of prelude/common.cuh, function by function.
#pragma once
#include "device.hpp"
#include "numeric.hpp"

namespace emu {

// A value on its way into a result.
inline float used(float x, int line) {
  if (x != x && (bits_of(x) & NAN_PAYLOAD) == (IN_FLIGHT & NAN_PAYLOAD)) {
    fail(line, "use of an accumulator while a product in flight writes it (missing wgmma_wait)");
  }
  return x;
}

}  // namespace emu

DI int thread_id() { return emu::thread_index(); }
DI int cta_id() { return emu::cta_index(); }
DI int grid_size() { return emu::grid_extent(); }
DI u32 smem_base() { return emu::SHARED_BASE; }
DI void trap(LINE) { emu::fail(line, "trap"); }
DI void cta_sync(LINE) { emu::cta_barrier(line); }

DI float ld_f32(const float* p, LINE) { return *(const float*)emu::global_read(p, 4, line); }
DI float ld_bf16(const u16* p, LINE) { return emu::f32_of_bf16(*(const u16*)emu::global_read(p, 2, line)); }
DI void ld_v2_bf16(float& x0, float& x1, const u16* p, LINE) {
  const u16* x = (const u16*)emu::global_read(p, 4, line);
  x0 = emu::f32_of_bf16(x[0]), x1 = emu::f32_of_bf16(x[1]);
}
DI void ld_v2_f16(float& x0, float& x1, const u16* p, LINE) {
  const u16* x = (const u16*)emu::global_read(p, 4, line);
  x0 = emu::f32_of_f16(x[0]), x1 = emu::f32_of_f16(x[1]);
}
DI void ld_v2_f32(float& x0, float& x1, const float* p, LINE) {
  const float* x = (const float*)emu::global_read(p, 8, line);
  x0 = x[0], x1 = x[1];
}
DI float ld_f16(const u16* p, LINE) { return emu::f32_of_f16(*(const u16*)emu::global_read(p, 2, line)); }
DI int ld_s32(const int* p, LINE) { return *(const int*)emu::global_read(p, 4, line); }
DI int ld_s64(const i64* p, LINE) {
  const i64 x = *(const i64*)emu::global_read(p, 8, line), top = 0x7fffffff;
  return (int)(x > top ? top : x < -top - 1 ? -top - 1 : x);
}
DI int ld_u8(const u8* p, LINE) { return *(const u8*)emu::global_read(p, 1, line); }
DI float ld_f32_if(const float* p, bool ok, LINE) { return ok ? ld_f32(p, line) : 0.0f; }
DI float ld_bf16_if(const u16* p, bool ok, LINE) { return ok ? ld_bf16(p, line) : 0.0f; }
DI float ld_f16_if(const u16* p, bool ok, LINE) { return ok ? ld_f16(p, line) : 0.0f; }
DI int ld_s32_if(const int* p, bool ok, LINE) { return ok ? ld_s32(p, line) : 0; }
DI int ld_s64_if(const i64* p, bool ok, LINE) { return ok ? ld_s64(p, line) : 0; }
DI int ld_u8_if(const u8* p, bool ok, LINE) { return ok ? ld_u8(p, line) : 0; }
DI u32 ld_global_u16(const u16* p, LINE) { return *(const u16*)emu::global_read(p, 2, line); }
DI int ld_global_s32(const int* p, LINE) { return *(const int*)emu::global_read(p, 4, line); }
DI void ld_v4_s32(int& x0, int& x1, int& x2, int& x3, const int* p, LINE) {
  const int* from = (const int*)emu::global_read(p, 16, line);
  x0 = from[0], x1 = from[1], x2 = from[2], x3 = from[3];
}
DI void ld_v4_f32(float& x0, float& x1, float& x2, float& x3, const float* p, LINE) {
  const float* from = (const float*)emu::global_read(p, 16, line);
  x0 = from[0], x1 = from[1], x2 = from[2], x3 = from[3];
}
DI void ld_v4_u32(u32& x0, u32& x1, u32& x2, u32& x3, const void* p, LINE) {
  const u32* from = (const u32*)emu::global_read(p, 16, line);
  x0 = from[0], x1 = from[1], x2 = from[2], x3 = from[3];
}
DI u32 ld_global_u8(const u8* p, LINE) { return *(const u8*)emu::global_read(p, 1, line); }

DI void st_f32(float* p, float x, LINE) { *(float*)emu::global_write(p, 4, line) = emu::used(x, line); }
DI void red_add_f32(float* p, float x, LINE) { *(float*)emu::global_write(p, 4, line) += emu::used(x, line); }
DI void st_u16(u16* p, u32 x, LINE) { *(u16*)emu::global_write(p, 2, line) = (u16)x; }
DI void st_u32(u32* p, u32 x, LINE) { *(u32*)emu::global_write(p, 4, line) = x; }
DI void st_s32(int* p, int x, LINE) { *(int*)emu::global_write(p, 4, line) = x; }
DI void st_u8(u8* p, u32 x, LINE) { *(u8*)emu::global_write(p, 1, line) = (u8)x; }
DI void st_v4(void* p, u32 x0, u32 x1, u32 x2, u32 x3, LINE) {
  const u32 x[4] = {x0, x1, x2, x3};
  __builtin_memcpy(emu::global_write(p, 16, line), x, 16);
}

DI void st_shared_v4(u32 addr, u32 x0, u32 x1, u32 x2, u32 x3, LINE) {
  const u32 x[4] = {x0, x1, x2, x3};
  __builtin_memcpy(emu::shared_write(addr, 16, line), x, 16);
}
DI void ld_shared_v4(u32& x0, u32& x1, u32& x2, u32& x3, u32 addr, LINE) {
  const u32* x = (const u32*)emu::shared_read(addr, 16, line);
  x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3];
}
DI void st_shared_u32(u32 addr, u32 x, LINE) { *(u32*)emu::shared_write(addr, 4, line) = x; }
DI void ld_shared_v2_f32(float& x0, float& x1, u32 addr, LINE) {
  const float* x = (const float*)emu::shared_read(addr, 8, line);
  x0 = x[0], x1 = x[1];
}
DI u32 ld_shared_u32(u32 addr, LINE) { return *(const u32*)emu::shared_read(addr, 4, line); }

DI float exp2_approx(float x, LINE) { return emu::flush(__builtin_exp2f(emu::flush(emu::used(x, line)))); }
DI float log2_approx(float x) { return emu::flush(__builtin_log2f(emu::flush(x))); }
DI float rcp_approx(float x) { return emu::flush(1.0f / emu::flush(x)); }
// as inexact as the instruction may be: the bits below its relative error are dropped
DI float tanh_approx(float x) { return emu::float_of(emu::bits_of(__builtin_tanhf(x)) & 0xfffff000u); }
DI float sqrt_f32(float x) { return __builtin_sqrtf(x); }
DI float div_f32(float a, float b) { return a / b; }
DI float fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DI float max_f32(float a, float b, LINE) { return emu::max_drop_nan(emu::used(a, line), emu::used(b, line)); }
DI float min_f32(float a, float b, LINE) { return emu::min_drop_nan(emu::used(a, line), emu::used(b, line)); }
DI float abs_f32(float x) { return __builtin_fabsf(x); }
DI float floor_f32(float x) { return __builtin_floorf(x); }
DI int max_s32(int a, int b) { return a > b ? a : b; }
DI int min_s32(int a, int b) { return a < b ? a : b; }
DI int abs_s32(int a) { return a < 0 ? (int)(0u - (u32)a) : a; }
DI int floordiv_s32(int a, int b) { return b == 0 ? 0 : (int)emu::floor_div(a, b); }
DI int mod_s32(int a, int b) { return b == 0 ? 0 : (int)(a - emu::floor_div(a, b) * b); }
DI float f32_of_s32(int x) { return (float)x; }
DI int s32_of_f32(float x) {
  if (x != x) return 0;
  return x >= 0x1p31f ? 0x7fffffff : x < -0x1p31f ? -0x7fffffff - 1 : (int)x;
}
DI u32 pack_bf16x2(float lo, float hi, LINE) {
  return emu::bf16_of_f32(emu::used(lo, line)) | emu::bf16_of_f32(emu::used(hi, line)) << 16;
}
DI u32 pack_f16x2(float lo, float hi, LINE) {
  return emu::f16_of_f32(emu::used(lo, line)) | emu::f16_of_f32(emu::used(hi, line)) << 16;
}

DI float unpack_bf16x2(u32 x, int which) { return emu::f32_of_bf16(which ? x >> 16 : x & 0xffff); }
DI float unpack_f16x2(u32 x, int which) { return emu::f32_of_f16(which ? x >> 16 : x & 0xffff); }

DI u32 shfl_xor_u32(u32 x, int mask, LINE) { return emu::warp_exchange(x, mask, line); }
DI float shfl_xor_f32(float x, int mask, LINE) { return emu::float_of(emu::warp_exchange(emu::bits_of(x), mask, line)); }
DI bool warp_any(bool x, LINE) { return emu::warp_vote(x, line) != 0; }
DI bool warp_all(bool x, LINE) { return emu::warp_vote(x, line) == ~0u; }
DI u32 warp_ballot(bool x, LINE) { return emu::warp_vote(x, line); }
DI int popc(u32 x) { return __builtin_popcount(x); }
DI u32 opaque_u32(u32 x) { return x; }
DI i64 opaque_s64(i64 x) { return x; }
DI int uniform(int x, LINE) { return (int)emu::warp_broadcast((u32)x, line); }
