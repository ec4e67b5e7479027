#include "mbarrier.hpp"

#include <cstdio>

#include "scheduler.hpp"

namespace emu {

static constexpr int MAX_COUNT = (1 << 20) - 1;

Barrier* Barriers::find(u32 addr) {
  for (Barrier& b : all) {
    if (b.addr == addr) return &b;
  }
  return nullptr;
}

void mbarrier_init(u32 addr, int count, int line) {
  const Fiber& fiber = *launch.current;
  Cta& cta = *fiber.cta;
  if (count < 1 || count > MAX_COUNT) fail(line, "mbarrier_init for %d arrivals: 1 to %d", count, MAX_COUNT);
  cta.shared.place_barrier(addr, fiber.actor(), cta.clocks, line);
  Barrier b;
  b.addr = addr, b.line = line, b.count = b.pending = count;
  b.maker = fiber.actor(), b.epoch = cta.clocks.now(fiber.warp()), b.fenced = false;
  b.engine = cta.add_engine("the loads of the mbarrier at base+%lld", b.offset());
  b.next.resize(cta.threads, Barrier::UNKNOWN);
  cta.mbarriers.all.push_back(std::move(b));
}

void mbarrier_fence_init(int) {
  const Fiber& fiber = *launch.current;
  for (Barrier& b : fiber.cta->mbarriers.all) {
    if (b.maker.agent == fiber.warp() && b.maker.lane == fiber.lane()) b.fenced = true;
  }
}

Barrier& usable_barrier(u32 addr, const char* what, int line) {
  const Fiber& fiber = *launch.current;
  Cta& cta = *fiber.cta;
  Barrier* b = cta.mbarriers.find(addr);
  if (b == nullptr) fail(line, "%s: no mbarrier was initialised at base%+lld", what, (i64)addr - SHARED_BASE);
  const bool own = b->maker.agent == fiber.warp() && b->maker.lane == fiber.lane();
  if (!own && b->epoch > cta.clocks.seen(fiber.warp(), b->maker.agent)) {
    fail(line, "%s: the mbarrier at base+%u was initialised at line %d by another thread (missing barrier)", what,
         b->offset(), b->line);
  }
  return *b;
}

static void complete_phase(Barrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.phase++;
  b.pending = b.count;
  b.completed = b.arrivals;  // each phase also knows all that the phases before it knew
  for (Fiber* fiber : b.waiters) launch.ready.push(*fiber);
  b.waiters.clear();
}

static void arrive(Barrier& b, const char* what, int line) {
  const Fiber& fiber = *launch.current;
  fiber.cta->clocks.release(fiber.warp(), b.arrivals);
  if (b.pending == 0) {
    fail(line, "%s: more arrivals at the mbarrier at base+%u than the %d of a phase (phase %d waits for %lld bytes)",
         what, b.offset(), b.count, b.phase, b.bytes);
  }
  b.pending--;
  complete_phase(b);
}

void mbarrier_arrive_at(u32 addr, int line) {
  arrive(usable_barrier(addr, "mbarrier_arrive", line), "mbarrier_arrive", line);
}

void mbarrier_expect(u32 addr, int bytes, int line) {
  Barrier& b = usable_barrier(addr, "mbarrier_arrive_expect_tx", line);
  if (bytes < 0 || bytes > MAX_COUNT) fail(line, "mbarrier_arrive_expect_tx of %d bytes: 0 to %d", bytes, MAX_COUNT);
  b.bytes += bytes;
  arrive(b, "mbarrier_arrive_expect_tx", line);
}

void complete_bytes(Barrier& b, int bytes, u32 epoch, int line) {
  b.arrivals.raise(b.engine, epoch);
  b.bytes -= bytes;
  if (b.bytes < 0 && b.pending == 0) {
    fail(line, "the mbarrier at base+%u gets %lld bytes more than phase %d was told to expect", b.offset(), -b.bytes,
         b.phase);
  }
  complete_phase(b);
}

void mbarrier_wait_at(u32 addr, int parity, int line) {
  Fiber& fiber = *launch.current;
  Barrier& b = usable_barrier(addr, "mbarrier_wait", line);
  if (parity != 0 && parity != 1) fail(line, "mbarrier_wait for parity %d: 0 or 1", parity);
  int& next = b.next[fiber.thread];
  // A thread that starts with parity 1 means the phase before the first, which counts as complete.
  if (next == Barrier::UNKNOWN) next = parity == 0 ? 0 : -1;
  if ((next & 1) != parity) {
    fail(line, "mbarrier_wait for parity %d at base+%u: the next phase of this thread's own sequence is %d, of parity "
         "%d", parity, b.offset(), next, next & 1);
  }
  while (b.phase == next) {
    b.waiters.push_back(&fiber);
    block("mbarrier_wait", line);
  }
  if (b.phase != next + 1) {
    fail(line, "mbarrier_wait for phase %d at base+%u is %d phases behind: parity cannot tell them apart", next,
         b.offset(), b.phase - next - 1);
  }
  if (b.load_line != 0 && next >= b.load_phase) b.load_line = 0;
  next++;
  fiber.cta->clocks.acquire(fiber.warp(), b.completed);
}

void check_mbarriers_at_end(const Cta& cta) {
  for (const Barrier& b : cta.mbarriers.all) {
    if (b.load_line != 0) {
      fail(b.load_line, "kernel ends with a load in flight (issued here; nobody waited for phase %d of the mbarrier at "
           "base+%u)", b.load_phase, b.offset());
    }
  }
}

int describe_mbarriers(const Cta& cta, char* text, size_t size) {
  int length = 0;
  for (const Barrier& b : cta.mbarriers.all) {
    if (b.waiters.empty() || length >= (int)size) continue;
    length += snprintf(text + length, size - length,
                       "; mbarrier at base+%u: phase %d lacks %d of %d arrivals and %lld bytes", b.offset(), b.phase,
                       b.pending, b.count, b.bytes);
  }
  return length;
}

}  // namespace emu
