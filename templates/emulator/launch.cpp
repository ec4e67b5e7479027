// The library's one entry point, the accesses of a thread, and the traps that the compiler puts into a body.
#include <cstring>

#include "fiber.hpp"
#include "scheduler.hpp"

namespace emu {

int thread_index() { return launch.current->thread; }
int cta_index() { return launch.current->cta->id; }
int grid_extent() { return launch.grid; }

const void* global_read(const void* p, int bytes, int line) {
  launch.global.check(p, bytes, false, line);
  return p;
}

void* global_write(void* p, int bytes, int line) {
  launch.global.check(p, bytes, true, line);
  return p;
}

const u8* shared_read(u32 addr, int bytes, int line) {
  const Fiber& fiber = *launch.current;
  return fiber.cta->shared.read(addr, bytes, fiber.actor(), fiber.cta->clocks, line);
}

u8* shared_write(u32 addr, int bytes, int line) {
  const Fiber& fiber = *launch.current;
  return fiber.cta->shared.write(addr, bytes, fiber.actor(), fiber.cta->clocks, line);
}

void proxy_fence(int line) {
  const Fiber& fiber = *launch.current;
  mbarrier_fence_init(line);
  fiber.cta->shared.fence(fiber.actor(), fiber.cta->clocks);
}

}  // namespace emu

// -fsanitize=bounds,integer-divide-by-zero calls these where a body would corrupt or kill the process. Each check's
// data start with the place in the source.
struct SourceLocation {
  const char* file;
  u32 line;
  u32 column;
};

extern "C" void __ubsan_handle_out_of_bounds(SourceLocation* where, u64 index) {
  emu::fail((int)where->line, "index %lld is outside a register array", (i64)(int)index);
}

extern "C" void __ubsan_handle_divrem_overflow(SourceLocation* where, u64, u64) {
  emu::fail((int)where->line, "integer division by zero");
}

// Kernels take their parameters by value, some of them aligned to 64 bytes. CUDA before 12.1 allows 4 KB.
alignas(64) static u8 aligned_params[4096];

// Runs one kernel over `grid` CTAs, one after the other. Returns 0, or 1 with result->message set.
extern "C" __attribute__((visibility("default"))) int attngen_run(int kernel, int grid, const void* params,
                                                                  const emu::Region* regions, int region_count, int mode,
                                                                  u64 seed, emu::Result* result) {
  using emu::launch;
  const emu::KernelEntry& entry = attngen_kernels[kernel];
  memset(result, 0, sizeof *result);
  launch.kernel = &entry;
  launch.params = memcpy(aligned_params, params, entry.params_bytes);
  launch.grid = grid;
  launch.mode = (emu::Mode)mode;
  launch.random_state = seed * 0x9e3779b97f4a7c15ull + 1;
  launch.global = emu::GlobalMemory(regions, region_count);
  launch.result = result;
  for (int id = 0; id < grid && !result->failed; id++) {
    emu::Cta cta(id, entry.threads, entry.smem_bytes);
    emu::run_cta(cta);
  }
  launch.current = nullptr;
  emu::release_stacks();
  return result->failed;
}

// The size of a kernel's parameters in bytes, so that the caller can be checked.
extern "C" __attribute__((visibility("default"))) u64 attngen_params_bytes(int kernel) {
  return attngen_kernels[kernel].params_bytes;
}
