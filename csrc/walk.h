// How the sequences of a task are walked through time, longest first, so that the live ones are always the first n.
//
// Tokens are taken in blocks of about kBlock rows: their input projection before the steps, their part of every weight
// gradient after them, all while the rows are in the L2 cache. What crosses a step is the state, and on the way back its
// gradient.
#pragma once

#include "gemm.h"
#include "unrolled/core.h"
#include "unrolled/parallel.h"
#include "unrolled/schedule.h"

namespace unrolled {
namespace UNROLLED_TARGET {

constexpr int64_t kBlock = 128;

// Pieces of one allocation, each on a cache line of its own.
class Pieces {
 public:
  explicit Pieces(char* base) : base_(reinterpret_cast<uintptr_t>(base)) {}
  template <class P>
  P* take(int64_t count) {
    P* const piece = reinterpret_cast<P*>(base_ + static_cast<uintptr_t>(used_));
    used_ += ceil_div(count * static_cast<int64_t>(sizeof(P)), 64) * 64;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  uintptr_t base_;  // 0 when only the size is wanted
  int64_t used_ = 0;
};

// The rows of a block: about kBlock, and at most kBlock or those of one step.
inline int64_t block_rows(int64_t sequences) { return kBlock > sequences ? kBlock : sequences; }

// The sequences of a task: who is alive, which row is next.
struct Walk {
  const Rows& rows;
  const Task& task;
  bool reverse;

  Walk(const Rows& r, const Task& t) : rows(r), task(t), reverse(t.direction == 1) {}
  int64_t length(int64_t b) const { return rows.length[task.sequence[b]]; }
  // The place of step t of the walk in the sequence, and its row.
  int64_t position(int64_t b, int64_t t) const { return reverse ? length(b) - 1 - t : t; }
  int64_t row(int64_t b, int64_t t) const { return rows.start[task.sequence[b]] + position(b, t) * rows.step; }
  int64_t steps() const { return task.count ? length(0) : 0; }

  // block(m) once its rows are known: of each, row_of(index in the block, row). Then step(t, n alive, first row of the block).
  template <class RowOf, class Block, class Step>
  void forward(RowOf&& row_of, Block&& block, Step&& step) const {
    int64_t n = task.count;
    for (int64_t t0 = 0, t1; t0 < steps(); t0 = t1) {
      n = alive(t0, n);
      t1 = t0 + (n >= kBlock ? 1 : kBlock / n);
      t1 = t1 < steps() ? t1 : steps();
      int64_t m = 0;
      for (int64_t t = t0, live = n; t < t1; ++t) {
        live = alive(t, live);
        for (int64_t b = 0; b < live; ++b) row_of(m++, row(b, t));
      }
      block(m);
      m = 0;
      for (int64_t t = t0; t < t1; ++t, m += n) step(t, n = alive(t, n), m);
    }
  }

  // Back in time: step(t, n that go on to a step t + 1, n alive, first row in the block), then block(m).
  // Returns how many have a first step.
  template <class Step, class Block>
  int64_t backward(Step&& step, Block&& block) const {
    int64_t going_on = 0;
    for (int64_t t1 = steps(), t0; t1 > 0; t1 = t0) {
      int64_t m = 0, done = 0;  // as many steps back as hold kBlock rows, at least one
      t0 = t1;
      for (int64_t n = going_on; t0 > 0; --t0) {
        n = more_alive(t0 - 1, n);
        if (m > 0 && m + n > kBlock) break;
        m += n;
      }
      for (int64_t t = t1 - 1; t >= t0; --t) {
        const int64_t n = more_alive(t, going_on);
        step(t, going_on, n, done);
        done += n;
        going_on = n;
      }
      block(m);
    }
    return going_on;
  }

 private:
  int64_t alive(int64_t t, int64_t from) const {
    while (from > 0 && length(from - 1) <= t) --from;
    return from;
  }
  int64_t more_alive(int64_t t, int64_t from) const {
    while (from < task.count && length(from) > t) ++from;
    return from;
  }
};

// f(first, count) over [0, n), cut among the threads that a lone task leaves idle. A cut changes no sum.
template <class F>
inline void share(int helpers, int64_t n, F&& f) {
  if (helpers <= 1) return f(0, n);
  parallel_for(helpers, helpers, [&](int64_t i) {
    const int64_t first = i * n / helpers;
    f(first, (i + 1) * n / helpers - first);
  });
}

// Recurrent weights of so many bytes leave the nearest caches at every step: better that each thread reads a part of them,
// for all sequences, than all of them for its own.
constexpr int64_t kLarge = 1 << 20;

// A call: packs the weights of each direction, then runs every task, then end(memory of a task). Packed and Memory are
// laid out by Pieces: the first, (pieces, p), is filled by `fill(p, direction, helpers)`, the second is (pieces, p, sequences).
// `together`: a step can be shared among threads, which then go through one task together if the weights are large.
template <class T, class Packed, class Memory, class P, class Run, class End>
void run_tasks(const P& p, double operations, bool together, Run&& run, End&& end) {
  const auto& z = p.sizes;
  const int threads = useful_threads(z.threads, operations);
  Pieces weights(nullptr), own(nullptr);
  Packed(weights, p);
  together = together && z.D == 1 && weights.used() * z.H / (z.H + z.I) > kLarge;
  const Schedule schedule(p.rows.length, z.B, z.D, together ? 1 : threads);
  Memory(own, p, schedule.largest());
  const Scratch scratch(static_cast<size_t>(weights.used() * z.D + own.used() * schedule.tasks()));
  const auto packed = [&](int64_t d) {
    Pieces pieces(scratch.data() + d * weights.used());
    return Packed(pieces, p);
  };
  const auto memory = [&](int64_t i) {
    Pieces pieces(scratch.data() + z.D * weights.used() + i * own.used());
    return Memory(pieces, p, schedule.largest());
  };
  parallel_for(threads, z.D, [&](int64_t d) { packed(d).fill(p, d, z.D == 1 ? threads : 1); });
  parallel_for(threads, schedule.tasks(), [&](int64_t i) {
    run(schedule[i], packed(schedule[i].direction), memory(i), schedule.tasks() == 1 ? threads : 1);
  });
  end(memory, schedule.per_direction(), own.used() / static_cast<int64_t>(sizeof(T)), threads);
}

// f(direction, first column, last column) over D x C columns, shared out.
template <class F>
void sum_columns(int threads, int64_t D, int64_t C, F&& f) {
  constexpr int64_t kColumns = 64;
  const int64_t chunks = ceil_div(C, kColumns);
  parallel_for(threads, D * chunks, [&](int64_t i) {
    const int64_t c0 = i % chunks * kColumns;
    f(i / chunks, c0, c0 + kColumns < C ? c0 + kColumns : C);
  });
}

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
