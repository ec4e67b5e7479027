// Shared memory with a shadow that knows who wrote and read each word, and the registered regions of global memory.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "clock.hpp"
#include "device.hpp"

namespace emu {

// Who makes an access. Agents below the number of warps are warps. Their lanes are not ordered among themselves until a
// barrier; WHOLE is a collective access, which stands for all lanes, or an engine's.
struct Actor {
  int agent;
  int lane;
};
constexpr int WHOLE = 32;

enum class WordState : u8 { unwritten, written, in_flight, barrier };

// The last write of a word of four bytes. `fences`: proxy fences that its warp had executed by then.
struct Write {
  u32 epoch = 0;
  u32 fences = 0;
  int line = 0;
  u16 agent = 0;
  u8 lane = 0;
  WordState state = WordState::unwritten;
};

// The last read of a word by one agent.
struct Read {
  u32 epoch = 0;  // 0: none
  int line : 24;
  unsigned lane : 8;
};

class SharedMemory {
 public:
  static constexpr u32 WORD = 4, CHUNK = 16;

  SharedMemory(int bytes, int warps);

  // Names the next agent beyond the warps, for messages.
  void name_engine(std::string name) { engines_.push_back({std::move(name), {}}); }

  // A read of data already in place. The result stays valid. Engines see only what a proxy fence of the thread that
  // wrote it followed, and only once they are ordered after that fence.
  const u8* read(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line);

  // A write that takes effect at once.
  u8* write(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line);

  // A write that takes effect later: until settle or land, every access to its words is an error.
  void begin_write(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line);

  // The issuer has waited for its write: from now on it counts as made by the issuer at this moment.
  void settle(u32 addr, int bytes, Actor actor, const Clocks& clocks);

  // An engine's write has taken effect. Whoever reads it must have waited for the engine.
  void land(u32 addr, int bytes);

  // The eight bytes become an mbarrier: ordinary accesses to them are errors from now on.
  void place_barrier(u32 addr, Actor actor, const Clocks& clocks, int line);

  // A thread's proxy fence: for what it has written, and for its copies that it has waited for.
  void fence(Actor actor, const Clocks& clocks);

  // The swizzle span with which the copy engine wrote a range, 0 for another writer.
  void set_swizzle(u32 addr, int bytes, int span);
  int swizzle(u32 addr) const { return swizzles_.empty() ? 0 : swizzles_[(addr - SHARED_BASE) / CHUNK]; }

  void check_bounds(u32 addr, int bytes, const char* what, int line) const;

  u8* data(u32 addr) { return bytes_.get() + (addr - SHARED_BASE); }

 private:
  // An agent that is not a warp, and its reads; few kernels have any.
  struct Engine {
    std::string name;
    std::vector<Read> reads;
  };

  // The proxy fences of a warp: how many, and for each lane which of them, when.
  struct Fences {
    struct Fence {
      u32 number, epoch;
    };
    u32 count = 0;
    std::vector<Fence> lanes[32];
  };

  bool visible(const Write& write, int reader, const Clocks& clocks) const;
  void check_address(u32 addr, int bytes, const char* what, int line) const;
  void check_overwrite(u32 word, Actor actor, const Clocks& clocks, int line) const;
  void check_after_read(u32 word, const Read& read, int agent, Actor actor, const Clocks& clocks, int line) const;
  void mark(u32 addr, int bytes, Actor actor, const Clocks& clocks, int line, WordState state);
  Read& last_read(u32 word, int agent);
  const char* describe(int agent, int lane, char (&text)[64]) const;
  [[noreturn]] void refuse_read(u32 word, int line) const;

  u32 size_;
  int warps_;
  struct Free {
    void operator()(u8* p) const;
  };
  std::unique_ptr<u8[], Free> bytes_;
  std::vector<Write> writes_;
  std::vector<Read> reads_;     // [word][warp]
  std::vector<Fences> fences_;  // [warp]
  std::vector<Engine> engines_;
  std::vector<u8> swizzles_;    // [chunk], once the copy engine has written
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

  // An access by a thread: aligned to its size.
  void check(const void* p, int bytes, bool writing, int line);

  void check_bounds(const void* p, int bytes, bool writing, int line);

 private:
  [[noreturn]] void refuse(u64 address, int bytes, bool writing, int line) const;

  std::vector<Region> regions_;
  size_t last_ = 0;  // where the previous access fell: accesses come in runs
};

}  // namespace emu
