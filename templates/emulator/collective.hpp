// Collectives: every thread brings its arguments to the same call, and the last one does the work for all.
#pragma once
#include "scheduler.hpp"

namespace emu {

// Brings the running thread to a collective of its warp or warpgroup. True in the thread that completes it, with the
// others still stopped; false in those others, once they have been released.
bool gather(Gathering& gathering, const char* name, void* arguments, int line);

// Makes the other threads of a gathering ready.
void release(const Gathering& gathering);

// `apply` gets the arguments of all threads, in order.
template <class Arguments, class Apply>
void collective(Gathering& gathering, const char* name, Arguments& arguments, int line, Apply apply) {
  if (!gather(gathering, name, &arguments, line)) return;
  apply((Arguments* const*)gathering.arguments);
  launch.result->collectives++;
  release(gathering);
}

template <class Arguments, class Apply>
void warp_collective(const char* name, Arguments& arguments, int line, Apply apply) {
  collective(launch.current->warp_gathering(), name, arguments, line, apply);
}

// The gathering of the running thread's warpgroup. An error where the CTA ends before the warpgroup does.
Gathering& warpgroup_gathering(const char* name, int line);

}  // namespace emu
