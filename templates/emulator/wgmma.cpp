#include "wgmma.hpp"

#include <algorithm>
#include <cstring>

#include "collective.hpp"
#include "numeric.hpp"

namespace emu {

static ProductUnit& unit_of_current() {
  return launch.current->cta->product_units[launch.current->thread / WARPGROUP];
}

// ---- descriptors

static constexpr int CHUNK = 16, ATOM_ROWS = 8, CHUNK_ELEMENTS = 8, ELEMENT = 2;

static u32 field(u64 bits, int first, int count) { return (u32)(bits >> first) & ((1u << count) - 1); }

static Descriptor decode(u64 bits, const char* operand, int line) {
  static constexpr int SPANS[] = {0, 128, 64, 32};
  if (field(bits, 14, 2) | field(bits, 30, 2) | field(bits, 46, 3) | field(bits, 52, 10)) {
    fail(line, "descriptor of %s 0x%016llx: reserved bits are set (an offset carried into the next field?)", operand,
         bits);
  }
  if (field(bits, 49, 3) != 0) {
    fail(line, "descriptor of %s 0x%016llx: base offset %u; tiles start at a multiple of their swizzle atom", operand,
         bits, field(bits, 49, 3));
  }
  const u32 start = field(bits, 0, 14), leading = field(bits, 16, 14), stride = field(bits, 32, 14);
  return {start * CHUNK, leading * CHUNK, stride * CHUNK, SPANS[field(bits, 62, 2)]};
}

static void check_offset(u32 offset, const char* name, const Descriptor& d, const char* operand, int line) {
  const u32 atom = d.span == 0 ? CHUNK : (u32)(ATOM_ROWS * d.span);
  if (offset == 0 || offset % atom != 0) {
    fail(line, "descriptor of %s: %s %u is no multiple of %u, the atom of its swizzle", operand, name, offset, atom);
  }
}

// `lines` rows or columns of the tile, contiguous along k (k-major) or along the lines (transposed).
static void check_descriptor(const Descriptor& d, int lines, bool transposed, const char* operand, int line) {
  if (d.span == 0) {
    check_offset(d.leading, "leading byte offset", d, operand, line);
    if (lines > CHUNK_ELEMENTS) check_offset(d.stride, "stride byte offset", d, operand, line);
    return;
  }
  const u32 inside = d.start % (u32)(ATOM_ROWS * d.span);
  const u32 wide = (u32)std::min((transposed ? lines : PRODUCT_K) * ELEMENT, d.span);
  if (inside + wide > (u32)d.span) {
    fail(line, "descriptor of %s: start address base%+lld: %u bytes of a row do not lie in the first row of a %d-byte "
         "swizzle atom (aligned to %d)", operand, (i64)d.start - SHARED_BASE, wide, d.span, ATOM_ROWS * d.span);
  }
  if (transposed && lines * ELEMENT > d.span) check_offset(d.leading, "leading byte offset", d, operand, line);
  if (transposed || lines > ATOM_ROWS) check_offset(d.stride, "stride byte offset", d, operand, line);
}

// Visits the 16-byte chunks of a tile of `lines` x 16: visit(address, line, k) of the first of its eight elements.
template <class Visit>
static void for_each_chunk(const Descriptor& d, int lines, bool transposed, Visit visit) {
  const u32 mask = d.span == 0 ? 0 : (u32)(d.span / CHUNK - 1);
  const u32 row = d.span == 0 ? CHUNK : (u32)d.span;
  const auto at = [mask](u32 address) { return address ^ ((address >> 7 & mask) << 4); };
  if (!transposed) {
    for (int l = 0; l < lines; l++) {
      const u32 start = d.start + (u32)(l / ATOM_ROWS) * d.stride + (u32)(l % ATOM_ROWS) * row;
      const u32 step = d.span == 0 ? d.leading : CHUNK;
      for (int k = 0; k < PRODUCT_K; k += CHUNK_ELEMENTS) visit(at(start + (u32)(k / CHUNK_ELEMENTS) * step), l, k);
    }
    return;
  }
  // Without a swizzle the two offsets change places: atoms are eight lines wide, and follow each other by the stride.
  const u32 along_k = d.span == 0 ? d.leading : d.stride, along_lines = d.span == 0 ? d.stride : d.leading;
  const int wide = (int)row / ELEMENT;
  for (int k = 0; k < PRODUCT_K; k++) {
    const u32 start = d.start + (u32)(k / ATOM_ROWS) * along_k + (u32)(k % ATOM_ROWS) * row;
    for (int l = 0; l < lines; l += CHUNK_ELEMENTS) {
      visit(at(start + (u32)(l / wide) * along_lines + (u32)(l % wide * ELEMENT)), l, k);
    }
  }
}

// ---- operands

static void check_tile(Cta& cta, int engine, const Descriptor& d, int lines, bool transposed, const char* operand,
                       int line) {
  for_each_chunk(d, lines, transposed, [&](u32 address, int, int) {
    cta.shared.check_bounds(address, CHUNK, "read by a product", line);
    cta.shared.read(address, CHUNK, {engine, WHOLE}, cta.clocks, line);
    const int span = cta.shared.swizzle(address);
    if (span != 0 && span != d.span) {
      fail(line, "descriptor of %s: a swizzle of %d bytes; the copy engine wrote base+%u with one of %d", operand,
           d.span, address - SHARED_BASE, span);
    }
  });
}

template <float (*Convert)(u32)>
static void fetch_matrices(Cta& cta, Product& p) {
  const int n = p.d->n;
  p.a_matrix.resize(PRODUCT_M * PRODUCT_K);
  p.b_matrix.resize((size_t)PRODUCT_K * n);
  float* a = p.a_matrix.data();
  float* b = p.b_matrix.data();
  if (p.a_in_registers) {
    for (int t = 0; t < PRODUCT_THREADS; t++) {
      const int row = t / WARP * 16 + t % WARP / 4, k = 2 * (t % 4);
      for (int r = 0; r < A_REGISTERS; r++) {
        float* to = &a[(row + r % 2 * 8) * PRODUCT_K + k + r / 2 * 8];
        to[0] = Convert(p.a_values[t][r] & 0xffff), to[1] = Convert(p.a_values[t][r] >> 16);
      }
    }
  } else {
    const int along = p.a_transposed ? PRODUCT_K : 1;
    for_each_chunk(p.a, PRODUCT_M, p.a_transposed, [&](u32 address, int row, int k) {
      const u16* from = (const u16*)cta.shared.data(address);
      for (int i = 0; i < CHUNK_ELEMENTS; i++) a[row * PRODUCT_K + k + i * along] = Convert(from[i]);
    });
  }
  const int next = p.transposed ? 1 : n;
  for_each_chunk(p.b, n, p.transposed, [&](u32 address, int column, int k) {
    const u16* from = (const u16*)cta.shared.data(address);
    for (int i = 0; i < CHUNK_ELEMENTS; i++) b[k * n + column + i * next] = Convert(from[i]);
  });
}

static void fetch(Cta& cta, Product& p) {
  if (p.fetched) return;
  p.fetched = true;
  if (p.element == Element16::bf16) {
    fetch_matrices<f32_of_bf16>(cta, p);
  } else {
    fetch_matrices<f32_of_f16>(cta, p);
  }
}

static void multiply(const Product& p) {
  const int n = p.d->n;
  for (int row = 0; row < PRODUCT_M; row++) {
    float* d = &p.d->values[(size_t)row * n];
    if (!p.accumulate) std::fill_n(d, n, 0.0f);
    for (int k = 0; k < PRODUCT_K; k++) {
      const float a = p.a_matrix[row * PRODUCT_K + k];
      const float* b = &p.b_matrix[(size_t)k * n];
      for (int column = 0; column < n; column++) d[column] += a * b[column];
    }
  }
}

// ---- accumulators

// Moves between the lanes' registers and the matrix: register 4j + r of a lane is at row 16 warp + lane / 4 + r / 2 * 8
// and column 8 j + lane % 4 * 2 + r % 2.
template <class Move>
static void for_each_register(Accumulator& d, Move move) {
  for (int t = 0; t < PRODUCT_THREADS; t++) {
    const int row = t / WARP * 16 + t % WARP / 4, column = 2 * (t % 4);
    float* registers = d.lanes[t];
    for (int i = 0; i < d.n / 2; i++) {
      move(registers[i], d.values[(size_t)(row + i % 4 / 2 * 8) * d.n + i / 4 * 8 + column + i % 2]);
    }
  }
}

static Accumulator& take_accumulator(ProductUnit& unit, float* const* lanes, int n, int line) {
  for (Accumulator& d : unit.accumulators) {
    if (d.lanes[0] == lanes[0] && d.n == n) return d;
    if (lanes[0] < d.lanes[0] + d.n / 2 && d.lanes[0] < lanes[0] + n / 2) {
      fail(line, "the accumulator overlaps one in flight with %d columns", d.n);
    }
  }
  unit.accumulators.emplace_back();
  Accumulator& d = unit.accumulators.back();
  memcpy(d.lanes, lanes, sizeof d.lanes);
  d.n = n, d.products = 0;
  d.values.resize((size_t)PRODUCT_M * n);
  for_each_register(d, [](float& in_register, float& value) {
    value = in_register;
    memcpy(&in_register, &IN_FLIGHT, sizeof IN_FLIGHT);
  });
  return d;
}

static bool untouched(const Accumulator& d) {
  for (const float* registers : d.lanes) {
    for (int i = 0; i < d.n / 2; i++) {
      if (bits_of(registers[i]) != IN_FLIGHT) return false;
    }
  }
  return true;
}

// ---- fences

static void note(Watched& w) {
  w.held.resize(w.places.size() * w.words);
  u32* to = w.held.data();
  for (const u32* place : w.places) to = std::copy_n(place, w.words, to);
}

// Registers about to become operands must be as they were at the last fence. Only registers that have been operands
// before are known.
static void check_fenced(ProductUnit& unit, const u32* const* places, int count, int words, const char* what,
                         int line) {
  for (const Watched& w : unit.watched) {
    if (w.places[0] != places[0] || w.words != words || (int)w.places.size() != count) continue;
    if (w.held.empty()) return;
    const u32* held = w.held.data();
    for (int i = 0; i < count; i++, held += words) {
      if (memcmp(places[i], held, words * sizeof(u32)) != 0) {
        fail(line, "%s written since the last wgmma_fence", what);
      }
    }
    return;
  }
  unit.watched.push_back({{places, places + count}, words, {}});
}

void product_fence(int line) {
  int none = 0;
  collective(warpgroup_gathering("wgmma_fence", line), "wgmma_fence", none, line, [](int* const*) {
    ProductUnit& unit = unit_of_current();
    unit.fenced = true;
    for (Watched& w : unit.watched) note(w);
  });
}

// ---- issue, commit, wait

struct Issue {
  const ProductArguments* arguments;
};

static void check_uniform(const ProductArguments& first, const ProductArguments& other, const char* name, int line) {
  if (first.a_descriptor != other.a_descriptor || first.b_descriptor != other.b_descriptor ||
      first.accumulate != other.accumulate) {
    fail(line, "%s: the descriptors or the predicate differ between the threads of a warpgroup", name);
  }
}

static void issue(const Issue* const* lanes, const char* name, int line) {
  Cta& cta = *launch.current->cta;
  ProductUnit& unit = unit_of_current();
  const ProductArguments& first = *lanes[0]->arguments;
  if (!unit.fenced) fail(line, "%s without a wgmma_fence since the last wgmma_wait", name);
  unit.open.emplace_back();
  Product& p = unit.open.back();
  float* d_lanes[PRODUCT_THREADS];
  for (int t = 0; t < PRODUCT_THREADS; t++) {
    const ProductArguments& own = *lanes[t]->arguments;
    check_uniform(first, own, name, line);
    d_lanes[t] = own.d;
    for (int r = 0; r < A_REGISTERS; r++) {
      p.a_lanes[t][r] = own.a[r];
      if (first.a_in_registers) p.a_values[t][r] = *own.a[r];
    }
  }
  p.a_in_registers = first.a_in_registers, p.a_transposed = first.a_transposed;
  p.transposed = first.transposed, p.accumulate = first.accumulate;
  p.element = first.element, p.line = line, p.fetched = false;
  p.b = decode(first.b_descriptor, "b", line);
  check_descriptor(p.b, first.n, p.transposed, "b", line);
  if (p.a_in_registers) {
    check_fenced(unit, &p.a_lanes[0][0], PRODUCT_THREADS * A_REGISTERS, 1, "a register of a was", line);
  } else {
    p.a = decode(first.a_descriptor, "a", line);
    check_descriptor(p.a, PRODUCT_M, p.a_transposed, "a", line);
  }
  const auto flies = [&](const Accumulator& x) { return x.lanes[0] == d_lanes[0]; };
  if (std::none_of(unit.accumulators.begin(), unit.accumulators.end(), flies)) {
    check_fenced(unit, (const u32* const*)d_lanes, PRODUCT_THREADS, first.n / 2, "the accumulator was", line);
  }
  const int warp = launch.current->thread / WARPGROUP * (WARPGROUP / WARP);
  if (unit.engine < 0) unit.engine = cta.add_engine("the products of warpgroup %lld", warp * WARP / WARPGROUP);
  p.epoch = cta.clocks.start(unit.engine, warp, warp + WARPGROUP / WARP);
  if (!p.a_in_registers) check_tile(cta, unit.engine, p.a, PRODUCT_M, p.a_transposed, "a", line);
  check_tile(cta, unit.engine, p.b, first.n, p.transposed, "b", line);
  p.d = &take_accumulator(unit, d_lanes, first.n, line);
  p.d->products++;
  const bool now = launch.mode == Mode::eager || (launch.mode == Mode::random && launch.random() % 2 == 0);
  if (now) fetch(cta, p);
}

void issue_product(const ProductArguments& arguments, int line) {
  const char* name = arguments.a_in_registers ? "wgmma_rs" : "wgmma_ss";
  Issue lane{&arguments};
  collective(warpgroup_gathering(name, line), name, lane, line,
             [=](const Issue* const* lanes) { issue(lanes, name, line); });
}

void product_commit(int line) {
  int none = 0;
  collective(warpgroup_gathering("wgmma_commit", line), "wgmma_commit", none, line, [](int* const*) {
    ProductUnit& unit = unit_of_current();
    unit.groups.push_back(std::move(unit.open));
    unit.open.clear();
  });
}

static void finish(Cta& cta, ProductUnit& unit, Product& p, int line) {
  for (int t = 0; t < PRODUCT_THREADS && p.a_in_registers; t++) {
    for (int r = 0; r < A_REGISTERS; r++) {
      if (*p.a_lanes[t][r] != p.a_values[t][r]) {
        fail(p.line, "register %d of a, thread %d, was written while the product was in flight (until line %d)", r, t,
             line);
      }
    }
  }
  fetch(cta, p);
  multiply(p);
  if (--p.d->products != 0) return;
  for_each_register(*p.d, [](float& in_register, float& value) { in_register = value; });
  unit.accumulators.remove_if([&](const Accumulator& d) { return &d == p.d; });
}

static void retire(Cta& cta, ProductUnit& unit, int line) {
  std::vector<Product>& group = unit.groups.front();
  const int first_warp = launch.current->thread / WARPGROUP * (WARPGROUP / WARP);
  const Accumulator* checked = nullptr;
  for (const Product& p : group) {
    if (p.d != checked && !untouched(*p.d)) {
      fail(p.line, "the accumulator was written while the product was in flight (until line %d)", line);
    }
    checked = p.d;
  }
  for (Product& p : group) {
    for (int w = 0; w < WARPGROUP / WARP; w++) cta.clocks.acquire(first_warp + w, unit.engine, p.epoch);
    finish(cta, unit, p, line);
  }
  unit.groups.pop_front();
}

void product_wait(int groups_left, int line) {
  int none = 0;
  collective(warpgroup_gathering("wgmma_wait", line), "wgmma_wait", none, line, [=](int* const*) {
    ProductUnit& unit = unit_of_current();
    if (!unit.open.empty()) {
      fail(line, "wgmma_wait with products that were never committed (the first at line %d)", unit.open.front().line);
    }
    while ((int)unit.groups.size() > groups_left) retire(*launch.current->cta, unit, line);
    unit.fenced = false;
  });
}

void check_products_at_end(const Cta& cta) {
  for (const ProductUnit& unit : cta.product_units) {
    if (!unit.open.empty()) fail(unit.open.front().line, "kernel ends with a product that was never committed");
    for (const std::vector<Product>& group : unit.groups) {
      if (!group.empty()) fail(group.front().line, "kernel ends with a product in flight (missing wgmma_wait)");
    }
  }
}

}  // namespace emu
