#include "collective.hpp"

namespace emu {

bool gather(const char* name, void* arguments, int line) {
  const Fiber& fiber = *launch.current;
  Gathering& g = fiber.cta->gatherings[fiber.warp()];
  if (g.arrived == 0) {
    g.name = name;
    g.line = line;
  } else if (g.line != line || g.name != name) {
    fail(line, "warp %d diverged: lane %d is in %s, %d lanes wait in %s at line %d", fiber.warp(), fiber.lane(), name,
         g.arrived, g.name, g.line);
  }
  g.arguments[fiber.lane()] = arguments;
  if (++g.arrived < WARP) {
    block(name, line);
    return false;
  }
  g.arrived = 0;
  return true;
}

void release_warp() {
  const Fiber& self = *launch.current;
  Fiber* lanes = &self.cta->fibers[(size_t)self.warp() * WARP];
  for (int i = 0; i < WARP; i++) {
    if (&lanes[i] != &self) launch.ready.push(lanes[i]);
  }
}

// A warp arrives when its last lane does; the last warp orders all and wakes all.
void cta_barrier(int line) {
  if (!gather("cta_sync", nullptr, line)) return;
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
