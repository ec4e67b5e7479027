#include "scheduler.hpp"

#include <cstdarg>
#include <cstdio>

#include "fiber.hpp"

namespace emu {

Launch launch;

Cta::Cta(int id, int threads, int smem_bytes)
    : id(id), threads(threads), warps(threads / WARP), fibers(threads), clocks(warps), shared(smem_bytes, warps),
      product_units(threads / WARPGROUP), registers(threads) {
  for (int t = 0; t < threads; t++) fibers[t].cta = this, fibers[t].thread = t;
  for (int t = 0; t < threads; t += WARP) warp_gatherings.push_back(Gathering{t, WARP});
  for (int t = 0; t + WARPGROUP <= threads; t += WARPGROUP) warpgroup_gatherings.push_back(Gathering{t, WARPGROUP});
}

int Cta::add_engine(const char* format, long long number) {
  char name[64];
  snprintf(name, sizeof name, format, number);
  shared.name_engine(name);
  return clocks.add();
}

u32 Launch::random() {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (u32)(random_state >> 33);
}

// The fibers are left where they are: their frames own nothing, and the next launch starts their stacks afresh.
void fail(int line, const char* format, ...) {
  Result& result = *launch.result;
  result.failed = 1;
  result.cta = launch.current->cta->id;
  result.line = line;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(result.message, sizeof result.message, format, arguments);
  va_end(arguments);
  void* abandoned;
  context_switch(&abandoned, launch.host);
  __builtin_unreachable();
}

// "27 lanes in cta_sync at line 8, 5 lanes exited" for one warp.
static int describe_warp(const Cta& cta, int warp, char* text, size_t size) {
  int length = 0;
  bool told[WARP] = {};
  for (int i = 0; i < WARP; i++) {
    const Fiber& f = cta.fibers[warp * WARP + i];
    if (told[i]) continue;
    int lanes = 0;
    for (int j = i; j < WARP; j++) {
      const Fiber& g = cta.fibers[warp * WARP + j];
      if (g.done != f.done || (!f.done && (g.line != f.line || g.waits_in != f.waits_in))) continue;
      told[j] = true;
      lanes++;
    }
    if (length >= (int)size) break;
    const char* comma = length ? ", " : "";
    length += f.done ? snprintf(text + length, size - length, "%s%d lanes exited", comma, lanes)
                     : snprintf(text + length, size - length, "%s%d lanes in %s at line %d", comma, lanes, f.waits_in,
                                f.line);
  }
  return length;
}

[[noreturn]] static void report_deadlock(const Cta& cta) {
  static char text[sizeof(Result::message) - 64];
  size_t length = 0;
  for (int w = 0; w < cta.warps && length < sizeof text; w++) {
    length += (size_t)snprintf(text + length, sizeof text - length, "%s warp %d: ", w ? ";" : "", w);
    if (length < sizeof text) length += (size_t)describe_warp(cta, w, text + length, sizeof text - length);
  }
  const auto append = [&](int (*describe)(const Cta&, char*, size_t)) {
    if (length < sizeof text) length += (size_t)describe(cta, text + length, sizeof text - length);
  };
  append(describe_mbarriers);
  append(describe_named_barriers);
  append(describe_registers);
  fail(0, "deadlock: no thread can go on;%s", text);
}

// All threads have ended.
static void check_at_end(const Cta& cta) {
  check_products_at_end(cta);
  check_named_barriers_at_end(cta);
  check_mbarriers_at_end(cta);
  check_registers_at_end(cta);
}

// Continues with the next thread that can run, or with the host when all have ended.
static void leave(Fiber& from) {
  if (launch.mode == Mode::random && launch.random() % 32 == 0) {
    land_at_random();
    advance_copies_at_random(*from.cta);
  }
  while (launch.ready.empty() && land_oldest_load(*from.cta)) {
  }
  if (launch.ready.empty()) {
    if (from.cta->exited < from.cta->threads) report_deadlock(*from.cta);
    check_at_end(*from.cta);
    context_switch(&from.context, launch.host);
  }
  Fiber& next = launch.mode == Mode::random ? launch.ready.pop(launch.random()) : launch.ready.pop();
  if (&next == &from) return;  // a copy that landed above woke it: the context saved for it is that of an older call
  launch.result->switches++;
  launch.current = &next;
  context_switch(&from.context, next.context);
}

void block(const char* waits_in, int line) {
  Fiber& fiber = *launch.current;
  fiber.waits_in = waits_in;
  fiber.line = line;
  leave(fiber);
}

static void run_thread() {
  launch.kernel->call(launch.params);
  Fiber& fiber = *launch.current;
  check_copies_at_exit(fiber);
  check_bulk_stores_at_exit(fiber);
  fiber.done = true;
  fiber.cta->exited++;
  leave(fiber);
  __builtin_unreachable();
}

void run_cta(Cta& cta) {
  launch.ready.clear();
  launch.current = &cta.fibers[0];
  for (Fiber& fiber : cta.fibers) {
    char* stack = stack_of(fiber.thread);
    if (stack == nullptr) {
      launch.result->failed = 1;
      snprintf(launch.result->message, sizeof launch.result->message, "no memory for the stacks of %d threads",
               cta.threads);
      return;
    }
    fiber.context = fresh_context(stack, run_thread);
    launch.ready.push(fiber);
  }
  launch.current = &launch.ready.pop();
  context_switch(&launch.host, launch.current->context);
}

}  // namespace emu
