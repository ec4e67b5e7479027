// Vector clocks. An agent is whoever makes accesses that nothing orders by itself: a warp, or an engine that works for
// one. An access carries its agent's epoch; it is ordered before what another agent does next iff that agent has seen
// the epoch. Asynchronous readers want more of a thread's write: that they come after a proxy fence which followed it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "types.hpp"

namespace emu {

// What is ordered before a point of synchronisation: for each agent an epoch.
struct Moment {
  std::vector<u32> seen;

  void raise(int agent, u32 epoch) {
    seen.resize(std::max(seen.size(), (size_t)agent + 1));
    seen[agent] = std::max(seen[agent], epoch);
  }
};

class Clocks {
 public:
  explicit Clocks(int agents)
      : agents_(agents), stride_(agents), now_(agents, 1), seen_((size_t)agents * agents, 0) {}

  // One more agent. It knows nothing yet, and nobody knows it.
  int add() {
    if (agents_ == stride_) widen(2 * stride_);
    now_.push_back(0);
    return agents_++;
  }

  // The epoch that agent a's accesses carry now.
  u32 now(int a) const { return now_[a]; }

  // The latest epoch of agent b whose accesses are ordered before what agent a does next.
  u32 seen(int a, int b) const { return seen_[(size_t)a * stride_ + b]; }

  // Ends agent a's epoch: what it has done is ordered before what it does next.
  void tick(int a) { row(seen_, a)[a] = now_[a]++; }

  // What agent a has done, and knows, joins a moment.
  void release(int a, Moment& to) {
    tick(a);
    to.seen.resize(agents_);
    raise(to.seen.data(), row(seen_, a), agents_);
  }

  // Agent a waited for a moment.
  void acquire(int a, const Moment& from) {
    raise(row(seen_, a), from.seen.data(), (int)from.seen.size());
  }

  // Agent a waited for what agent b did up to an epoch.
  void acquire(int a, int b, u32 epoch) { raise(row(seen_, a) + b, &epoch, 1); }

  // Agents first .. last - 1 start an operation of an engine: it knows what they know. A new epoch of the engine.
  u32 start(int engine, int first, int last) {
    tick(first);
    std::copy_n(row(seen_, first), agents_, row(seen_, engine));
    for (int a = first + 1; a < last; a++) {
      tick(a);
      raise(row(seen_, engine), row(seen_, a), agents_);
    }
    return ++now_[engine];
  }

  // A barrier between agents first .. last - 1: what each did before it is ordered before what any of them does next.
  void synchronize(int first, int last) {
    for (int a = first; a < last; a++) tick(a);
    for (int a = first + 1; a < last; a++) {
      raise(row(seen_, first), row(seen_, a), agents_);
    }
    for (int a = first + 1; a < last; a++) {
      std::copy_n(row(seen_, first), agents_, row(seen_, a));
    }
  }

 private:
  u32* row(std::vector<u32>& matrix, int a) { return &matrix[(size_t)a * stride_]; }

  static void raise(u32* to, const u32* from, int count) {
    for (int i = 0; i < count; i++) to[i] = std::max(to[i], from[i]);
  }

  void widen(int stride) {
    std::vector<u32> wide((size_t)stride * stride, 0);
    for (int a = 0; a < agents_; a++) std::copy_n(row(seen_, a), agents_, &wide[(size_t)a * stride]);
    seen_ = std::move(wide);
    stride_ = stride;
  }

  int agents_, stride_;
  std::vector<u32> now_;
  std::vector<u32> seen_;  // [agent][agent]
};

}  // namespace emu
