// Collectives: every lane brings its arguments to the same call, and the last one does the work for all.
#pragma once
#include "scheduler.hpp"

namespace emu {

// Brings the running lane to a collective of its warp. True in the lane that completes it, with the others still
// stopped; false in those others, once they have been released.
bool gather(const char* name, void* arguments, int line);

// Makes the other lanes of the running thread's warp ready.
void release_warp();

// `apply` gets the arguments of the 32 lanes, in order.
template <class Arguments, class Apply>
void warp_collective(const char* name, Arguments& arguments, int line, Apply apply) {
  if (!gather(name, &arguments, line)) return;
  const Fiber& fiber = *launch.current;
  apply((Arguments* const*)fiber.cta->gatherings[fiber.warp()].arguments);
  launch.result->collectives++;
  release_warp();
}

}  // namespace emu
