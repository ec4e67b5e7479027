// Vector clocks. An agent is whoever makes accesses that nothing orders by itself: a warp. An access carries its
// agent's epoch; it is ordered before what another agent does next iff that agent has seen the epoch.
#pragma once
#include <algorithm>
#include <vector>

#include "types.hpp"

namespace emu {

class Clocks {
 public:
  explicit Clocks(int agents) : agents_(agents), seen_((size_t)agents * agents, 0), joined_(agents) {
    for (int a = 0; a < agents; a++) at(a, a) = 1;
  }

  // The epoch that agent a's accesses carry now.
  u32 now(int a) const { return seen_[(size_t)a * agents_ + a]; }

  // The latest epoch of agent b whose accesses are ordered before what agent a does next.
  u32 seen(int a, int b) const { return a == b ? now(a) - 1 : seen_[(size_t)a * agents_ + b]; }

  // A barrier between agents first .. last - 1: what each did before it is ordered before what any of them does next.
  void synchronize(int first, int last) {
    for (int b = 0; b < agents_; b++) {
      u32 latest = 0;
      for (int a = first; a < last; a++) latest = std::max(latest, at(a, b));
      joined_[b] = latest;
    }
    for (int a = first; a < last; a++) {
      std::copy(joined_.begin(), joined_.end(), seen_.begin() + (size_t)a * agents_);
      at(a, a)++;
    }
  }

 private:
  u32& at(int a, int b) { return seen_[(size_t)a * agents_ + b]; }

  int agents_;
  std::vector<u32> seen_;
  std::vector<u32> joined_;
};

}  // namespace emu
