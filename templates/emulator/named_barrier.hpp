// bar.sync and bar.arrive with a number: sixteen barriers, each for a number of threads that may change from one
// generation to the next. Warps arrive as a whole, as bar.sync.aligned has it.
#pragma once
#include <cstddef>
#include <vector>

#include "clock.hpp"

namespace emu {

struct Cta;
struct Fiber;

// One generation: from the first arrival to the one that completes it.
struct Generation {
  int expected = 0;  // threads
  int arrived = 0;
  int line = 0;  // of the first arrival
  u32 warps = 0;  // that have arrived
  std::vector<Fiber*> waiting;
  std::vector<int> waiting_warps;
  Moment arrivals;
};

struct NamedBarriers {
  static constexpr int COUNT = 16;
  Generation current[COUNT];
};

// The CTA has ended: no barrier may be half full.
void check_named_barriers_at_end(const Cta& cta);

// "; named barrier 1: 128 of 256 threads have arrived", for each at which somebody waits. The length, as snprintf's.
int describe_named_barriers(const Cta& cta, char* text, size_t size);

}  // namespace emu
