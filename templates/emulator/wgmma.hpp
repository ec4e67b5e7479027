// Warpgroup products: issued in order, grouped by commit, complete at the wait that demands them. In between the
// accumulators hold a pattern, and the registers of a must keep their values.
#pragma once
#include <deque>
#include <list>
#include <vector>

#include "device.hpp"

namespace emu {

struct Cta;

constexpr int PRODUCT_M = 64, PRODUCT_K = 16, PRODUCT_THREADS = 128, A_REGISTERS = 4;

// A tile in shared memory, as the 64 bits of a matrix descriptor say.
struct Descriptor {
  u32 start, leading, stride;  // bytes
  int span;                    // of the swizzle in bytes, 0: none
};

// Accumulator registers that products in flight write; `values` [64][n] are the true ones.
struct Accumulator {
  float* lanes[PRODUCT_THREADS];
  int n;
  int products;  // in flight
  std::vector<float> values;
};

struct Product {
  Accumulator* d;
  bool a_in_registers;
  u32* a_lanes[PRODUCT_THREADS][A_REGISTERS];
  u32 a_values[PRODUCT_THREADS][A_REGISTERS];
  Descriptor a, b;
  bool a_transposed, transposed, accumulate;
  Element16 element;
  u32 epoch;
  int line;
  bool fetched;
  std::vector<float> a_matrix, b_matrix;  // [64][16], [16][n], once fetched
};

// Registers that have been operands, and what they held at the last fence.
struct Watched {
  std::vector<const u32*> places;  // one or several a thread
  int words;                       // at each place
  std::vector<u32> held;           // empty: first seen since the last fence
};

struct ProductUnit {
  int engine = -1;  // the agent of its reads, once it has read
  bool fenced = false;
  std::vector<Product> open;
  std::deque<std::vector<Product>> groups;  // committed, oldest first
  std::list<Accumulator> accumulators;
  std::list<Watched> watched;
};

// The CTA has ended: nothing may be in flight.
void check_products_at_end(const Cta& cta);

}  // namespace emu
