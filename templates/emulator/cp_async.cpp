#include "cp_async.hpp"

#include <cstring>

#include "scheduler.hpp"

namespace emu {

static void land(Cta& cta, Copy& copy) {
  if (copy.landed) return;
  copy.landed = true;
  u8* dst = cta.shared.data(copy.dst);
  if (copy.src == nullptr) {
    memset(dst, 0, copy.bytes);
  } else {
    memcpy(dst, copy.src, copy.bytes);
  }
}

void copy_async(u32 dst, const void* src, int bytes, int src_bytes, int line) {
  Fiber& fiber = *launch.current;
  Cta& cta = *fiber.cta;
  if (src_bytes != 0 && src_bytes != bytes) fail(line, "cp_async_%d with src_bytes %d: 0 or %d", bytes, src_bytes, bytes);
  if (src_bytes != 0) launch.global.check(src, bytes, false, line);
  cta.shared.begin_write(dst, bytes, fiber.actor(), cta.clocks, line);
  fiber.copies.copies.push_back({dst, bytes, src_bytes != 0 ? src : nullptr, line, false});
  fiber.copies.open++;
  if (launch.mode == Mode::eager) land(cta, fiber.copies.copies.back());
}

void copy_async_commit(int) {
  CopyQueue& queue = launch.current->copies;
  queue.groups.push_back(queue.open);
  queue.open = 0;
}

void copy_async_wait(int groups_left, int) {
  Fiber& fiber = *launch.current;
  CopyQueue& queue = fiber.copies;
  while ((int)queue.groups.size() > groups_left) {
    for (int i = queue.groups.front(); i > 0; i--) {
      Copy& copy = queue.copies.front();
      land(*fiber.cta, copy);
      fiber.cta->shared.settle(copy.dst, copy.bytes, fiber.actor(), fiber.cta->clocks);
      queue.copies.pop_front();
    }
    queue.groups.pop_front();
  }
}

void land_at_random() {
  Cta& cta = *launch.current->cta;
  Fiber& fiber = cta.fibers[launch.random() % (u32)cta.threads];
  std::deque<Copy>& copies = fiber.copies.copies;
  if (!copies.empty()) land(cta, copies[launch.random() % copies.size()]);
}

void check_copies_at_exit(const Fiber& fiber) {
  const CopyQueue& queue = fiber.copies;
  if (queue.copies.empty()) return;
  const bool committed = (int)queue.copies.size() > queue.open;
  fail(queue.copies.front().line, "kernel ends with cp.async in flight (issued here, %s)",
       committed ? "never waited for" : "never committed");
}

}  // namespace emu
