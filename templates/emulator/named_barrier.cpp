#include "named_barrier.hpp"

#include <cstdio>

#include "collective.hpp"

namespace emu {

static void check_arguments(int id, int threads, const char* name, int line) {
  const Cta& cta = *launch.current->cta;
  if (id < 1 || id >= NamedBarriers::COUNT) fail(line, "%s at barrier %d: 1 to 15 (0 is cta_sync's)", name, id);
  if (threads % WARP != 0 || threads < WARP || threads > cta.threads) {
    fail(line, "%s for %d threads: a multiple of 32 up to the CTA's %d", name, threads, cta.threads);
  }
}

static void complete(Cta& cta, Generation& g) {
  for (int warp : g.waiting_warps) cta.clocks.acquire(warp, g.arrivals);
  for (Fiber* fiber : g.waiting) {
    if (fiber != launch.current) launch.ready.push(*fiber);
  }
  launch.result->collectives++;
  g = Generation();
}

struct NamedArrival {
  int id, threads;
};

// The warp's last lane does this for all of them; `waits`: the warp goes on when the generation is complete.
static void arrive(NamedArrival* const* lanes, bool waits, const char* name, int line) {
  const Fiber& fiber = *launch.current;
  Cta& cta = *fiber.cta;
  for (int i = 0; i < WARP; i++) {
    if (lanes[i]->id != lanes[0]->id || lanes[i]->threads != lanes[0]->threads) {
      fail(line, "lanes 0 and %d of warp %d are in %s at different barriers or for different numbers of threads", i,
           fiber.warp(), name);
    }
  }
  const int id = lanes[0]->id, threads = lanes[0]->threads;
  check_arguments(id, threads, name, line);
  Generation& g = cta.named_barriers.current[id];
  if (g.arrived == 0) {
    g.expected = threads;
    g.line = line;
  } else if (g.expected != threads) {
    fail(line, "named barrier %d: warp %d arrives for %d threads, others at line %d for %d", id, fiber.warp(), threads,
         g.line, g.expected);
  }
  if (g.warps >> fiber.warp() & 1u) {
    fail(line, "named barrier %d: warp %d arrives twice in one generation (the other warps have not taken the first)",
         id, fiber.warp());
  }
  g.warps |= 1u << fiber.warp();
  g.arrived += WARP;
  cta.clocks.release(fiber.warp(), g.arrivals);
  if (waits) g.waiting_warps.push_back(fiber.warp());
}

void named_barrier_arrive(int id, int threads, int line) {
  NamedArrival lane{id, threads};
  warp_collective("named_arrive", lane, line, [line](NamedArrival* const* lanes) {
    arrive(lanes, false, "named_arrive", line);
    Cta& cta = *launch.current->cta;
    Generation& g = cta.named_barriers.current[lanes[0]->id];
    if (g.arrived == g.expected) complete(cta, g);
  });
}

void named_barrier_sync(int id, int threads, int line) {
  NamedArrival lane{id, threads};
  Gathering& warp = launch.current->warp_gathering();
  if (!gather(warp, "named_sync", &lane, line)) return;  // released when the generation is complete
  arrive((NamedArrival* const*)warp.arguments, true, "named_sync", line);
  const Fiber& self = *launch.current;
  Cta& cta = *self.cta;
  Generation& g = cta.named_barriers.current[id];
  for (int i = 0; i < WARP; i++) g.waiting.push_back(&cta.fibers[warp.first + i]);
  if (g.arrived == g.expected) {
    complete(cta, g);
  } else {
    block("named_sync", line);
  }
}

void check_named_barriers_at_end(const Cta& cta) {
  for (int id = 0; id < NamedBarriers::COUNT; id++) {
    const Generation& g = cta.named_barriers.current[id];
    if (g.arrived != 0) {
      fail(g.line, "kernel ends with named barrier %d half full: %d of %d threads have arrived", id, g.arrived,
           g.expected);
    }
  }
}

int describe_named_barriers(const Cta& cta, char* text, size_t size) {
  int length = 0;
  for (int id = 0; id < NamedBarriers::COUNT && length < (int)size; id++) {
    const Generation& g = cta.named_barriers.current[id];
    if (g.waiting.empty()) continue;
    length += snprintf(text + length, size - length, "; named barrier %d: %d of %d threads have arrived", id, g.arrived,
                       g.expected);
  }
  return length;
}

}  // namespace emu
