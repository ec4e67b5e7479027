#include "tma.hpp"

#include <algorithm>
#include <cstring>

#include "scheduler.hpp"

namespace emu {

static constexpr int CHUNK = 16, PLAIN_ALIGN = 128, MAP_ALIGN = 64, ATOM_ROWS = 8;

// Where the swizzle puts a byte: address bits 4 and up are mixed with those from bit 7 on, as many as the span's rows
// have chunks.
static u32 swizzled(u32 addr, int span) { return addr ^ ((addr >> 7 & (u32)(span / CHUNK - 1)) << 4); }

static u32 chunk_address(u32 addr, int span) { return span == 0 ? addr : swizzled(addr, span); }

static const char* const SHARED_END[] = {"source", "destination"};

// The map behind a pointer, for a copy of `rank` coordinates whose end in shared memory is `addr`.
static Place place_of(const void* map, const int* at, int rank, u32 addr, bool load, int line) {
  if ((u64)map % MAP_ALIGN != 0) fail(line, "the tensor map is not aligned to %d bytes", MAP_ALIGN);
  Place p;
  memcpy(&p.map, map, sizeof p.map);
  if (p.map.mark != Map::MARK) fail(line, "this is no tensor map (made by encode_emulator)");
  if (p.map.rank != rank) fail(line, "a copy of %d coordinates with a tensor map of rank %d", rank, p.map.rank);
  for (int i = 0; i < Map::MAX_RANK; i++) p.at[i] = i < rank ? at[i] : 0;
  const int align = p.map.span == 0 ? PLAIN_ALIGN : ATOM_ROWS * p.map.span;
  if (addr % (u32)align != 0) {
    fail(line, "the %s of a tensor copy at base%+lld is not aligned to %d bytes (its swizzle of %d bytes)",
         SHARED_END[load], (i64)addr - SHARED_BASE, align, p.map.span);
  }
  if (p.map.span != 0 && p.map.row_bytes() != p.map.span) {
    fail(line, "a box of %d bytes a row with a swizzle of %d: the emulator knows full rows only", p.map.row_bytes(),
         p.map.span);
  }
  return p;
}

// A plain range of up to 2^31 bytes as a box of one row.
static Place range_of(const void* p, int bytes) {
  Place place{};
  place.map.pointer = (u64)p, place.map.rank = 1, place.map.elem_bytes = 1;
  for (int i = 0; i < Map::MAX_RANK; i++) place.map.dims[i] = place.map.box[i] = 1;
  place.map.dims[0] = place.map.box[0] = (u32)bytes;
  return place;
}

// One row of the box in global memory: bytes first .. last - 1 of it lie inside the tensor, at `p + first`.
struct Row {
  u8* p;
  int first, last;
};

template <class Apply>
static void for_each_row(const Place& place, Apply apply) {
  const Map& m = place.map;
  const i64 left = std::clamp<i64>(-(i64)place.at[0], 0, m.box[0]);
  const i64 right = std::clamp<i64>((i64)m.dims[0] - place.at[0], left, m.box[0]);
  int index = 0;
  for (u32 i4 = 0; i4 < m.box[4]; i4++) {
    for (u32 i3 = 0; i3 < m.box[3]; i3++) {
      for (u32 i2 = 0; i2 < m.box[2]; i2++) {
        for (u32 i1 = 0; i1 < m.box[1]; i1++, index++) {
          const i64 at[] = {place.at[1] + (i64)i1, place.at[2] + (i64)i2, place.at[3] + (i64)i3,
                            place.at[4] + (i64)i4};
          bool inside = left < right;
          u64 address = m.pointer + (u64)((i64)place.at[0] * m.elem_bytes);
          for (int d = 0; d < Map::MAX_RANK - 1; d++) {
            inside = inside && at[d] >= 0 && at[d] < (i64)m.dims[d + 1];
            address += (u64)at[d] * m.strides[d];
          }
          const int first = inside ? (int)left * m.elem_bytes : 0, last = inside ? (int)right * m.elem_bytes : 0;
          apply(index, Row{(u8*)address, first, last});
        }
      }
    }
  }
}

// Visits the 16-byte chunks of a box in shared memory at `start`: visit(address, global, first, last), where the bytes
// first .. last - 1 of the chunk lie inside the tensor, at `global + first`.
template <class Visit>
static void for_each_chunk(const Place& place, u32 start, Visit visit) {
  const Map& m = place.map;
  for_each_row(place, [&](int index, const Row& row) {
    const u32 first = start + (u32)(index * m.row_bytes());
    for (int at = 0; at < m.row_bytes(); at += CHUNK) {
      visit(chunk_address(first + (u32)at, m.span), row.p + at, std::clamp(row.first - at, 0, CHUNK),
            std::clamp(row.last - at, 0, CHUNK));
    }
  });
}

static void check_rows(const Place& place, bool writing, int line) {
  for_each_row(place, [=](int, const Row& row) {
    if (row.first < row.last) launch.global.check_bounds(row.p + row.first, row.last - row.first, writing, line);
  });
}

static int total_bytes(const Place& place) { return place.map.rows() * place.map.row_bytes(); }

// ---- loads

static void land(Cta& cta, const Load& load) {
  for_each_chunk(load.from, load.dst, [&](u32 address, const u8* global, int first, int last) {
    u8* to = cta.shared.data(address);
    memset(to, 0, CHUNK);
    if (first < last) memcpy(to + first, global + first, last - first);
  });
  cta.shared.land(load.dst, total_bytes(load.from));
  complete_bytes(*load.barrier, total_bytes(load.from), load.epoch, load.line);
}

static void start_load(u32 dst, const Place& from, u32 bar, const char* name, int line) {
  const Fiber& fiber = *launch.current;
  Cta& cta = *fiber.cta;
  Barrier& barrier = usable_barrier(bar, name, line);
  if (!barrier.fenced) {
    fail(line, "%s: the mbarrier at base+%u, initialised at line %d, is unknown to the copy engine (missing "
         "fence_mbarrier_init)", name, barrier.offset(), barrier.line);
  }
  const int bytes = total_bytes(from);
  cta.shared.check_bounds(dst, bytes, "write", line);
  check_rows(from, false, line);
  const u32 epoch = cta.clocks.start(barrier.engine, fiber.warp(), fiber.warp() + 1);
  cta.shared.begin_write(dst, bytes, {barrier.engine, WHOLE}, cta.clocks, line);
  cta.shared.set_swizzle(dst, bytes, from.map.span);
  barrier.load_line = line, barrier.load_phase = barrier.phase;
  const Load load{from, dst, &barrier, epoch, line};
  if (launch.mode == Mode::eager) {
    land(cta, load);
  } else {
    cta.copy_engine.loads.push_back(load);
  }
}

void tensor_load(u32 dst, const void* map, u32 bar, const int* at, int rank, int line) {
  start_load(dst, place_of(map, at, rank, dst, true, line), bar, "a tensor load", line);
}

void bulk_range_load(u32 dst, const void* src, int bytes, u32 bar, int line) {
  if (bytes <= 0 || bytes % CHUNK != 0 || dst % CHUNK != 0 || (u64)src % CHUNK != 0) {
    fail(line, "bulk_load of %d bytes from %p to base%+lld: size and addresses are multiples of 16", bytes, src,
         (i64)dst - SHARED_BASE);
  }
  start_load(dst, range_of(src, bytes), bar, "bulk_load", line);
}

bool land_oldest_load(Cta& cta) {
  std::deque<Load>& loads = cta.copy_engine.loads;
  if (loads.empty()) return false;
  const Load load = loads.front();
  loads.pop_front();
  land(cta, load);
  return true;
}

// ---- stores

static void read_source(Cta& cta, Store& store) {
  if (store.done) return;
  store.done = true;
  for_each_chunk(store.to, store.src, [&](u32 address, u8* global, int first, int last) {
    const u8* from = cta.shared.data(address);
    if (store.kind == StoreKind::assign) {
      if (first < last) memcpy(global + first, from + first, last - first);
    } else {
      for (int i = first; i < last; i += 4) *(float*)(global + i) += *(const float*)(from + i);
    }
  });
}

static BulkQueue& queue_of(const Fiber& fiber) {
  std::map<int, BulkQueue>& queues = fiber.cta->copy_engine.queues;
  const auto found = queues.find(fiber.thread);
  if (found != queues.end()) return found->second;
  const int engine = fiber.cta->add_engine("the bulk stores of thread %lld", fiber.thread);
  return queues.emplace(fiber.thread, BulkQueue{engine, {}, {}}).first->second;
}

void tensor_store(const void* map, u32 src, const int* at, int rank, bool add, int line) {
  const Fiber& fiber = *launch.current;
  Cta& cta = *fiber.cta;
  const Place to = place_of(map, at, rank, src, false, line);
  if (add && to.map.elem_bytes != 4) fail(line, "a sum of f32 into a tensor of %d-byte elements", to.map.elem_bytes);
  const int bytes = total_bytes(to);
  cta.shared.check_bounds(src, bytes, "read", line);
  check_rows(to, true, line);
  BulkQueue& queue = queue_of(fiber);
  const u32 epoch = cta.clocks.start(queue.engine, fiber.warp(), fiber.warp() + 1);
  for_each_chunk(to, src, [&](u32 address, const u8*, int first, int last) {
    if (first < last) cta.shared.read(address, CHUNK, {queue.engine, WHOLE}, cta.clocks, line);
  });
  queue.open.push_back({to, src, add ? StoreKind::add_f32 : StoreKind::assign, epoch, line, false});
  if (launch.mode == Mode::eager) read_source(cta, queue.open.back());
}

void bulk_commit_group(int) {
  BulkQueue& queue = queue_of(*launch.current);
  queue.groups.push_back(std::move(queue.open));
  queue.open.clear();
}

void bulk_wait_groups(int groups_left, int) {
  const Fiber& fiber = *launch.current;
  Cta& cta = *fiber.cta;
  BulkQueue& queue = queue_of(fiber);
  while ((int)queue.groups.size() > groups_left) {
    for (Store& store : queue.groups.front()) {
      read_source(cta, store);
      cta.clocks.acquire(fiber.warp(), queue.engine, store.epoch);
    }
    queue.groups.pop_front();
  }
}

void check_bulk_stores_at_exit(const Fiber& fiber) {
  const auto found = fiber.cta->copy_engine.queues.find(fiber.thread);
  if (found == fiber.cta->copy_engine.queues.end()) return;
  const BulkQueue& queue = found->second;
  if (!queue.open.empty()) fail(queue.open.front().line, "kernel ends with a bulk store that was never committed");
  for (const std::vector<Store>& group : queue.groups) {
    if (group.empty()) continue;
    fail(group.front().line, "kernel ends while the source of a bulk store may still be read (missing bulk_wait_read)");
  }
}

// ---- random completion

void advance_copies_at_random(Cta& cta) {
  CopyEngine& engine = cta.copy_engine;
  if (!engine.loads.empty()) {
    const auto chosen = engine.loads.begin() + launch.random() % engine.loads.size();
    const Load load = *chosen;
    engine.loads.erase(chosen);
    land(cta, load);
  }
  for (auto& entry : engine.queues) {
    for (std::vector<Store>& group : entry.second.groups) {
      for (Store& store : group) {
        if (launch.random() % 2 == 0) read_source(cta, store);
      }
    }
  }
}

}  // namespace emu
