// What the primitives call: the boundary between a generated body, compiled each time, and the runtime, compiled once.
// Every function acts for the thread that runs; `line` is the body's line, for messages.
#pragma once
#include "types.hpp"

namespace emu {

int thread_index();
int cta_index();
int grid_extent();

// Dynamic shared memory starts here. Not zero, so that a forgotten base address is out of bounds.
constexpr u32 SHARED_BASE = 1024;

// Ends the launch with a message; does not return to the kernel.
[[noreturn]] void fail(int line, const char* format, ...) __attribute__((format(printf, 2, 3)));

// What accumulators hold while a product in flight writes them: a signalling NaN. Arithmetic makes it quiet and keeps
// the bits below.
constexpr u32 IN_FLIGHT = 0x7fa0dead, NAN_PAYLOAD = 0x003fffff;

// Check an access of `bytes` bytes (its alignment too) and return where its data are.
const void* global_read(const void* p, int bytes, int line);
void* global_write(void* p, int bytes, int line);
const u8* shared_read(u32 addr, int bytes, int line);
u8* shared_write(u32 addr, int bytes, int line);

void cta_barrier(int line);

// Warp collectives: every lane of the warp calls them at the same line.
u32 warp_exchange(u32 x, int mask, int line);
u32 warp_broadcast(u32 x, int line);
u32 warp_vote(bool x, int line);
void load_matrices(u32 (&x)[4], u32 addr, bool transposed, int line);

enum class Element16 { bf16, f16 };
void multiply_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], Element16 element, int line);

void copy_async(u32 dst, const void* src, int bytes, int src_bytes, int line);
void copy_async_commit(int line);
void copy_async_wait(int groups_left, int line);

// stmatrix: the lanes' rows of four 8x8 matrices of 16-bit elements go to shared memory.
void store_matrices(u32 addr, const u32 (&x)[4], bool transposed, int line);

void named_barrier_sync(int id, int threads, int line);
void named_barrier_arrive(int id, int threads, int line);

void mbarrier_init(u32 addr, int count, int line);
void mbarrier_fence_init(int line);
void mbarrier_arrive_at(u32 addr, int line);
void mbarrier_expect(u32 addr, int bytes, int line);
void mbarrier_wait_at(u32 addr, int parity, int line);

// `at`: coordinates, innermost first. A store adds f32 where `add` says so.
void tensor_load(u32 dst, const void* map, u32 bar, const int* at, int rank, int line);
void tensor_store(const void* map, u32 src, const int* at, int rank, bool add, int line);
void bulk_range_load(u32 dst, const void* src, int bytes, u32 bar, int line);
void bulk_commit_group(int line);
void bulk_wait_groups(int groups_left, int line);
void proxy_fence(int line);

void set_max_registers(int registers, bool increase, int line);

// One thread's part of a warpgroup product d (+)= a b of 64 x n x 16.
struct ProductArguments {
  float* d;
  int n;
  bool a_in_registers;
  u32* a[4];
  u64 a_descriptor, b_descriptor;
  bool a_transposed, transposed;  // the tile of a, of b is stored with its rows along k
  bool accumulate;
  Element16 element;
};
void issue_product(const ProductArguments& arguments, int line);
void product_fence(int line);
void product_commit(int line);
void product_wait(int groups_left, int line);

// One kernel of the body, as the launcher sees it.
struct KernelEntry {
  const char* name;
  int threads;
  int smem_bytes;
  u64 params_bytes;
  void (*call)(const void* params);
};

}  // namespace emu

// Defined by the build after the body.
extern const emu::KernelEntry attngen_kernels[];
