#include "collective.hpp"

namespace emu {

Gathering& Fiber::warp_gathering() const { return cta->warp_gatherings[warp()]; }

bool gather(Gathering& g, const char* name, void* arguments, int line) {
  const int member = launch.current->thread - g.first;
  if (g.arrived == 0) {
    g.name = name;
    g.line = line;
  } else if (g.line != line || g.name != name) {
    const bool warp = g.size == WARP;
    fail(line, "%s %d diverged: %s %d is in %s, %d %s wait in %s at line %d", warp ? "warp" : "warpgroup",
         g.first / g.size, warp ? "lane" : "thread", member, name, g.arrived, warp ? "lanes" : "threads", g.name,
         g.line);
  }
  g.arguments[member] = arguments;
  if (++g.arrived < g.size) {
    block(name, line);
    return false;
  }
  g.arrived = 0;
  return true;
}

void release(const Gathering& g) {
  Fiber* members = &launch.current->cta->fibers[g.first];
  for (int i = 0; i < g.size; i++) {
    if (&members[i] != launch.current) launch.ready.push(members[i]);
  }
}

Gathering& warpgroup_gathering(const char* name, int line) {
  const Fiber& fiber = *launch.current;
  Cta& cta = *fiber.cta;
  const size_t group = (size_t)(fiber.thread / WARPGROUP);
  if (group >= cta.warpgroup_gatherings.size()) {
    fail(line, "%s in an incomplete warpgroup: the CTA has %d threads", name, cta.threads);
  }
  return cta.warpgroup_gatherings[group];
}

// A warp arrives when its last lane does; the last warp orders all and wakes all.
void cta_barrier(int line) {
  if (!gather(launch.current->warp_gathering(), "cta_sync", nullptr, line)) return;
  Cta& cta = *launch.current->cta;
  if (++cta.warps_at_barrier < cta.warps) {
    block("cta_sync", line);
    return;
  }
  cta.warps_at_barrier = 0;
  cta.clocks.synchronize(0, cta.warps);
  launch.result->collectives++;
  for (Fiber& fiber : cta.fibers) {
    if (&fiber != launch.current) launch.ready.push(fiber);
  }
}

struct Word {
  u32 in, out;
};

u32 warp_exchange(u32 x, int mask, int line) {
  struct Exchange {
    u32 in, out;
    int mask;
  } lane{x, 0, mask};
  warp_collective("shfl_xor", lane, line, [line](Exchange* const* lanes) {
    for (int i = 0; i < WARP; i++) {
      const int mask = lanes[i]->mask;
      if (mask < 0 || mask >= WARP) fail(line, "shfl_xor with mask %d: 0 to 31 is allowed", mask);
      lanes[i]->out = lanes[i ^ mask]->in;
    }
  });
  return lane.out;
}

u32 warp_broadcast(u32 x, int line) {
  Word lane{x, 0};
  warp_collective("uniform", lane, line, [](Word* const* lanes) {
    for (int i = 0; i < WARP; i++) lanes[i]->out = lanes[0]->in;
  });
  return lane.out;
}

u32 warp_vote(bool x, int line) {
  Word lane{x, 0};
  warp_collective("vote", lane, line, [](Word* const* lanes) {
    u32 ballot = 0;
    for (int i = 0; i < WARP; i++) ballot |= lanes[i]->in << i;
    for (int i = 0; i < WARP; i++) lanes[i]->out = ballot;
  });
  return lane.out;
}

}  // namespace emu
