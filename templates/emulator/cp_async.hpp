// cp.async: a thread's copies, in groups, from their issue to the wait that demands them.
#pragma once
#include <deque>

#include "device.hpp"

namespace emu {

struct Copy {
  u32 dst;
  int bytes;
  const void* src;  // null: zeros
  int line;
  bool landed;
};

struct CopyQueue {
  std::deque<Copy> copies;   // issued and not yet waited for, oldest first
  std::deque<int> groups;    // how many copies each committed group has, oldest first
  int open = 0;              // copies issued since the last commit
};

struct Fiber;

// One copy of a random thread takes effect, if that thread has one.
void land_at_random();

// A thread ends: nothing of its own may be in flight.
void check_copies_at_exit(const Fiber& fiber);

}  // namespace emu
