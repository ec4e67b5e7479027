// Primitives of Hopper (sm_90a): copy engine, mbarriers, named barriers, register reallocation, warpgroup products.
// Addresses of shared memory are 32-bit byte addresses; tensor maps are 128 bytes, made by the host.

// ---- primitives

// CUtensorMap
struct alignas(64) TensorMap { u64 opaque[16]; };

// bar.sync: waits for `threads` threads at named barrier `id`
DI void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// bar.arrive: arrives there without waiting
DI void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// mbarrier.init: `count` arrivals a phase
DI void mbarrier_init(u32 bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }

// fence.mbarrier_init: initialised barriers are visible to the asynchronous proxy
DI void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// mbarrier.arrive: one arrival
DI void mbarrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }

// mbarrier.arrive.expect_tx: one arrival, and `bytes` of copies to come in this phase
DI void mbarrier_arrive_expect_tx(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// mbarrier.try_wait.parity: until the phase of this parity is complete
DI void mbarrier_wait(u32 bar, int parity) {
  asm volatile("{\n.reg .pred done;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT_%=;\n}" ::"r"(bar), "r"(parity) : "memory");
}

// cp.async.bulk.tensor.4d: a box of a tensor to shared memory, completes `bar` with its bytes
DI void tma_load_4d(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(bar) : "memory");
}

// cp.async.bulk.tensor.5d: as tma_load_4d
DI void tma_load_5d(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(bar) : "memory");
}

// cp.async.bulk.tensor.4d: a box of shared memory to a tensor, joins this thread's bulk group
DI void tma_store_4d(const TensorMap* map, u32 src, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(src) : "memory");
}

// cp.async.bulk.tensor.5d: as tma_store_4d
DI void tma_store_5d(const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(src) : "memory");
}

// cp.reduce.async.bulk.tensor.4d.add: a box of shared memory is added to a tensor (of f32: the map says so)
DI void tma_reduce_add_4d(const TensorMap* map, u32 src, int c0, int c1, int c2, int c3) {
  asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(src) : "memory");
}

// cp.async.bulk: `bytes` bytes to shared memory, completes `bar` with them; all a multiple of 16
DI void bulk_load(u32 dst, const void* src, int bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}

// cp.async.bulk.commit_group: closes this thread's bulk group
DI void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: until at most N bulk groups of this thread still read their sources
template <int N> DI void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }

// cp.async.bulk.wait_group: until at most N bulk groups of this thread are unfinished
template <int N> DI void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }

// setmaxnreg.inc: N registers a thread, a multiple of 8
template <int N> DI void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// setmaxnreg.dec: N registers a thread, a multiple of 8
template <int N> DI void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// fence.proxy.async: this thread's writes to shared memory become visible to asynchronous reads
DI void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// bar.warp.sync: what the lanes of the warp wrote before is visible to each of them
DI void warp_sync() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// red.global.add.v4.f32: adds to four neighbours, in no order among threads; p a multiple of 16 bytes
DI void red_add_v4_f32(float* p, float x0, float x1, float x2, float x3) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x0), "f"(x1), "f"(x2), "f"(x3) : "memory");
}

// stmatrix.m8n8.x4.b16: lane 8i + r gives the address of row r of matrix i
DI void stmatrix_x4(u32 addr, u32 x0, u32 x1, u32 x2, u32 x3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// stmatrix.m8n8.x4.trans.b16: each 8x8 matrix transposed
DI void stmatrix_x4_trans(u32 addr, u32 x0, u32 x1, u32 x2, u32 x3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// wgmma.fence: register operands written so far are visible to the products that follow
DI void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: closes a group of products
DI void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: until at most N groups are in flight
template <int N> DI void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// no instruction: keeps the compiler from moving uses of accumulators across this point
template <int N> DI void hold(float (&x)[N]) {
  _Pragma("unroll") for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// no instruction: as hold of accumulators, for packed operands
template <int N> DI void hold(u32 (&x)[N]) {
  _Pragma("unroll") for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}
