// The copy engine: boxes of tensors and plain ranges, to and from shared memory. A load is on its way from its issue
// until it completes bytes of an mbarrier; a store may read its source until the wait of its bulk group.
#pragma once
#include <deque>
#include <map>
#include <vector>

#include "device.hpp"

namespace emu {

struct Cta;
struct Fiber;
struct Barrier;

// A tensor map as attngen.tensormap.encode_emulator packs it.
struct Map {
  static constexpr u32 MARK = 0x50414d54;
  static constexpr int MAX_RANK = 5;

  u64 pointer;
  int rank, elem_bytes;
  int span;  // of the swizzle in bytes, 0: none
  u32 mark;
  u64 dims[MAX_RANK];         // innermost first, in elements; 1 beyond the rank
  u64 strides[MAX_RANK - 1];  // in bytes, of all but the innermost
  u32 box[MAX_RANK];

  int row_bytes() const { return (int)box[0] * elem_bytes; }
  int rows() const { return (int)(box[1] * box[2] * box[3] * box[4]); }
};

// One end of a copy in global memory: a box of a tensor, or a range.
struct Place {
  Map map;
  int at[Map::MAX_RANK];
};

struct Load {
  Place from;
  u32 dst;
  Barrier* barrier;
  u32 epoch;
  int line;
};

enum class StoreKind { assign, add_f32 };

struct Store {
  Place to;
  u32 src;
  StoreKind kind;
  u32 epoch;
  int line;
  bool done;
};

// The bulk stores of one thread.
struct BulkQueue {
  int engine;  // their agent
  std::vector<Store> open;
  std::deque<std::vector<Store>> groups;  // committed, oldest first
};

struct CopyEngine {
  std::deque<Load> loads;            // on their way, oldest first
  std::map<int, BulkQueue> queues;  // by thread
};

// The oldest load arrives. False where there is none.
bool land_oldest_load(Cta& cta);

// A random load arrives, or a random store reads its source, if there is one.
void advance_copies_at_random(Cta& cta);

// A thread ends: its bulk stores must have read their sources.
void check_bulk_stores_at_exit(const Fiber& fiber);

}  // namespace emu
