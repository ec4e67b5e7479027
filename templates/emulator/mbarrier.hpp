// mbarriers: objects in shared memory that count arrivals and bytes, phase after phase.
#pragma once
#include <cstddef>
#include <deque>
#include <vector>

#include "clock.hpp"
#include "memory.hpp"

namespace emu {

struct Cta;
struct Fiber;

struct Barrier {
  static constexpr int UNKNOWN = -2;

  u32 addr;
  int line;   // where it was initialised, by whom and when
  Actor maker;
  u32 epoch;
  bool fenced;  // the copy engine knows of it
  int count;    // arrivals a phase
  int engine;   // the agent of the loads that complete it
  int pending;  // arrivals that this phase still waits for
  i64 bytes = 0;  // that this phase still waits for; below 0 while loads run ahead of their announcement
  int phase = 0;  // the one in progress: waits for parity phase % 2 block
  Moment arrivals, completed;  // of this phase, of the last
  std::vector<int> next;       // per thread: the phase that its next wait is for
  std::vector<Fiber*> waiters;
  int load_line = 0, load_phase = 0;  // the latest load that nobody has waited for

  u32 offset() const { return addr - SHARED_BASE; }
};

// The barriers of a CTA, in the order in which they were initialised.
struct Barriers {
  std::deque<Barrier> all;
  Barrier* find(u32 addr);
};

// The barrier at an address, as the running thread may use it. An error if there is none, or none that it can know of.
Barrier& usable_barrier(u32 addr, const char* what, int line);

// A load of the copy engine has arrived.
void complete_bytes(Barrier& barrier, int bytes, u32 epoch, int line);

void check_mbarriers_at_end(const Cta& cta);

// "; mbarrier at base+8: phase 0 lacks 1 arrivals and 0 bytes", for each at which somebody waits.
int describe_mbarriers(const Cta& cta, char* text, size_t size);

}  // namespace emu
