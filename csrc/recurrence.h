// The recurrence of any cell: loop, lengths, directions, the recurrent product and every gradient that is a product.
// The equations are in src/unrolled/equations/recurrence.py. A cell is a pair of pointwise functions:
//
//   struct Cell {
//     static constexpr int kGates, kKept;        // G, S of core.h
//     static constexpr bool kMemory;             // has a second state c
//     static constexpr bool kSplit;              // du and dv differ (else dv is du, and u and v matter by their sum)
//     static constexpr bool kDirect;             // h reaches the next h other than through v: dh_prev is not 0
//     static void forward(const V u[G], const V v[G], V h, V c, V& h_next, V& c_next, V kept[S]);
//     static void backward(V dh, V dc, const Point&, const V kept[S], V du[G], V dv[G], V& dh_prev, V& dc_prev);
//   };
//
// with u = W_ih x + b_ih, v = W_hh h + b_hh. dh_prev is what reaches the state before other than through v.
//
// A task walks its sequences through time, longest first, so that the live ones are always the first n. Tokens are taken in
// blocks of about kBlock rows: their input projection before the steps, their part of every weight gradient after them, all
// while the rows are in the L2 cache. What crosses a step is the state, and on the way back its gradient.
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

// The sequences of a task as a walk: who is alive, which row is next.
struct Walk {
  const Rows& rows;
  const Task& task;
  bool reverse;

  Walk(const Rows& r, const Task& t) : rows(r), task(t), reverse(t.direction == 1) {}
  int64_t length(int64_t b) const { return rows.length[task.sequence[b]]; }
  int64_t row(int64_t b, int64_t t) const {
    const int64_t s = task.sequence[b];
    return rows.start[s] + (reverse ? rows.length[s] - 1 - t : t) * rows.step;
  }
  int64_t alive(int64_t t, int64_t from) const {
    while (from > 0 && length(from - 1) <= t) --from;
    return from;
  }
  int64_t steps() const { return task.count ? length(0) : 0; }
  // f(t, n alive) for the steps [t0, t1)
  template <class F>
  void each(int64_t t0, int64_t t1, F&& f) const {
    for (int64_t t = t0, n = alive(t0, task.count); t < t1; ++t) f(t, n = alive(t, n));
  }
};

// A block of steps holds about kBlock rows and at most kBlock or those of one step.
inline int64_t block_steps(int64_t alive) { return alive >= kBlock ? 1 : kBlock / alive; }
inline int64_t block_rows(int64_t sequences) { return kBlock > sequences ? kBlock : sequences; }

// f(first, count) over [0, n), cut among the threads that a lone task leaves idle. A cut changes no sum.
template <class F>
inline void share(int helpers, int64_t n, F&& f) {
  if (helpers <= 1) return f(0, n);
  parallel_for(helpers, helpers, [&](int64_t i) {
    const int64_t first = i * n / helpers;
    f(first, (i + 1) * n / helpers - first);
  });
}

// For the groups of C columns, forth in even steps and back in odd ones, so that the weights a step ended with are still in
// the nearest cache when the next begins: f(first column, columns).
template <class F>
inline void for_groups(int64_t C, int64_t group, bool backwards, F&& f) {
  const int64_t groups = ceil_div(C, group);
  for (int64_t i = 0; i < groups; ++i) {
    const int64_t c = (backwards ? groups - 1 - i : i) * group;
    f(c, C - c < group ? C - c : group);
  }
}

// tile[r][0..columns) = a[r] times some columns of a packed matrix of depth K, for a few rows.
template <class T>
inline void tile_rows(const T* const* a, int height, const T* packed, int64_t K, int64_t columns, T* tile, int64_t ld) {
  for_panels<T>(columns, columns, [&](int64_t c, int64_t width) {
    kTile<T>[width / Simd<T>::width - 1][height - 1](a, packed + K * c, K, tile + c, ld);
  });
}

// ------------------------------------------------------------------------------------------------ forward

template <class T, class Cell>
struct ForwardTask {
  using Gates = Columns<T, Cell::kGates>;
  using V = Vec<T>;
  static constexpr int W = Simd<T>::width, G = Cell::kGates, S = Cell::kKept;

  const T **x_row, **h_before, **c_before;           // [block rows], [sequences]
  T **y_row, **h_after, **c_after, **kept_row;       // [sequences]
  T *u, *tile;                                       // [block rows, ld], [kRows, kGroup]

  ForwardTask(Pieces& pieces, int64_t sequences, int64_t H) {
    const int64_t rows = block_rows(sequences);
    x_row = pieces.take<const T*>(rows);
    h_before = pieces.take<const T*>(sequences);
    c_before = pieces.take<const T*>(sequences);
    y_row = pieces.take<T*>(sequences);
    h_after = pieces.take<T*>(sequences);
    c_after = pieces.take<T*>(sequences);
    kept_row = pieces.take<T*>(sequences);
    u = pieces.take<T>(rows * leading<T>(Gates::count(H)));
    tile = pieces.take<T>(kRows * Gates::kGroup);
  }

  // The n live sequences of step t.
  void step(int64_t H, int64_t t, int64_t n, const T* u_step, const T* packed_hh, const T* bias_ih, const T* bias_hh) const {
    const int64_t C = Gates::count(H), ld = leading<T>(C);
    for_groups(C, Gates::kGroup, t % 2 == 1, [&](int64_t c0, int64_t columns) {
      for_tiles(n, [&](int64_t r0, int height) {
        tile_rows(h_before + r0, height, packed_hh + H * c0, H, columns, tile, Gates::kGroup);  // (2)
        for (int64_t r = r0; r < r0 + height; ++r)
          for (int64_t c = 0; c < columns; c += G * W) {
            const int64_t unit = (c0 + c) / G, left = H - unit;
            V us[G], vs[G], kept[S + 1], h, memory{};
            UNROLL for (int g = 0; g < G; ++g) {
              us[g] = load(u_step + r * ld + c0 + c + g * W) + load(bias_ih + c0 + c + g * W);
              vs[g] = load(tile + (r - r0) * Gates::kGroup + c + g * W);
              if (Cell::kSplit) vs[g] += load(bias_hh + c0 + c + g * W);
            }
            Cell::forward(us, vs, load(h_before[r] + unit, left), Cell::kMemory ? load(c_before[r] + unit, left) : V{}, h,
                          memory, kept);
            store(y_row[r] + unit, h, left);
            if (h_after[r] != y_row[r]) store(h_after[r] + unit, h, left);
            if (Cell::kMemory) store(c_after[r] + unit, memory, left);
            if (S && kept_row[r])
              UNROLL for (int k = 0; k < S; ++k) store(kept_row[r] + k * H + unit, kept[k], left);
          }
      });
    });
  }
};

template <class T, class Cell>
void forward_task(const RecurrentForward<T>& p, const Task& task, const T* packed_ih, const T* packed_hh,
                  const T* bias_ih, const T* bias_hh, char* memory, int helpers) {
  using Forward = ForwardTask<T, Cell>;
  using Gates = typename Forward::Gates;
  const auto& z = p.sizes;
  const int64_t DH = z.D * z.H, C = Gates::count(z.H), ld = leading<T>(C), d = task.direction;
  const auto bytes = static_cast<size_t>(z.H) * sizeof(T);
  const Walk walk(p.rows, task);
  Pieces pieces(memory);
  const Forward s(pieces, task.count, z.H);
  // the memory of an LSTM goes from c_prev row to c_prev row; where nothing is kept it stays in c_last
  for (int64_t b = 0; b < task.count; ++b) {
    const int64_t place = (d * z.B + task.sequence[b]) * z.H, first = d * z.H + (walk.length(b) ? walk.row(b, 0) * DH : 0);
    const bool empty = walk.length(b) == 0;
    s.h_before[b] = p.h0 + place;
    if (empty) memcpy(p.h_last + place, p.h0 + place, bytes);
    if (p.h_prev && !empty) memcpy(p.h_prev + first, p.h0 + place, bytes);
    if (!Cell::kMemory) continue;
    s.c_before[b] = p.c0 + place;
    if (empty) memcpy(p.c_last + place, p.c0 + place, bytes);
    if (p.c_prev && !empty) memcpy(p.c_prev + first, p.c0 + place, bytes);
  }
  int64_t n = task.count;
  for (int64_t t = 0; t < walk.steps();) {
    n = walk.alive(t, n);
    int64_t t1 = t + block_steps(n), m = 0;
    t1 = t1 < walk.steps() ? t1 : walk.steps();
    walk.each(t, t1, [&](int64_t step, int64_t alive) {
      for (int64_t b = 0; b < alive; ++b) s.x_row[m++] = p.x + walk.row(b, step) * z.I;
    });
    share(helpers, m, [&](int64_t first, int64_t rows) {
      multiply(s.x_row + first, rows, packed_ih, z.I, C, Gates::kGroup, s.u + first * ld, ld);  // (1)
    });
    m = 0;
    walk.each(t, t1, [&](int64_t step, int64_t alive) {
      for (int64_t b = 0; b < alive; ++b) {
        const bool last = step + 1 == walk.length(b);
        const int64_t row = walk.row(b, step), place = (d * z.B + task.sequence[b]) * z.H;
        const int64_t next = last ? 0 : walk.row(b, step + 1) * DH + d * z.H;
        s.y_row[b] = p.y + row * DH + d * z.H;
        s.h_after[b] = last ? p.h_last + place : p.h_prev ? p.h_prev + next : s.y_row[b];
        if (Cell::kMemory) s.c_after[b] = last || !p.c_prev ? p.c_last + place : p.c_prev + next;
        if (Cell::kKept) s.kept_row[b] = p.kept ? p.kept + (row * z.D + d) * Cell::kKept * z.H : nullptr;
      }
      s.step(z.H, step, alive, s.u + m * ld, packed_hh, bias_ih, bias_hh);
      for (int64_t b = 0; b < alive; ++b) {
        s.h_before[b] = s.h_after[b];
        if (Cell::kMemory) s.c_before[b] = s.c_after[b];
      }
      m += alive;
    });
    t = t1;
  }
}

// ----------------------------------------------------------------------------------------------- backward

// The values at one step that a cell's gradient may need.
template <class T>
struct Point {
  Vec<T> h, c, h_prev, c_prev;  // after and before the step
};

template <class T, class Cell>
struct BackwardTask {
  using Gates = Columns<T, Cell::kGates>;
  using V = Vec<T>;
  static constexpr int W = Simd<T>::width, G = Cell::kGates, S = Cell::kKept;

  const T **x_row, **h_prev_row, **c_prev_row, **kept_row, **du_row, **dv_row;  // [block rows]
  const T **h, **c, **dv_next;                                                  // [sequences]
  int64_t* row;                                                                 // [block rows]
  T *du[2], *dv[2], *tile, *dx;  // [block rows, ld] twice, [kRows, kPanel], [block rows, ld of I]
  T *dh, *dc;                    // [sequences, ld of H] what reaches the state other than through v
  T *dweight_ih, *dweight_hh, *dbias_ih, *dbias_hh;  // [I, ld], [H, ld], [ld], [ld]: transposed, summed over tasks at the end

  BackwardTask(Pieces& pieces, int64_t sequences, int64_t I, int64_t H, bool need_dx) {
    const int64_t rows = block_rows(sequences), ld = leading<T>(Gates::count(H)), ld_h = leading<T>(H);
    dweight_ih = pieces.take<T>((I + H + 2) * ld);
    dweight_hh = dweight_ih + I * ld;
    dbias_ih = dweight_hh + H * ld;
    dbias_hh = dbias_ih + ld;
    const T*** const by_row[] = {&x_row, &h_prev_row, &c_prev_row, &kept_row, &du_row, &dv_row};
    for (const T*** pointers : by_row) *pointers = pieces.take<const T*>(rows);
    const T*** const by_sequence[] = {&h, &c, &dv_next};
    for (const T*** pointers : by_sequence) *pointers = pieces.take<const T*>(sequences);
    row = pieces.take<int64_t>(rows);
    for (int half = 0; half < 2; ++half) {
      du[half] = pieces.take<T>(rows * ld);
      dv[half] = Cell::kSplit ? pieces.take<T>(rows * ld) : du[half];
    }
    tile = pieces.take<T>(kRows * kPanel<T>);
    dh = pieces.take<T>(sequences * ld_h);
    dc = pieces.take<T>(Cell::kMemory ? sequences * ld_h : 0);
    dx = pieces.take<T>(need_dx ? rows * leading<T>(I) : 0);
  }

  // du and dv of the n live sequences of step t, whose rows begin at `done` of the block. The first `going_on` of them have
  // a next step.
  void step(const RecurrentBackward<T>& p, int64_t d, int64_t t, int64_t going_on, int64_t n, int64_t done,
            const T* packed_hh, T* du_block, T* dv_block) const {
    const int64_t H = p.sizes.H, DH = p.sizes.D * H, K = Gates::count(H), ld = leading<T>(K), ld_h = leading<T>(H);
    for_groups(padded<T>(H), kPanel<T>, t % 2 == 1, [&](int64_t unit0, int64_t units) {
      const auto finish = [&](int64_t r, const T* through_v) {
        const int64_t i = done + r;
        for (int64_t u = 0; u < units; u += W) {
          const int64_t unit = unit0 + u, left = H - unit;
          V dhs = load(p.dy + row[i] * DH + d * H + unit, left);
          if (Cell::kDirect || !through_v) dhs += load(dh + r * ld_h + unit);  // at a sequence's end: dh_last
          if (through_v) dhs += load(through_v + u);
          const V dcs = Cell::kMemory ? load(dc + r * ld_h + unit) : V{};
          Point<T> at{load(h[r] + unit, left), {}, load(h_prev_row[i] + unit, left), {}};
          if (Cell::kMemory) at.c = load(c[r] + unit, left), at.c_prev = load(c_prev_row[i] + unit, left);
          V kept[S + 1], dus[G], dvs[G], dh_prev{}, dc_prev{};
          UNROLL for (int k = 0; k < S; ++k) kept[k] = load(kept_row[i] + k * H + unit, left);
          Cell::backward(dhs, dcs, at, kept, dus, dvs, dh_prev, dc_prev);
          UNROLL for (int g = 0; g < G; ++g) {
            const int64_t place = i * ld + unit * G + g * W;
            store(du_block + place, dus[g]);
            if (Cell::kSplit) store(dv_block + place, dvs[g]);
          }
          if (Cell::kDirect) store(dh + r * ld_h + unit, dh_prev);
          if (Cell::kMemory) store(dc + r * ld_h + unit, dc_prev);
        }
      };
      for_tiles(going_on, [&](int64_t r0, int height) {
        tile_rows(dv_next + r0, height, packed_hh + K * unit0, K, units, tile, kPanel<T>);
        for (int64_t r = r0; r < r0 + height; ++r) finish(r, tile + (r - r0) * kPanel<T>);
      });
      for (int64_t r = going_on; r < n; ++r) finish(r, nullptr);
    });
  }

  // What a block of m tokens adds to every gradient: dW_hh, db_hh, dW_ih, db_ih, and its rows of dx.        (2), (1)
  void gradients(const RecurrentBackward<T>& p, int64_t m, int half, int64_t d, const T* packed_ih, int helpers) const {
    const int64_t I = p.sizes.I, H = p.sizes.H, C = Gates::count(H), ld = leading<T>(C), ld_x = leading<T>(I);
    share(helpers, H, [&](int64_t j, int64_t n) {
      multiply_transposed(h_prev_row, j, n, dv[half], ld, m, C, dweight_hh, ld);
    });
    share(helpers, I, [&](int64_t j, int64_t n) {
      multiply_transposed(x_row, j, n, du[half], ld, m, C, dweight_ih, ld);
    });
    add_rows(du[half], m, C, dbias_ih);
    if (Cell::kSplit) add_rows(dv[half], m, C, dbias_hh);
    if (!p.dx) return;
    share(helpers, m, [&](int64_t first, int64_t n) {
      multiply(du_row + first, n, packed_ih, C, padded<T>(I), kPanel<T>, dx + first * ld_x, ld_x);
      for (int64_t i = first; i < first + n; ++i)
        memcpy(p.dx + (d * p.sizes.R + row[i]) * I, dx + i * ld_x, static_cast<size_t>(I) * sizeof(T));
    });
  }

  static void add_rows(const T* rows, int64_t m, int64_t C, T* sum) {
    const int64_t ld = leading<T>(C);
    for (int64_t c = 0; c < C; c += W) {
      V total = load(sum + c);
      for (int64_t i = 0; i < m; ++i) total += load(rows + i * ld + c);
      store(sum + c, total);
    }
  }
};

template <class T, class Cell>
void backward_task(const RecurrentBackward<T>& p, const Task& task, const T* packed_ih, const T* packed_hh, char* memory,
                   int helpers) {
  using Backward = BackwardTask<T, Cell>;
  using Gates = typename Backward::Gates;
  const auto& z = p.sizes;
  const int64_t DH = z.D * z.H, ld = leading<T>(Gates::count(z.H)), ld_h = leading<T>(z.H), d = task.direction;
  const auto bytes = static_cast<size_t>(z.H) * sizeof(T);
  const Walk walk(p.rows, task);
  Pieces pieces(memory);
  const Backward s(pieces, task.count, z.I, z.H, p.dx != nullptr);
  memset(s.dweight_ih, 0, static_cast<size_t>((z.I + z.H + 2) * ld) * sizeof(T));
  memset(s.dh, 0, static_cast<size_t>(task.count * ld_h) * sizeof(T));  // and so the units beyond H
  if (Cell::kMemory) memset(s.dc, 0, static_cast<size_t>(task.count * ld_h) * sizeof(T));
  for (int64_t b = 0; b < task.count; ++b) {
    const int64_t place = (d * z.B + task.sequence[b]) * z.H;
    s.h[b] = p.h_end + place;
    memcpy(s.dh + b * ld_h, p.dh_last + place, bytes);
    if (!Cell::kMemory) continue;
    s.c[b] = p.c_end + place;
    memcpy(s.dc + b * ld_h, p.dc_last + place, bytes);
  }
  int half = 0;
  int64_t alive = 0;  // of the step after
  for (int64_t t1 = walk.steps(); t1 > 0; half ^= 1) {
    // as many steps back as hold kBlock rows, at least one
    int64_t t0 = t1, m = 0;
    for (int64_t n = alive; t0 > 0; --t0) {
      while (n < task.count && walk.length(n) >= t0) ++n;
      if (m > 0 && m + n > kBlock) break;
      m += n;
    }
    int64_t done = 0;
    for (int64_t t = t1 - 1; t >= t0; --t) {
      int64_t n = alive;
      while (n < task.count && walk.length(n) > t) ++n;
      for (int64_t b = 0; b < n; ++b) {
        const int64_t row = walk.row(b, t), i = done + b;
        s.row[i] = row;
        s.x_row[i] = p.x + row * z.I;
        s.h_prev_row[i] = p.h_prev + row * DH + d * z.H;
        if (Cell::kMemory) s.c_prev_row[i] = p.c_prev + row * DH + d * z.H;
        if (Cell::kKept) s.kept_row[i] = p.kept + (row * z.D + d) * Cell::kKept * z.H;
        s.du_row[i] = s.du[half] + i * ld;
        s.dv_row[i] = s.dv[half] + i * ld;
      }
      s.step(p, d, t, alive, n, done, packed_hh, s.du[half], s.dv[half]);
      for (int64_t b = 0; b < n; ++b) {  // the state before this step is the one after the step before
        s.h[b] = s.h_prev_row[done + b];
        if (Cell::kMemory) s.c[b] = s.c_prev_row[done + b];
        s.dv_next[b] = s.dv_row[done + b];
      }
      done += n;
      alive = n;
    }
    s.gradients(p, m, half, d, packed_ih, helpers);
    t1 = t0;
  }
  // dh0 = W_hh^T dv of the first step, and what reaches h0 otherwise
  const int64_t K = Gates::count(z.H);
  for_groups(padded<T>(z.H), kPanel<T>, false, [&](int64_t unit0, int64_t units) {
    for_tiles(alive, [&](int64_t r0, int height) {
      tile_rows(s.dv_next + r0, height, packed_hh + K * unit0, K, units, s.tile, kPanel<T>);
      for (int64_t r = 0; r < height; ++r)
        for (int64_t u = 0; u < units; u += Backward::W) {
          T* const sum = s.dh + (r0 + r) * ld_h + unit0 + u;
          const Vec<T> through_v = load(s.tile + r * kPanel<T> + u);
          store(sum, Cell::kDirect ? load(sum) + through_v : through_v);
        }
    });
  });
  for (int64_t b = 0; b < task.count; ++b) {
    const int64_t place = (d * z.B + task.sequence[b]) * z.H;
    memcpy(p.dh0 + place, s.dh + b * ld_h, bytes);
    if (Cell::kMemory) memcpy(p.dc0 + place, s.dc + b * ld_h, bytes);
  }
}

// -------------------------------------------------------------------------------------------------- calls

template <class T, class Cell>
void recurrent_forward(const RecurrentForward<T>& p) {
  using Gates = Columns<T, Cell::kGates>;
  const auto& z = p.sizes;
  if (z.B == 0) return;
  const int64_t C = Gates::count(z.H), GH = Cell::kGates * z.H, weights = C * (z.I + z.H + 2);
  const int threads = useful_threads(z.threads, static_cast<double>(z.R * z.D * C) * static_cast<double>(z.I + z.H));
  const Schedule schedule(p.rows.length, z.B, z.D, threads);
  Pieces layout(nullptr);
  layout.take<T>(weights * z.D);
  const int64_t packed_bytes = layout.used();
  ForwardTask<T, Cell>(layout, z.B, z.H);
  const int64_t task_bytes = layout.used() - packed_bytes;
  const Scratch scratch(static_cast<size_t>(packed_bytes + task_bytes * schedule.tasks()));
  T* const packed = reinterpret_cast<T*>(scratch.data());
  parallel_for(threads, z.D, [&](int64_t d) {
    T *const ih = packed + d * weights, *const hh = ih + C * z.I, *const bias_ih = hh + C * z.H, *const bias_hh = bias_ih + C;
    const auto rows_of = [&](const T* weight, int64_t width) {
      return [=](int64_t c) {
        const int64_t row = Gates::row(c, z.H);
        return row < 0 ? nullptr : weight + (d * GH + row) * width;
      };
    };
    pack_columns(z.I, C, Gates::kGroup, ih, rows_of(p.weight_ih, z.I));
    pack_columns(z.H, C, Gates::kGroup, hh, rows_of(p.weight_hh, z.H));
    for (int64_t c = 0; c < C; ++c) {
      const int64_t row = Gates::row(c, z.H);
      bias_ih[c] = row >= 0 && p.bias_ih ? p.bias_ih[d * GH + row] : 0;
      bias_hh[c] = row >= 0 && p.bias_hh ? p.bias_hh[d * GH + row] : 0;
      if (!Cell::kSplit) bias_ih[c] += bias_hh[c];  // only their sum matters
    }
  });
  parallel_for(threads, schedule.tasks(), [&](int64_t i) {
    const T *const ih = packed + schedule[i].direction * weights, *const hh = ih + C * z.I, *const bias = hh + C * z.H;
    forward_task<T, Cell>(p, schedule[i], ih, hh, bias, bias + C, scratch.data() + packed_bytes + i * task_bytes,
                          schedule.tasks() == 1 ? threads : 1);
  });
}

template <class T, class Cell>
void recurrent_backward(const RecurrentBackward<T>& p) {
  using Gates = Columns<T, Cell::kGates>;
  const auto& z = p.sizes;
  const int64_t C = Gates::count(z.H), GH = Cell::kGates * z.H, input = padded<T>(z.I), hidden = padded<T>(z.H);
  const int64_t weights = C * (input + hidden);
  const int threads = useful_threads(z.threads, 2 * static_cast<double>(z.R * z.D * C) * static_cast<double>(z.I + z.H));
  const Schedule schedule(p.rows.length, z.B, z.D, threads);
  Pieces layout(nullptr);
  layout.take<T>(weights * z.D);
  const int64_t packed_bytes = layout.used();
  BackwardTask<T, Cell>(layout, z.B, z.I, z.H, p.dx != nullptr);
  const int64_t task_bytes = layout.used() - packed_bytes;
  const Scratch scratch(static_cast<size_t>(packed_bytes + task_bytes * schedule.tasks()));
  T* const packed = reinterpret_cast<T*>(scratch.data());
  parallel_for(threads, z.D, [&](int64_t d) {
    T* const ih = packed + d * weights;
    const auto rows_of = [&](const T* weight, int64_t width) {
      return [=](int64_t k) {
        const int64_t row = Gates::row(k, z.H);
        return row < 0 ? nullptr : weight + (d * GH + row) * width;
      };
    };
    if (p.dx) pack_rows(C, z.I, ih, rows_of(p.weight_ih, z.I));
    pack_rows(C, z.H, ih + C * input, rows_of(p.weight_hh, z.H));
  });
  parallel_for(threads, schedule.tasks(), [&](int64_t i) {
    const T* const ih = packed + schedule[i].direction * weights;
    backward_task<T, Cell>(p, schedule[i], ih, ih + C * input, scratch.data() + packed_bytes + i * task_bytes,
                           schedule.tasks() == 1 ? threads : 1);
  });
  // the tasks of a direction, added up in their order
  const int64_t ld = leading<T>(C), stride = task_bytes / static_cast<int64_t>(sizeof(T)), parts = schedule.per_direction();
  constexpr int64_t kColumns = 64;
  const int64_t chunks = ceil_div(C, kColumns);
  parallel_for(threads, z.D * chunks, [&](int64_t i) {
    const int64_t d = i / chunks, c0 = i % chunks * kColumns, c1 = c0 + kColumns < C ? c0 + kColumns : C;
    const T* first = reinterpret_cast<const T*>(scratch.data() + packed_bytes + d * parts * task_bytes);
    const auto row = [&](int64_t c) { return Gates::row(c, z.H); };
    const auto sum = [&](int64_t J, T* out) {
      sum_transposed(first, parts, stride, J, c0, c1, ld, out + d * GH * J, row);
      first += J * ld;
    };
    sum(z.I, p.dweight_ih);
    sum(z.H, p.dweight_hh);
    sum(1, p.dbias_ih);
    if (!Cell::kSplit) first -= ld;
    sum(1, p.dbias_hh);
  });
}

#define UNROLLED_CELL(Cell, name)                                                                      \
  template <class T>                                                                                   \
  void name##_forward(const RecurrentForward<T>& p) { recurrent_forward<T, Cell<T>>(p); }               \
  template <class T>                                                                                   \
  void name##_backward(const RecurrentBackward<T>& p) { recurrent_backward<T, Cell<T>>(p); }            \
  template void name##_forward(const RecurrentForward<float>&);                                        \
  template void name##_forward(const RecurrentForward<double>&);                                       \
  template void name##_backward(const RecurrentBackward<float>&);                                      \
  template void name##_backward(const RecurrentBackward<double>&);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
