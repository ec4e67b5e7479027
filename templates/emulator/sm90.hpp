// The CPU meaning of prelude/sm90.cuh and of prelude/wgmma.cuh.jinja, function by function.
#pragma once
#include "device.hpp"

struct alignas(64) TensorMap { u64 opaque[16]; };

DI void named_sync(int id, int threads, LINE) { emu::named_barrier_sync(id, threads, line); }
DI void named_arrive(int id, int threads, LINE) { emu::named_barrier_arrive(id, threads, line); }

DI void mbarrier_init(u32 bar, int count, LINE) { emu::mbarrier_init(bar, count, line); }
DI void fence_mbarrier_init(LINE) { emu::mbarrier_fence_init(line); }
DI void mbarrier_arrive(u32 bar, LINE) { emu::mbarrier_arrive_at(bar, line); }
DI void mbarrier_arrive_expect_tx(u32 bar, int bytes, LINE) { emu::mbarrier_expect(bar, bytes, line); }
DI void mbarrier_wait(u32 bar, int parity, LINE) { emu::mbarrier_wait_at(bar, parity, line); }

DI void tma_load_4d(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, LINE) {
  const int at[] = {c0, c1, c2, c3};
  emu::tensor_load(dst, map, bar, at, 4, line);
}
DI void tma_load_5d(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, int c4, LINE) {
  const int at[] = {c0, c1, c2, c3, c4};
  emu::tensor_load(dst, map, bar, at, 5, line);
}
DI void tma_store_4d(const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, LINE) {
  const int at[] = {c0, c1, c2, c3};
  emu::tensor_store(map, src, at, 4, false, line);
}
DI void tma_store_5d(const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4, LINE) {
  const int at[] = {c0, c1, c2, c3, c4};
  emu::tensor_store(map, src, at, 5, false, line);
}
DI void tma_reduce_add_4d(const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, LINE) {
  const int at[] = {c0, c1, c2, c3};
  emu::tensor_store(map, src, at, 4, true, line);
}
DI void bulk_load(u32 dst, const void* src, int bytes, u32 bar, LINE) {
  emu::bulk_range_load(dst, src, bytes, bar, line);
}
DI void bulk_commit(LINE) { emu::bulk_commit_group(line); }
template <int N> DI void bulk_wait_read(LINE) { emu::bulk_wait_groups(N, line); }
template <int N> DI void bulk_wait(LINE) { emu::bulk_wait_groups(N, line); }

template <int N> DI void setmaxnreg_inc(LINE) { emu::set_max_registers(N, true, line); }
template <int N> DI void setmaxnreg_dec(LINE) { emu::set_max_registers(N, false, line); }

DI void fence_proxy_async(LINE) { emu::proxy_fence(line); }
DI void warp_sync(LINE) { emu::warp_vote(true, line); }
DI void red_add_v4_f32(float* p, float x0, float x1, float x2, float x3, LINE) {
  float* to = (float*)emu::global_write(p, 16, line);
  to[0] += emu::used(x0, line), to[1] += emu::used(x1, line), to[2] += emu::used(x2, line), to[3] += emu::used(x3, line);
}
DI void stmatrix_x4(u32 addr, u32 x0, u32 x1, u32 x2, u32 x3, LINE) {
  const u32 x[4] = {x0, x1, x2, x3};
  emu::store_matrices(addr, x, false, line);
}
DI void stmatrix_x4_trans(u32 addr, u32 x0, u32 x1, u32 x2, u32 x3, LINE) {
  const u32 x[4] = {x0, x1, x2, x3};
  emu::store_matrices(addr, x, true, line);
}

DI void wgmma_fence(LINE) { emu::product_fence(line); }
DI void wgmma_commit(LINE) { emu::product_commit(line); }
template <int N> DI void wgmma_wait(LINE) { emu::product_wait(N, line); }
template <int N> DI void hold(float (&x)[N]) {}
template <int N> DI void hold(u32 (&x)[N]) {}

// The registers of a are taken by reference, unlike on the GPU: they are watched while the product is in flight.
#define PRODUCT(N, ELEMENT)                                                                                            \
  template <int TA, int TB>                                                                                            \
  DI void wgmma_m64n##N##k16_ss_##ELEMENT(float (&d)[N / 2], u64 a, u64 b, int accumulate, LINE) {                     \
    emu::issue_product({d, N, false, {}, a, b, TA != 0, TB != 0, accumulate != 0, emu::Element16::ELEMENT}, line);     \
  }                                                                                                                    \
  template <int TB>                                                                                                    \
  DI void wgmma_m64n##N##k16_rs_##ELEMENT(float (&d)[N / 2], u32& a0, u32& a1, u32& a2, u32& a3, u64 b,                \
                                          int accumulate, LINE) {                                                      \
    emu::issue_product({d, N, true, {&a0, &a1, &a2, &a3}, 0, b, false, TB != 0, accumulate != 0,                       \
                        emu::Element16::ELEMENT}, line);                                                               \
  }
#define PRODUCTS(N) PRODUCT(N, bf16) PRODUCT(N, f16)

PRODUCTS(8) PRODUCTS(16) PRODUCTS(24) PRODUCTS(32) PRODUCTS(40) PRODUCTS(48) PRODUCTS(56) PRODUCTS(64)
PRODUCTS(72) PRODUCTS(80) PRODUCTS(88) PRODUCTS(96) PRODUCTS(104) PRODUCTS(112) PRODUCTS(120) PRODUCTS(128)
PRODUCTS(136) PRODUCTS(144) PRODUCTS(152) PRODUCTS(160) PRODUCTS(168) PRODUCTS(176) PRODUCTS(184) PRODUCTS(192)
PRODUCTS(200) PRODUCTS(208) PRODUCTS(216) PRODUCTS(224) PRODUCTS(232) PRODUCTS(240) PRODUCTS(248) PRODUCTS(256)

#undef PRODUCTS
#undef PRODUCT
