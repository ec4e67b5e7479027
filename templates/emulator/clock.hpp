// Vector clocks. An agent is whoever makes accesses that nothing orders by itself: a warp, or an engine that works for
// one. An access carries its agent's epoch; it is ordered before what another agent does next iff that agent has seen
// the epoch. Asynchronous readers want more of a thread's write: that a proxy fence followed it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "types.hpp"

namespace emu {

// What is ordered before a point of synchronisation: for each agent an epoch, and one up to which its writes are
// visible to asynchronous readers.
struct Moment {
  std::vector<u32> seen, visible;

  void raise(int agent, u32 epoch) {
    seen.resize(std::max(seen.size(), (size_t)agent + 1));
    seen[agent] = std::max(seen[agent], epoch);
  }
};

class Clocks {
 public:
  explicit Clocks(int agents)
      : agents_(agents), stride_(agents), now_(agents, 1), seen_((size_t)agents * agents, 0), visible_(seen_) {}

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

  // The latest epoch of agent b whose writes an asynchronous read by agent a finds.
  u32 visible(int a, int b) const { return visible_[(size_t)a * stride_ + b]; }

  // Ends agent a's epoch: what it has done is ordered before what it does next.
  void tick(int a) { row(seen_, a)[a] = now_[a]++; }

  // All of agent a's writes are behind a proxy fence.
  void publish(int a) {
    row(visible_, a)[a] = now_[a];
    tick(a);
  }

  // What agent a has done, and knows, joins a moment.
  void release(int a, Moment& to) {
    tick(a);
    to.seen.resize(agents_);
    to.visible.resize(agents_);
    raise(to.seen.data(), row(seen_, a), agents_);
    raise(to.visible.data(), row(visible_, a), agents_);
  }

  // Agent a waited for a moment.
  void acquire(int a, const Moment& from) {
    raise(row(seen_, a), from.seen.data(), (int)from.seen.size());
    raise(row(visible_, a), from.visible.data(), (int)from.visible.size());
  }

  // Agent a waited for what agent b did up to an epoch.
  void acquire(int a, int b, u32 epoch) { raise(row(seen_, a) + b, &epoch, 1); }

  // Agents first .. last - 1 start an operation of an engine: it knows what they know. A new epoch of the engine.
  u32 start(int engine, int first, int last) {
    tick(first);
    std::copy_n(row(seen_, first), agents_, row(seen_, engine));
    std::copy_n(row(visible_, first), agents_, row(visible_, engine));
    for (int a = first + 1; a < last; a++) {
      tick(a);
      raise(row(seen_, engine), row(seen_, a), agents_);
      raise(row(visible_, engine), row(visible_, a), agents_);
    }
    return ++now_[engine];
  }

  // A barrier between agents first .. last - 1: what each did before it is ordered before what any of them does next.
  void synchronize(int first, int last) {
    for (int a = first; a < last; a++) tick(a);
    for (int a = first + 1; a < last; a++) {
      raise(row(seen_, first), row(seen_, a), agents_);
      raise(row(visible_, first), row(visible_, a), agents_);
    }
    for (int a = first + 1; a < last; a++) {
      std::copy_n(row(seen_, first), agents_, row(seen_, a));
      std::copy_n(row(visible_, first), agents_, row(visible_, a));
    }
  }

 private:
  u32* row(std::vector<u32>& matrix, int a) { return &matrix[(size_t)a * stride_]; }

  static void raise(u32* to, const u32* from, int count) {
    for (int i = 0; i < count; i++) to[i] = std::max(to[i], from[i]);
  }

  void widen(int stride) {
    for (std::vector<u32>* matrix : {&seen_, &visible_}) {
      std::vector<u32> wide((size_t)stride * stride, 0);
      for (int a = 0; a < agents_; a++) std::copy_n(row(*matrix, a), agents_, &wide[(size_t)a * stride]);
      *matrix = std::move(wide);
    }
    stride_ = stride;
  }

  int agents_, stride_;
  std::vector<u32> now_;
  std::vector<u32> seen_, visible_;  // [agent][agent]
};

}  // namespace emu
