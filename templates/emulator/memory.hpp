// Shared memory with a shadow that knows who wrote and read each word, and the registered regions of global memory.
#pragma once
#include <memory>
#include <vector>

#include "clock.hpp"
#include "device.hpp"

namespace emu {

// Who makes an access. Lanes of a warp are not ordered among themselves until a barrier; WHOLE_WARP is a collective
// access, which stands for all lanes.
struct Actor {
  int warp;
  int lane;
};
constexpr int WHOLE_WARP = 32;

enum class WordState : u8 { unwritten, written, in_flight };

// The last write of a word of four bytes.
struct Write {
  u32 epoch = 0;
  int line = 0;
  u8 warp = 0, lane = 0;
  WordState state = WordState::unwritten;
};

// The last read of a word by one warp.
struct Read {
  u32 epoch = 0;  // 0: none
  int line : 24;
  unsigned lane : 8;
};

class SharedMemory {
 public:
  static constexpr u32 WORD = 4;

  SharedMemory(int bytes, int warps);

  // A read of data already in place. The result stays valid.
  const u8* read(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line);

  // A write that takes effect at once.
  u8* write(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line);

  // A write that takes effect later: until settle, every access to its words is an error.
  void begin_write(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line);

  // The issuer has waited for its write: from now on it counts as made by the issuer at this moment.
  void settle(u32 addr, int bytes, Actor actor, const Clocks& clocks);

  u8* data(u32 addr) { return bytes_.get() + (addr - SHARED_BASE); }

 private:
  void check_address(u32 addr, int bytes, const char* what, int line) const;
  void check_overwrite(u32 word, Actor actor, const Clocks& clocks, int line) const;
  void mark(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line, WordState state);

  u32 size_;
  int warps_;
  struct Free {
    void operator()(u8* p) const;
  };
  std::unique_ptr<u8[], Free> bytes_;
  std::vector<Write> writes_;
  std::vector<Read> reads_;  // [word][warp]
};

// A range of global memory that kernels may touch. Laid out as ctypes declares it.
struct Region {
  const char* name;
  u64 address;
  u64 bytes;
  int writable;
};

class GlobalMemory {
 public:
  GlobalMemory() = default;
  GlobalMemory(const Region* regions, int count) : regions_(regions, regions + count) {}

  void check(const void* p, int bytes, bool writing, int line);

 private:
  [[noreturn]] void refuse(u64 address, int bytes, bool writing, int line) const;

  std::vector<Region> regions_;
  size_t last_ = 0;  // where the previous access fell: accesses come in runs
};

}  // namespace emu
