// Who runs: the fibers of a CTA, the queue of those that can go on, and what happens when none can.
#pragma once
#include <vector>

#include "clock.hpp"
#include "cp_async.hpp"
#include "mbarrier.hpp"
#include "memory.hpp"
#include "named_barrier.hpp"
#include "registers.hpp"
#include "tma.hpp"
#include "wgmma.hpp"

namespace emu {

constexpr int MAX_THREADS = 1024, WARP = 32, WARPGROUP = 128;

// When an asynchronous operation takes effect. Numbered as in attngen.emulator.Mode.
enum class Mode : int { eager, late, random };

struct Cta;
struct Gathering;

struct Fiber {
  void* context = nullptr;
  Cta* cta = nullptr;
  int thread = 0;
  bool done = false;
  const char* waits_in = "";  // the primitive, and its line, at which it last stopped
  int line = 0;
  CopyQueue copies;

  int warp() const { return thread / WARP; }
  int lane() const { return thread % WARP; }
  Actor actor() const { return {warp(), lane()}; }
  Gathering& warp_gathering() const;
};

// Threads of a warp or warpgroup that wait for the others in a collective.
struct Gathering {
  int first, size;
  int arrived = 0;
  const char* name = "";
  int line = 0;
  void* arguments[WARPGROUP] = {};
};

// One CTA: its threads and what they share.
struct Cta {
  Cta(int id, int threads, int smem_bytes);

  int id, threads, warps;
  std::vector<Fiber> fibers;
  std::vector<Gathering> warp_gatherings, warpgroup_gatherings;
  int warps_at_barrier = 0;
  int exited = 0;
  Clocks clocks;
  SharedMemory shared;

  // What only some targets have; each is empty until it is used.
  Barriers mbarriers;
  NamedBarriers named_barriers;
  CopyEngine copy_engine;
  std::vector<ProductUnit> product_units;  // one a warpgroup
  RegisterPool registers;

  // A new agent beside the warps: an engine, with its name in messages.
  int add_engine(const char* format, long long number);
};

// Threads that can run, first in first out, or at random.
class ReadyQueue {
 public:
  void clear() { head_ = count_ = 0; }
  bool empty() const { return count_ == 0; }
  void push(Fiber& fiber) { slots_[(head_ + count_++) % MAX_THREADS] = &fiber; }
  Fiber& pop() {
    Fiber* fiber = slots_[head_];
    head_ = (head_ + 1) % MAX_THREADS;
    count_--;
    return *fiber;
  }
  Fiber& pop(u32 random) {
    std::swap(slots_[head_], slots_[(head_ + random % count_) % MAX_THREADS]);
    return pop();
  }

 private:
  Fiber* slots_[MAX_THREADS];
  u32 head_ = 0, count_ = 0;
};

// Reported to Python. Laid out as ctypes declares it.
struct Result {
  int failed;
  int cta;
  int line;  // 0: no one line
  char message[4096];
  u64 switches;
  u64 collectives;
};

// The launch in progress. One at a time in a library; the Python side holds a lock.
struct Launch {
  const KernelEntry* kernel = nullptr;
  const void* params = nullptr;
  int grid = 0;
  Mode mode = Mode::late;
  u64 random_state = 0;
  GlobalMemory global;
  Result* result = nullptr;

  Fiber* current = nullptr;
  void* host = nullptr;  // the context of launch, to which an error or the end of the CTA returns
  ReadyQueue ready;

  u32 random();
};
extern Launch launch;

// Runs the CTA's threads to their end or to the first error.
void run_cta(Cta& cta);

// Stops the running thread until another, or an engine, makes it ready.
void block(const char* waits_in, int line);

}  // namespace emu
