#include "memory.hpp"

#include <cstdlib>

namespace emu {

// A signalling NaN as f32 and a NaN as bf16 and f16.
static constexpr u32 POISON = 0x7fa07fa0u;

void SharedMemory::Free::operator()(u8* p) const { free(p); }

SharedMemory::SharedMemory(int bytes, int warps)
    : size_((u32)bytes), warps_(warps), bytes_((u8*)aligned_alloc(1024, ((size_t)bytes + 1024) / 1024 * 1024)) {
  writes_.resize((size_ + WORD - 1) / WORD);
  reads_.resize(writes_.size() * (size_t)warps);
  for (u32 i = 0; i < size_ / WORD; i++) ((u32*)bytes_.get())[i] = POISON;
}

void SharedMemory::check_address(u32 addr, int bytes, const char* what, int line) const {
  if (addr < SHARED_BASE || (u64)addr + (u64)bytes > (u64)SHARED_BASE + size_) {
    fail(line, "shared %s of %d bytes at base%+lld is out of bounds (the kernel has %u bytes)", what, bytes,
         (i64)addr - SHARED_BASE, size_);
  }
  if (addr % (u32)bytes != 0) {
    fail(line, "shared %s of %d bytes at base%+lld is misaligned", what, bytes, (i64)addr - SHARED_BASE);
  }
}

static bool ordered(u32 epoch, int warp, int lane, Actor actor, const Clocks& clocks) {
  if (epoch <= clocks.seen(actor.warp, warp)) return true;
  return warp == actor.warp && lane == actor.lane && lane != WHOLE_WARP;  // a thread follows its own program
}

static void describe(int lane, char (&text)[16]) {
  if (lane == WHOLE_WARP) {
    __builtin_strcpy(text, "");
  } else {
    __builtin_snprintf(text, sizeof text, " lane %d", lane);
  }
}

const u8* SharedMemory::read(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line) {
  check_address(addr, bytes, "read", line);
  const u32 first = (addr - SHARED_BASE) / WORD, last = (addr - SHARED_BASE + (u32)bytes - 1) / WORD;
  for (u32 word = first; word <= last; word++) {
    const Write& w = writes_[word];
    const u32 offset = word * WORD;
    if (w.state == WordState::unwritten) fail(line, "read of shared memory at base+%u that was never written", offset);
    if (w.state == WordState::in_flight) {
      fail(line, "read of shared memory at base+%u while the copy issued at line %d is in flight (missing wait)", offset,
           w.line);
    }
    if (!ordered(w.epoch, w.warp, w.lane, actor, clocks)) {
      char reader[16], writer[16];
      describe(actor.lane, reader), describe(w.lane, writer);
      fail(line, "race: read of shared memory at base+%u by warp %d%s is not ordered after the write of warp %d%s at "
           "line %d (missing barrier)", offset, actor.warp, reader, w.warp, writer, w.line);
    }
    Read& r = reads_[(size_t)word * warps_ + actor.warp];
    const u32 now = clocks.now(actor.warp);
    r.lane = r.epoch == now && (int)r.lane != actor.lane ? WHOLE_WARP : (unsigned)actor.lane;
    r.epoch = now;
    r.line = line;
  }
  return data(addr);
}

void SharedMemory::check_overwrite(u32 word, Actor actor, const Clocks& clocks, int line) const {
  const Write& w = writes_[word];
  const u32 offset = word * WORD;
  if (w.state == WordState::in_flight) {
    fail(line, "write to shared memory at base+%u while the copy issued at line %d is in flight (missing wait)", offset,
         w.line);
  }
  char writer[16], other[16];
  describe(actor.lane, writer);
  if (w.state == WordState::written && !ordered(w.epoch, w.warp, w.lane, actor, clocks)) {
    describe(w.lane, other);
    fail(line, "race: write to shared memory at base+%u by warp %d%s is not ordered after the write of warp %d%s at "
         "line %d (missing barrier)", offset, actor.warp, writer, w.warp, other, w.line);
  }
  for (int b = 0; b < warps_; b++) {
    const Read& r = reads_[(size_t)word * warps_ + b];
    if (r.epoch != 0 && !ordered(r.epoch, b, (int)r.lane, actor, clocks)) {
      describe((int)r.lane, other);
      fail(line, "race: write to shared memory at base+%u by warp %d%s is not ordered after the read of warp %d%s at "
           "line %d (missing barrier)", offset, actor.warp, writer, b, other, (int)r.line);
    }
  }
}

void SharedMemory::mark(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line, WordState state) {
  const u32 first = (addr - SHARED_BASE) / WORD, last = (addr - SHARED_BASE + (u32)bytes - 1) / WORD;
  const u32 now = clocks.now(actor.warp);
  for (u32 word = first; word <= last; word++) {
    check_overwrite(word, actor, clocks, line);
    writes_[word] = {now, line, (u8)actor.warp, (u8)actor.lane, state};
  }
}

u8* SharedMemory::write(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line) {
  check_address(addr, bytes, "write", line);
  mark(addr, bytes, actor, clocks, line, WordState::written);
  return data(addr);
}

void SharedMemory::begin_write(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line) {
  check_address(addr, bytes, "write", line);
  mark(addr, bytes, actor, clocks, line, WordState::in_flight);
}

void SharedMemory::settle(u32 addr, int bytes, Actor actor, const Clocks& clocks) {
  const u32 first = (addr - SHARED_BASE) / WORD, last = (addr - SHARED_BASE + (u32)bytes - 1) / WORD;
  for (u32 word = first; word <= last; word++) {
    writes_[word].state = WordState::written;
    writes_[word].epoch = clocks.now(actor.warp);
  }
}

void GlobalMemory::check(const void* p, int bytes, bool writing, int line) {
  const u64 address = (u64)p;
  const auto holds = [&](const Region& r) {
    return address >= r.address && address + (u64)bytes <= r.address + r.bytes && (!writing || r.writable);
  };
  if (last_ >= regions_.size() || !holds(regions_[last_])) {
    last_ = 0;
    while (last_ < regions_.size() && !holds(regions_[last_])) last_++;
    if (last_ == regions_.size()) refuse(address, bytes, writing, line);
  }
  if (address % (u64)bytes != 0) {
    const Region& r = regions_[last_];
    fail(line, "global %s of %d bytes at %s+%llu is misaligned", writing ? "write" : "read", bytes, r.name,
         address - r.address);
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
