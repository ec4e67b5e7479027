// setmaxnreg: warpgroups trade registers with a pool that holds what the CTA was launched with and nobody has now.
#pragma once
#include <cstddef>
#include <vector>

#include "types.hpp"

namespace emu {

struct Cta;
struct Fiber;

struct RegisterPool {
  explicit RegisterPool(int threads);

  struct Share {  // of a warp
    int registers;  // a thread
    int line = 0;   // of its setmaxnreg, 0: none yet
  };
  std::vector<Share> warps;
  int free = 0;
  std::vector<Fiber*> waiters;
};

// The CTA has ended: a warpgroup's warps must have executed the same.
void check_registers_at_end(const Cta& cta);

// "; 1536 registers are free", when somebody waits for more.
int describe_registers(const Cta& cta, char* text, size_t size);

}  // namespace emu
