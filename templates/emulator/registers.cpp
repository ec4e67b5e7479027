#include "registers.hpp"

#include <algorithm>
#include <cstdio>

#include "collective.hpp"

namespace emu {

static constexpr int SM_REGISTERS = 65536, MOST = 255, UNIT = 8, LOW = 24, HIGH = 256;
static constexpr int WARPS_PER_GROUP = WARPGROUP / WARP;

// The compiler gives each thread of a CTA that is alone on its SM this many registers.
RegisterPool::RegisterPool(int threads)
    : warps(threads / WARP, Share{std::min(SM_REGISTERS / threads / UNIT * UNIT, MOST)}) {}

struct Request {
  int registers;
  bool increase;
};

static void check(const Cta& cta, int warp, const Request& request, const char* name, int line) {
  const int n = request.registers;
  if (n < LOW || n > HIGH || n % UNIT != 0) fail(line, "%s<%d>: a multiple of 8 from 24 to 256", name, n);
  const RegisterPool::Share& own = cta.registers.warps[warp];
  if (own.line != 0) fail(line, "%s<%d>: warp %d has executed setmaxnreg at line %d", name, n, warp, own.line);
  if (request.increase ? n < own.registers : n > own.registers) {
    fail(line, "%s<%d>: warp %d has %d registers a thread", name, n, warp, own.registers);
  }
  const int first = warp / WARPS_PER_GROUP * WARPS_PER_GROUP;
  for (int w = first; w < std::min(first + WARPS_PER_GROUP, cta.warps); w++) {
    const RegisterPool::Share& other = cta.registers.warps[w];
    if (other.line != 0 && other.registers != n) {
      fail(line, "%s<%d> in warp %d: warp %d of the same warpgroup has asked for %d at line %d", name, n, warp, w,
           other.registers, other.line);
    }
  }
}

// A warp whose last lane is here takes what it needs, or waits until others have given it back.
void set_max_registers(int registers, bool increase, int line) {
  const char* name = increase ? "setmaxnreg_inc" : "setmaxnreg_dec";
  Request lane{registers, increase};
  Gathering& warp = launch.current->warp_gathering();
  if (!gather(warp, name, &lane, line)) return;
  Fiber& self = *launch.current;
  Cta& cta = *self.cta;
  RegisterPool& pool = cta.registers;
  check(cta, self.warp(), lane, name, line);
  const int more = (registers - pool.warps[self.warp()].registers) * WARP;
  while (more > pool.free) {
    pool.waiters.push_back(&self);
    block(name, line);
  }
  pool.free -= more;
  pool.warps[self.warp()] = {registers, line};
  if (more < 0) {
    for (Fiber* waiter : pool.waiters) launch.ready.push(*waiter);
    pool.waiters.clear();
  }
  release(warp);
}

void check_registers_at_end(const Cta& cta) {
  const std::vector<RegisterPool::Share>& warps = cta.registers.warps;
  for (int w = 0; w < cta.warps; w++) {
    const RegisterPool::Share& first = warps[w / WARPS_PER_GROUP * WARPS_PER_GROUP];
    if ((warps[w].line == 0) == (first.line == 0)) continue;
    const int with = first.line != 0 ? w / WARPS_PER_GROUP * WARPS_PER_GROUP : w;
    fail(warps[with].line, "setmaxnreg is for whole warpgroups: warp %d executed this one, warp %d none", with,
         first.line != 0 ? w : w / WARPS_PER_GROUP * WARPS_PER_GROUP);
  }
}

int describe_registers(const Cta& cta, char* text, size_t size) {
  if (cta.registers.waiters.empty()) return 0;
  return snprintf(text, size, "; setmaxnreg: %d registers are free, the warps that wait need more (the sum over the "
                  "warpgroups exceeds the %d a thread of the launch)", cta.registers.free,
                  std::min(SM_REGISTERS / cta.threads / UNIT * UNIT, MOST));
}

}  // namespace emu
