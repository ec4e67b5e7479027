// Device primitives that every target has. One PTX instruction or CUDA built-in a function; addresses of shared
// memory are 32-bit byte addresses of the shared window, addresses of global memory are pointers.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DI __device__ __forceinline__
#define INF __int_as_float(0x7f800000)

// ---- primitives

// %tid.x: 0 .. threads - 1
DI int thread_id() { return threadIdx.x; }

// %ctaid.x: 0 .. grid - 1
DI int cta_id() { return blockIdx.x; }

// %nctaid.x: number of CTAs
DI int grid_size() { return gridDim.x; }

// shared byte address at which dynamic shared memory starts, a multiple of 1024
DI u32 smem_base() {
  extern __shared__ __align__(1024) u8 smem_raw[];
  return (u32)__cvta_generic_to_shared(smem_raw);
}

// trap: ends the grid with an error
DI void trap() { __trap(); }

// bar.sync 0: all threads of the CTA
DI void cta_sync() { __syncthreads(); }

// ld.global.nc.f32
DI float ld_f32(const float* p) {
  float x;
  asm("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(p));
  return x;
}

// ld.global.nc.b16, a bf16 as the upper half of an f32
DI float ld_bf16(const u16* p) {
  float x;
  asm("{\n.reg .b16 lo, hi;\nmov.b16 lo, 0;\nld.global.nc.b16 hi, [%1];\nmov.b32 %0, {lo, hi};\n}" : "=f"(x) : "l"(p));
  return x;
}

// ld.global.nc.b16, cvt.f32.f16
DI float ld_f16(const u16* p) {
  float x;
  asm("{\n.reg .b16 h;\nld.global.nc.b16 h, [%1];\ncvt.f32.f16 %0, h;\n}" : "=f"(x) : "l"(p));
  return x;
}

// ld.global.nc.s32
DI int ld_s32(const int* p) {
  int x;
  asm("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}

// ld.global.nc.s64, cvt.sat.s32.s64: clamped to the range of int
DI int ld_s64(const i64* p) {
  int x;
  asm("{\n.reg .s64 w;\nld.global.nc.s64 w, [%1];\ncvt.sat.s32.s64 %0, w;\n}" : "=r"(x) : "l"(p));
  return x;
}

// ld.global.nc.u8: 0 .. 255
DI int ld_u8(const u8* p) {
  int x;
  asm("ld.global.nc.u8 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}

// ld_f32 where ok; else nothing is read: 0
DI float ld_f32_if(const float* p, bool ok) {
  float x;
  asm("{\n.reg .pred q;\nsetp.ne.s32 q, %2, 0;\nmov.f32 %0, 0f00000000;\n@q ld.global.nc.f32 %0, [%1];\n}" : "=f"(x) : "l"(p), "r"((int)ok));
  return x;
}

// ld_bf16 where ok; else nothing is read: 0
DI float ld_bf16_if(const u16* p, bool ok) {
  float x;
  asm("{\n.reg .pred q;\n.reg .b16 lo, hi;\nsetp.ne.s32 q, %2, 0;\nmov.b16 lo, 0;\nmov.b16 hi, 0;\n@q ld.global.nc.b16 hi, [%1];\nmov.b32 %0, {lo, hi};\n}" : "=f"(x) : "l"(p), "r"((int)ok));
  return x;
}

// ld_f16 where ok; else nothing is read: 0
DI float ld_f16_if(const u16* p, bool ok) {
  float x;
  asm("{\n.reg .pred q;\n.reg .b16 h;\nsetp.ne.s32 q, %2, 0;\nmov.b16 h, 0;\n@q ld.global.nc.b16 h, [%1];\ncvt.f32.f16 %0, h;\n}" : "=f"(x) : "l"(p), "r"((int)ok));
  return x;
}

// ld_s32 where ok; else nothing is read: 0
DI int ld_s32_if(const int* p, bool ok) {
  int x;
  asm("{\n.reg .pred q;\nsetp.ne.s32 q, %2, 0;\nmov.s32 %0, 0;\n@q ld.global.nc.s32 %0, [%1];\n}" : "=r"(x) : "l"(p), "r"((int)ok));
  return x;
}

// ld_s64 where ok; else nothing is read: 0
DI int ld_s64_if(const i64* p, bool ok) {
  int x;
  asm("{\n.reg .pred q;\n.reg .s64 w;\nsetp.ne.s32 q, %2, 0;\nmov.s64 w, 0;\n@q ld.global.nc.s64 w, [%1];\ncvt.sat.s32.s64 %0, w;\n}" : "=r"(x) : "l"(p), "r"((int)ok));
  return x;
}

// ld_u8 where ok; else nothing is read: 0
DI int ld_u8_if(const u8* p, bool ok) {
  int x;
  asm("{\n.reg .pred q;\nsetp.ne.s32 q, %2, 0;\nmov.s32 %0, 0;\n@q ld.global.nc.u8 %0, [%1];\n}" : "=r"(x) : "l"(p), "r"((int)ok));
  return x;
}

// ld.global.u16: coherent, 0 .. 65535
DI u32 ld_global_u16(const u16* p) {
  u32 x;
  asm volatile("ld.global.u16 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// ld.global.s32: coherent
DI int ld_global_s32(const int* p) {
  int x;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// ld.global.u8: coherent, 0 .. 255
DI u32 ld_global_u8(const u8* p) {
  u32 x;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// ld.global.nc.b32, two bf16 as the upper halves of f32; p a multiple of 4
DI void ld_v2_bf16(float& x0, float& x1, const u16* p) {
  asm("{\n.reg .b32 x;\nld.global.nc.b32 x, [%2];\nshl.b32 %0, x, 16;\nand.b32 %1, x, 0xffff0000;\n}" : "=f"(x0), "=f"(x1) : "l"(p));
}

// ld.global.nc.b32, cvt.f32.f16 of both halves; p a multiple of 4
DI void ld_v2_f16(float& x0, float& x1, const u16* p) {
  asm("{\n.reg .b16 lo, hi;\n.reg .b32 x;\nld.global.nc.b32 x, [%2];\nmov.b32 {lo, hi}, x;\ncvt.f32.f16 %0, lo;\ncvt.f32.f16 %1, hi;\n}" : "=f"(x0), "=f"(x1) : "l"(p));
}

// ld.global.nc.v2.f32: p a multiple of 8
DI void ld_v2_f32(float& x0, float& x1, const float* p) {
  asm("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(x0), "=f"(x1) : "l"(p));
}

// st.global.f32
DI void st_f32(float* p, float x) { asm volatile("st.global.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory"); }

// red.global.add.f32: p += x, in no order among threads
DI void red_add_f32(float* p, float x) { asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory"); }

// st.global.u16: the low 16 bits
DI void st_u16(u16* p, u32 x) { asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }

// st.global.u32
DI void st_u32(u32* p, u32 x) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }

// st.global.s32
DI void st_s32(int* p, int x) { asm volatile("st.global.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }

// st.global.u8: the low 8 bits
DI void st_u8(u8* p, u32 x) { asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }

// st.global.v4.b32: 16 bytes, p a multiple of 16
DI void st_v4(void* p, u32 x0, u32 x1, u32 x2, u32 x3) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// st.shared.v4.b32: 16 bytes, addr a multiple of 16
DI void st_shared_v4(u32 addr, u32 x0, u32 x1, u32 x2, u32 x3) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// ld.shared.v4.b32: 16 bytes, addr a multiple of 16
DI void ld_shared_v4(u32& x0, u32& x1, u32& x2, u32& x3, u32 addr) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x0), "=r"(x1), "=r"(x2), "=r"(x3) : "r"(addr) : "memory");
}

// st.shared.u32: addr a multiple of 4
DI void st_shared_u32(u32 addr, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(addr), "r"(x) : "memory"); }

// ld.shared.v2.f32: 8 bytes, addr a multiple of 8
DI void ld_shared_v2_f32(float& x0, float& x1, u32 addr) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x0), "=f"(x1) : "r"(addr) : "memory");
}

// ld.shared.u32: addr a multiple of 4
DI u32 ld_shared_u32(u32 addr) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(addr) : "memory");
  return x;
}

// ex2.approx.ftz.f32: 2^x
DI float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx.ftz.f32: log2(x), -inf at 0
DI float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz.f32: 1/x
DI float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh.approx.f32: tanh(x), relative error 2^-11
DI float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// sqrt.rn.f32
DI float sqrt_f32(float x) { return __fsqrt_rn(x); }

// div.rn.f32
DI float div_f32(float a, float b) { return __fdiv_rn(a, b); }

// fma.rn.f32: a*b + c, rounded once
DI float fma_f32(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// max.f32: the other operand where one is NaN
DI float max_f32(float a, float b) { return fmaxf(a, b); }

// min.f32: the other operand where one is NaN
DI float min_f32(float a, float b) { return fminf(a, b); }

// abs.f32
DI float abs_f32(float x) { return fabsf(x); }

// cvt.rmi.f32.f32: the largest integer not above x
DI float floor_f32(float x) { return floorf(x); }

// max.s32
DI int max_s32(int a, int b) { return a > b ? a : b; }

// min.s32
DI int min_s32(int a, int b) { return a < b ? a : b; }

// abs.s32
DI int abs_s32(int a) { return a < 0 ? -a : a; }

// a // b as in Python (towards -inf); 0 where b == 0
DI int floordiv_s32(int a, int b) { return b == 0 ? 0 : a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// a % b as in Python (sign of b); 0 where b == 0
DI int mod_s32(int a, int b) { return b == 0 ? 0 : a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0); }

// cvt.rn.f32.s32
DI float f32_of_s32(int x) { return __int2float_rn(x); }

// cvt.rzi.s32.f32: towards zero, clamped to the range of int, NaN gives 0
DI int s32_of_f32(float x) { return __float2int_rz(x); }

// cvt.rn.bf16x2.f32: lo in bits 0..15
DI u32 pack_bf16x2(float lo, float hi) {
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(hi), "f"(lo));
  return x;
}

// cvt.rn.f16x2.f32: lo in bits 0..15
DI u32 pack_f16x2(float lo, float hi) {
  u32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(hi), "f"(lo));
  return x;
}

// element `which` (0: bits 0..15) of a pair as float
DI float unpack_bf16x2(u32 x, int which) { return __uint_as_float(which ? x & 0xffff0000u : x << 16); }

// cvt.f32.f16: element `which` (0: bits 0..15) of a pair
DI float unpack_f16x2(u32 x, int which) {
  float y;
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\ncvt.f32.f16 %0, lo;\n}" : "=f"(y) : "r"(which ? x >> 16 : x));
  return y;
}

// shfl.sync.bfly.b32: x of lane ^ mask
DI u32 shfl_xor_u32(u32 x, int mask) { return __shfl_xor_sync(~0u, x, mask); }

// shfl.sync.bfly.b32: x of lane ^ mask
DI float shfl_xor_f32(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }

// vote.sync.any: true where any lane of the warp says so
DI bool warp_any(bool x) { return __any_sync(~0u, x); }

// vote.sync.all: true where every lane of the warp says so
DI bool warp_all(bool x) { return __all_sync(~0u, x); }

// vote.sync.ballot.b32: bit i is lane i's x
DI u32 warp_ballot(bool x) { return __ballot_sync(~0u, x); }

// popc.b32: number of bits set
DI int popc(u32 x) { return __popc(x); }

// shfl.sync.idx.b32: x of lane 0
DI int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// no instruction: x, recomputed from here at each pass, so that a loop does not keep a register for every address in it
DI u32 opaque_u32(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// no instruction: as opaque_u32, for strides
DI i64 opaque_s64(i64 x) {
  asm volatile("" : "+l"(x));
  return x;
}

// ld.global.v4.f32: p a multiple of 16 bytes
DI void ld_v4_f32(float& x0, float& x1, float& x2, float& x3, const float* p) {
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x0), "=f"(x1), "=f"(x2), "=f"(x3) : "l"(p));
}

// ld.global.nc.v4.u32, a multiple of 16 bytes
DI void ld_v4_u32(u32& x0, u32& x1, u32& x2, u32& x3, const void* p) {
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x0), "=r"(x1), "=r"(x2), "=r"(x3) : "l"(p));
}

// ld.global.nc.v4.s32, a multiple of 16 bytes
DI void ld_v4_s32(int& x0, int& x1, int& x2, int& x3, const int* p) {
  asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(x0), "=r"(x1), "=r"(x2), "=r"(x3) : "l"(p));
}
