#include "memory.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emu {

// A signalling NaN as f32 and a NaN as bf16 and f16.
static constexpr u32 POISON = 0x7fa07fa0u;

void SharedMemory::Free::operator()(u8* p) const { free(p); }

SharedMemory::SharedMemory(int bytes, int warps)
    : size_((u32)bytes), warps_(warps), bytes_((u8*)aligned_alloc(1024, ((size_t)bytes + 1024) / 1024 * 1024)) {
  writes_.resize((size_ + WORD - 1) / WORD);
  reads_.resize(writes_.size() * (size_t)warps);
  fences_.resize(warps);
  for (u32 i = 0; i < size_ / WORD; i++) ((u32*)bytes_.get())[i] = POISON;
}

void SharedMemory::check_bounds(u32 addr, int bytes, const char* what, int line) const {
  if (addr < SHARED_BASE || (u64)addr + (u64)bytes > (u64)SHARED_BASE + size_) {
    fail(line, "shared %s of %d bytes at base%+lld is out of bounds (the kernel has %u bytes)", what, bytes,
         (i64)addr - SHARED_BASE, size_);
  }
}

void SharedMemory::check_address(u32 addr, int bytes, const char* what, int line) const {
  check_bounds(addr, bytes, what, line);
  if (addr % (u32)bytes != 0) {
    fail(line, "shared %s of %d bytes at base%+lld is misaligned", what, bytes, (i64)addr - SHARED_BASE);
  }
}

static bool ordered(u32 epoch, int agent, int lane, Actor actor, const Clocks& clocks) {
  if (epoch <= clocks.seen(actor.agent, agent)) return true;
  return agent == actor.agent && lane == actor.lane && lane != WHOLE;  // a thread follows its own program
}

const char* SharedMemory::describe(int agent, int lane, char (&text)[64]) const {
  if (agent >= warps_) {
    snprintf(text, sizeof text, "%s", engines_[agent - warps_].name.c_str());
  } else if (lane == WHOLE) {
    snprintf(text, sizeof text, "warp %d", agent);
  } else {
    snprintf(text, sizeof text, "warp %d lane %d", agent, lane);
  }
  return text;
}

Read& SharedMemory::last_read(u32 word, int agent) {
  if (agent < warps_) return reads_[(size_t)word * warps_ + agent];
  std::vector<Read>& reads = engines_[agent - warps_].reads;
  if (reads.empty()) reads.resize(writes_.size());
  return reads[word];
}

void SharedMemory::refuse_read(u32 word, int line) const {
  const Write& w = writes_[word];
  const u32 offset = word * WORD;
  if (w.state == WordState::unwritten) fail(line, "read of shared memory at base+%u that was never written", offset);
  if (w.state == WordState::barrier) {
    fail(line, "read of shared memory at base+%u, which holds the mbarrier initialised at line %d", offset, w.line);
  }
  fail(line, "read of shared memory at base+%u while the copy issued at line %d is in flight (missing wait)", offset,
       w.line);
}

const u8* SharedMemory::read(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line) {
  const bool engine = actor.agent >= warps_;
  if (!engine) check_address(addr, bytes, "read", line);
  const u32 first = (addr - SHARED_BASE) / WORD, last = (addr - SHARED_BASE + (u32)bytes - 1) / WORD;
  for (u32 word = first; word <= last; word++) {
    const Write& w = writes_[word];
    char reader[64], writer[64];
    if (w.state != WordState::written) refuse_read(word, line);
    if (!ordered(w.epoch, w.agent, w.lane, actor, clocks)) {
      fail(line, "race: read of shared memory at base+%u by %s is not ordered after the write of %s at line %d "
           "(missing barrier)", word * WORD, describe(actor.agent, actor.lane, reader),
           describe(w.agent, w.lane, writer), w.line);
    }
    if (engine && w.agent < warps_ && !visible(w, actor.agent, clocks)) {
      fail(line, "read of shared memory at base+%u by %s does not see the write of %s at line %d (missing "
           "fence_proxy_async before the barrier)", word * WORD, describe(actor.agent, actor.lane, reader),
           describe(w.agent, w.lane, writer), w.line);
    }
    Read& r = last_read(word, actor.agent);
    const u32 now = clocks.now(actor.agent);
    r.lane = r.epoch == now && (int)r.lane != actor.lane ? WHOLE : (unsigned)actor.lane;
    r.epoch = now;
    r.line = line;
  }
  return data(addr);
}

void SharedMemory::check_after_read(u32 word, const Read& r, int agent, Actor actor, const Clocks& clocks,
                                    int line) const {
  if (r.epoch == 0 || ordered(r.epoch, agent, (int)r.lane, actor, clocks)) return;
  char writer[64], reader[64];
  fail(line, "race: write to shared memory at base+%u by %s is not ordered after the read of %s at line %d (missing "
       "barrier)", word * WORD, describe(actor.agent, actor.lane, writer), describe(agent, (int)r.lane, reader),
       (int)r.line);
}

void SharedMemory::check_overwrite(u32 word, Actor actor, const Clocks& clocks, int line) const {
  const Write& w = writes_[word];
  const u32 offset = word * WORD;
  if (w.state == WordState::in_flight) {
    fail(line, "write to shared memory at base+%u while the copy issued at line %d is in flight (missing wait)", offset,
         w.line);
  }
  if (w.state == WordState::barrier) {
    fail(line, "write to shared memory at base+%u, which holds the mbarrier initialised at line %d", offset, w.line);
  }
  if (w.state == WordState::written && !ordered(w.epoch, w.agent, w.lane, actor, clocks)) {
    char writer[64], other[64];
    fail(line, "race: write to shared memory at base+%u by %s is not ordered after the write of %s at line %d (missing "
         "barrier)", offset, describe(actor.agent, actor.lane, writer), describe(w.agent, w.lane, other), w.line);
  }
  const bool ordinary = w.state == WordState::written && w.agent < warps_;
  if (ordinary && actor.agent >= warps_ && !visible(w, actor.agent, clocks)) {
    char writer[64], other[64];
    fail(line, "write to shared memory at base+%u by %s may come before the write of %s at line %d (missing "
         "fence_proxy_async before the barrier)", offset, describe(actor.agent, actor.lane, writer),
         describe(w.agent, w.lane, other), w.line);
  }
  for (int b = 0; b < warps_; b++) {
    check_after_read(word, reads_[(size_t)word * warps_ + b], b, actor, clocks, line);
  }
  for (size_t e = 0; e < engines_.size(); e++) {
    const std::vector<Read>& reads = engines_[e].reads;
    if (!reads.empty()) check_after_read(word, reads[word], warps_ + (int)e, actor, clocks, line);
  }
}

void SharedMemory::mark(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line, WordState state) {
  const u32 first = (addr - SHARED_BASE) / WORD, last = (addr - SHARED_BASE + (u32)bytes - 1) / WORD;
  const u32 now = clocks.now(actor.agent);
  for (u32 word = first; word <= last; word++) {
    check_overwrite(word, actor, clocks, line);
    writes_[word] = {now, 0, line, (u16)actor.agent, (u8)actor.lane, state};
    if (actor.agent < warps_) writes_[word].fences = fences_[actor.agent].count;
  }
  if (actor.agent >= warps_) return;
  if (!swizzles_.empty()) set_swizzle(addr, bytes, 0);
}

u8* SharedMemory::write(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line) {
  check_address(addr, bytes, "write", line);
  mark(addr, bytes, actor, clocks, line, WordState::written);
  return data(addr);
}

void SharedMemory::begin_write(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line) {
  if (actor.agent < warps_) check_address(addr, bytes, "write", line);
  mark(addr, bytes, actor, clocks, line, WordState::in_flight);
}

void SharedMemory::settle(u32 addr, int bytes, Actor actor, const Clocks& clocks) {
  const u32 first = (addr - SHARED_BASE) / WORD, last = (addr - SHARED_BASE + (u32)bytes - 1) / WORD;
  for (u32 word = first; word <= last; word++) {
    writes_[word].state = WordState::written;
    writes_[word].epoch = clocks.now(actor.agent);
    writes_[word].fences = fences_[actor.agent].count;
  }
}

void SharedMemory::land(u32 addr, int bytes) {
  const u32 first = (addr - SHARED_BASE) / WORD, count = (u32)bytes / WORD;
  for (u32 word = first; word < first + count; word++) writes_[word].state = WordState::written;
}

void SharedMemory::place_barrier(u32 addr, Actor actor, const Clocks& clocks, int line) {
  check_address(addr, 8, "mbarrier", line);
  mark(addr, 8, actor, clocks, line, WordState::barrier);
}

void SharedMemory::fence(Actor actor, const Clocks& clocks) {
  Fences& fences = fences_[actor.agent];
  fences.lanes[actor.lane].push_back({++fences.count, clocks.now(actor.agent)});
}

// Each lane that took part in the write has executed a fence since, and the reader is ordered after these.
bool SharedMemory::visible(const Write& w, int reader, const Clocks& clocks) const {
  const Fences& fences = fences_[w.agent];
  const int first = w.lane == WHOLE ? 0 : w.lane, last = w.lane == WHOLE ? WHOLE : w.lane + 1;
  for (int lane = first; lane < last; lane++) {
    const auto later = [](u32 number, const Fences::Fence& f) { return number < f.number; };
    const std::vector<Fences::Fence>& own = fences.lanes[lane];
    const auto found = std::upper_bound(own.begin(), own.end(), w.fences, later);
    if (found == own.end() || found->epoch > clocks.seen(reader, w.agent)) return false;
  }
  return true;
}

void SharedMemory::set_swizzle(u32 addr, int bytes, int span) {
  if (swizzles_.empty()) swizzles_.resize(size_ / CHUNK + 1);
  const u32 first = (addr - SHARED_BASE) / CHUNK, last = (addr - SHARED_BASE + (u32)bytes - 1) / CHUNK;
  memset(&swizzles_[first], span, last - first + 1);
}

void GlobalMemory::check(const void* p, int bytes, bool writing, int line) {
  check_bounds(p, bytes, writing, line);
  if ((u64)p % (u64)bytes != 0) {
    const Region& r = regions_[last_];
    fail(line, "global %s of %d bytes at %s+%llu is misaligned", writing ? "write" : "read", bytes, r.name,
         (u64)p - r.address);
  }
}

void GlobalMemory::check_bounds(const void* p, int bytes, bool writing, int line) {
  const u64 address = (u64)p;
  const auto holds = [&](const Region& r) {
    return address >= r.address && address + (u64)bytes <= r.address + r.bytes && (!writing || r.writable);
  };
  if (last_ >= regions_.size() || !holds(regions_[last_])) {
    last_ = 0;
    while (last_ < regions_.size() && !holds(regions_[last_])) last_++;
    if (last_ == regions_.size()) refuse(address, bytes, writing, line);
  }
}

void GlobalMemory::refuse(u64 address, int bytes, bool writing, int line) const {
  const char* what = writing ? "write" : "read";
  const Region* nearest = nullptr;
  u64 nearest_distance = ~(u64)0;
  for (const Region& r : regions_) {
    const u64 end = r.address + r.bytes;
    const u64 distance = address < r.address ? r.address - address : address >= end ? address - end : 0;
    if (distance < nearest_distance) nearest = &r, nearest_distance = distance;
  }
  if (nearest == nullptr) fail(line, "global %s of %d bytes at 0x%llx: no memory is registered", what, bytes, address);
  const i64 offset = (i64)(address - nearest->address);
  if (writing && offset >= 0 && (u64)offset + (u64)bytes <= nearest->bytes) {
    fail(line, "global write of %d bytes at %s%+lld, which is read-only", bytes, nearest->name, offset);
  }
  fail(line, "global %s of %d bytes at %s%+lld is out of bounds (%s has %llu bytes)", what, bytes, nearest->name, offset,
       nearest->name, nearest->bytes);
}

}  // namespace emu
