// The recurrence of a plain cell: its algebra follows on the register tile of the recurrent product, before anything is
// stored. The equations are in src/unrolled/equations/recurrence.py. A cell is a pair of pointwise functions:
//
//   struct Cell {
//     static constexpr int kGates, kKept;        // G, S of core.h
//     static constexpr bool kMemory;             // has a second state c
//     static constexpr bool kSplit;              // du and dv differ (else dv is du, and u and v matter by their sum)
//     static constexpr bool kDirect;             // h reaches the next h other than through v: dh_prev is not 0
//     static void forward(const V u[G], const V v[G], V h, V c, V& h_next, V& c_next, V kept[S]);
//     static void backward(V dh, V& dc, const Point&, const V kept[S], V du[G], V dv[G], V& dh_prev, V& dc_prev);
//   };
//
// with u = W_ih x + b_ih, v = W_hh h + b_hh. dh_prev is what reaches the state before other than through v; dc comes in
// without what c receives through its own h and goes out with it.
#pragma once

#include "walk.h"

namespace unrolled {
namespace UNROLLED_TARGET {

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

// row(k) = the row of a direction's weights that stands at place k of the layout, `width` long; null where there is none.
template <class Gates, class T>
auto rows_of(const T* weight, int64_t H, int64_t width) {
  return [=](int64_t k) {
    const int64_t row = Gates::row(k, H);
    return row < 0 ? nullptr : weight + row * width;
  };
}

// ------------------------------------------------------------------------------------------------ forward

template <class T, class Cell>
struct FusedForwardWeights {
  using Gates = Columns<T, Cell::kGates>;
  T *ih, *hh, *bias_ih, *bias_hh;

  FusedForwardWeights(Pieces& pieces, const RecurrentForward<T>& p) {
    const auto& z = p.sizes;
    const int64_t C = Gates::count(z.H);
    ih = pieces.take<T>(C * (z.I + z.H + 2));
    hh = ih + C * z.I;
    bias_ih = hh + C * z.H;
    bias_hh = bias_ih + C;
  }

  void fill(const RecurrentForward<T>& p, int64_t d) const {
    const auto& z = p.sizes;
    const int64_t C = Gates::count(z.H), GH = Cell::kGates * z.H;
    pack_columns(z.I, C, Gates::kGroup, ih, rows_of<Gates>(p.weight_ih + d * GH * z.I, z.H, z.I));
    pack_columns(z.H, C, Gates::kGroup, hh, rows_of<Gates>(p.weight_hh + d * GH * z.H, z.H, z.H));
    for (int64_t c = 0; c < C; ++c) {
      const int64_t row = Gates::row(c, z.H);
      bias_ih[c] = row >= 0 && p.bias_ih ? p.bias_ih[d * GH + row] : 0;
      bias_hh[c] = row >= 0 && p.bias_hh ? p.bias_hh[d * GH + row] : 0;
      if (!Cell::kSplit) bias_ih[c] += bias_hh[c];  // only their sum matters
    }
  }
};

template <class T, class Cell>
struct FusedForward {
  using Gates = Columns<T, Cell::kGates>;
  using V = Vec<T>;
  static constexpr int W = Simd<T>::width, G = Cell::kGates, S = Cell::kKept;

  const T **x_row, **h_before, **c_before;           // [block rows], [sequences]
  T **y_row, **h_after, **c_after, **kept_row;       // [sequences]
  T *u, *tile;                                       // [block rows, ld], [kRows, kGroup]

  FusedForward(Pieces& pieces, const RecurrentForward<T>& p, int64_t sequences) {
    const int64_t rows = block_rows(sequences);
    x_row = pieces.take<const T*>(rows);
    h_before = pieces.take<const T*>(sequences);
    c_before = pieces.take<const T*>(sequences);
    y_row = pieces.take<T*>(sequences);
    h_after = pieces.take<T*>(sequences);
    c_after = pieces.take<T*>(sequences);
    kept_row = pieces.take<T*>(sequences);
    u = pieces.take<T>(rows * leading<T>(Gates::count(p.sizes.H)));
    tile = pieces.take<T>(kRows * Gates::kGroup);
  }

  // The n live sequences of step t.
  void step(int64_t H, int64_t t, int64_t n, const T* u_step, const FusedForwardWeights<T, Cell>& w) const {
    const int64_t C = Gates::count(H), ld = leading<T>(C);
    for_groups(C, Gates::kGroup, t % 2 == 1, [&](int64_t c0, int64_t columns) {
      for_tiles(n, [&](int64_t r0, int height) {
        tile_rows(h_before + r0, height, w.hh + H * c0, H, columns, tile, Gates::kGroup);  // (2)
        for (int64_t r = r0; r < r0 + height; ++r)
          for (int64_t c = 0; c < columns; c += G * W) {
            const int64_t unit = (c0 + c) / G, left = H - unit;
            V us[G], vs[G], kept[S + 1], h, memory{};
            UNROLL for (int g = 0; g < G; ++g) {
              us[g] = load(u_step + r * ld + c0 + c + g * W) + load(w.bias_ih + c0 + c + g * W);
              vs[g] = load(tile + (r - r0) * Gates::kGroup + c + g * W);
              if (Cell::kSplit) vs[g] += load(w.bias_hh + c0 + c + g * W);
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

  void run(const RecurrentForward<T>& p, const Task& task, const FusedForwardWeights<T, Cell>& w, int helpers) const {
    const auto& z = p.sizes;
    const int64_t DH = z.D * z.H, C = Gates::count(z.H), ld = leading<T>(C), d = task.direction;
    const auto bytes = static_cast<size_t>(z.H) * sizeof(T);
    const Walk walk(p.rows, task);
    // the memory of an LSTM goes from c_prev row to c_prev row; where nothing is kept it stays in c_last
    for (int64_t b = 0; b < task.count; ++b) {
      const int64_t place = (d * z.B + task.sequence[b]) * z.H;
      const int64_t first = d * z.H + (walk.length(b) ? walk.row(b, 0) * DH : 0);
      const bool empty = walk.length(b) == 0;
      h_before[b] = p.h0 + place;
      if (empty) memcpy(p.h_last + place, p.h0 + place, bytes);
      if (p.h_prev && !empty) memcpy(p.h_prev + first, p.h0 + place, bytes);
      if (!Cell::kMemory) continue;
      c_before[b] = p.c0 + place;
      if (empty) memcpy(p.c_last + place, p.c0 + place, bytes);
      if (p.c_prev && !empty) memcpy(p.c_prev + first, p.c0 + place, bytes);
    }
    walk.forward(
        [&](int64_t i, int64_t row) { x_row[i] = p.x + row * z.I; },
        [&](int64_t m) {
          share(helpers, m, [&](int64_t first, int64_t rows) {
            multiply(x_row + first, rows, w.ih, z.I, C, Gates::kGroup, u + first * ld, ld);  // (1)
          });
        },
        [&](int64_t t, int64_t n, int64_t first) {
          for (int64_t b = 0; b < n; ++b) {
            const bool last = t + 1 == walk.length(b);
            const int64_t row = walk.row(b, t), place = (d * z.B + task.sequence[b]) * z.H;
            const int64_t next = last ? 0 : walk.row(b, t + 1) * DH + d * z.H;
            y_row[b] = p.y + row * DH + d * z.H;
            h_after[b] = last ? p.h_last + place : p.h_prev ? p.h_prev + next : y_row[b];
            if (Cell::kMemory) c_after[b] = last || !p.c_prev ? p.c_last + place : p.c_prev + next;
            if (S) kept_row[b] = p.kept ? p.kept + (row * z.D + d) * S * z.H : nullptr;
          }
          step(z.H, t, n, u + first * ld, w);
          for (int64_t b = 0; b < n; ++b) {
            h_before[b] = h_after[b];
            if (Cell::kMemory) c_before[b] = c_after[b];
          }
        });
  }
};

// ----------------------------------------------------------------------------------------------- backward

// The values at one step that a cell's gradient may need.
template <class T>
struct Point {
  Vec<T> h, c, h_prev, c_prev;  // after and before the step
};

template <class T, class Cell>
struct FusedBackwardWeights {
  using Gates = Columns<T, Cell::kGates>;
  T *ih, *hh;

  FusedBackwardWeights(Pieces& pieces, const RecurrentBackward<T>& p) {
    const auto& z = p.sizes;
    ih = pieces.take<T>(Gates::count(z.H) * (padded<T>(z.I) + padded<T>(z.H)));
    hh = ih + Gates::count(z.H) * padded<T>(z.I);
  }

  void fill(const RecurrentBackward<T>& p, int64_t d) const {
    const auto& z = p.sizes;
    const int64_t C = Gates::count(z.H), GH = Cell::kGates * z.H;
    if (p.dx) pack_rows(C, z.I, ih, rows_of<Gates>(p.weight_ih + d * GH * z.I, z.H, z.I));
    pack_rows(C, z.H, hh, rows_of<Gates>(p.weight_hh + d * GH * z.H, z.H, z.H));
  }
};

template <class T, class Cell>
struct FusedBackward {
  using Gates = Columns<T, Cell::kGates>;
  using V = Vec<T>;
  static constexpr int W = Simd<T>::width, G = Cell::kGates, S = Cell::kKept;

  const T **x_row, **h_prev_row, **c_prev_row, **kept_row, **du_row, **dv_row;  // [block rows]
  const T **h, **c, **dv_next;                                                  // [sequences]
  int64_t* row;                                                                 // [block rows]
  T *du[2], *dv[2], *tile, *dx_block;  // [block rows, ld] twice, [kRows, kPanel], [block rows, ld of I]
  T *dh, *dc;                          // [sequences, ld of H] what reaches the state other than through v
  T *dweight_ih, *dweight_hh, *dbias_ih, *dbias_hh;  // [I, ld], [H, ld], [ld], [ld]: transposed, summed over tasks at the end

  FusedBackward(Pieces& pieces, const RecurrentBackward<T>& p, int64_t sequences) {
    const auto& z = p.sizes;
    const int64_t rows = block_rows(sequences), ld = leading<T>(Gates::count(z.H)), ld_h = leading<T>(z.H);
    dweight_ih = pieces.take<T>((z.I + z.H + 2) * ld);
    dweight_hh = dweight_ih + z.I * ld;
    dbias_ih = dweight_hh + z.H * ld;
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
    dx_block = pieces.take<T>(p.dx ? rows * leading<T>(z.I) : 0);
  }

  // du and dv of the n live sequences of step t, whose rows begin at `done` of the block. The first `going_on` of them have
  // a next step, whose dv comes back.
  void step(const RecurrentBackward<T>& p, int64_t d, int64_t t, int64_t going_on, int64_t n, int64_t done,
            const T* packed_hh, T* du_block, T* dv_block) const {
    const int64_t H = p.sizes.H, DH = p.sizes.D * H, K = Gates::count(H), ld = leading<T>(K), ld_h = leading<T>(H);
    for_groups(padded<T>(H), kPanel<T>, t % 2 == 1, [&](int64_t unit0, int64_t units) {
      const auto finish = [&](int64_t r, const T* through_v) {
        const int64_t i = done + r;
        for (int64_t u = 0; u < units; u += W) {
          const int64_t unit = unit0 + u, left = H - unit, place = row[i] * DH + d * H + unit;
          V dhs = load(p.dy + place, left);
          if (Cell::kDirect || !through_v) dhs += load(dh + r * ld_h + unit);  // at a sequence's end: dh_last
          if (through_v) dhs += load(through_v + u);
          V dcs = Cell::kMemory ? load(dc + r * ld_h + unit) : V{};
          Point<T> at{load(h[r] + unit, left), {}, load(h_prev_row[i] + unit, left), {}};
          if (Cell::kMemory) at.c = load(c[r] + unit, left), at.c_prev = load(c_prev_row[i] + unit, left);
          V kept[S + 1], dus[G], dvs[G], dh_prev{}, dc_prev{};
          UNROLL for (int k = 0; k < S; ++k) kept[k] = load(kept_row[i] + k * H + unit, left);
          Cell::backward(dhs, dcs, at, kept, dus, dvs, dh_prev, dc_prev);
          if (p.dh) store(p.dh + place, dhs, left);
          if (Cell::kMemory && p.dc) store(p.dc + place, dcs, left);
          UNROLL for (int g = 0; g < G; ++g) {
            const int64_t at_gate = i * ld + unit * G + g * W;
            store(du_block + at_gate, dus[g]);
            if (Cell::kSplit) store(dv_block + at_gate, dvs[g]);
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
      multiply(du_row + first, n, packed_ih, C, padded<T>(I), kPanel<T>, dx_block + first * ld_x, ld_x);
      for (int64_t i = first; i < first + n; ++i)
        memcpy(p.dx + (d * p.sizes.R + row[i]) * I, dx_block + i * ld_x, static_cast<size_t>(I) * sizeof(T));
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

  void run(const RecurrentBackward<T>& p, const Task& task, const FusedBackwardWeights<T, Cell>& w, int helpers) const {
    const auto& z = p.sizes;
    const int64_t DH = z.D * z.H, K = Gates::count(z.H), ld = leading<T>(K), ld_h = leading<T>(z.H), d = task.direction;
    const auto bytes = static_cast<size_t>(z.H) * sizeof(T);
    const Walk walk(p.rows, task);
    memset(dweight_ih, 0, static_cast<size_t>((z.I + z.H + 2) * ld) * sizeof(T));
    memset(dh, 0, static_cast<size_t>(task.count * ld_h) * sizeof(T));  // and so the units beyond H
    if (Cell::kMemory) memset(dc, 0, static_cast<size_t>(task.count * ld_h) * sizeof(T));
    for (int64_t b = 0; b < task.count; ++b) {
      const int64_t place = (d * z.B + task.sequence[b]) * z.H;
      h[b] = p.h_end + place;
      memcpy(dh + b * ld_h, p.dh_last + place, bytes);
      if (!Cell::kMemory) continue;
      c[b] = p.c_end + place;
      memcpy(dc + b * ld_h, p.dc_last + place, bytes);
    }
    int half = 0;
    const int64_t begun = walk.backward(
        [&](int64_t t, int64_t going_on, int64_t n, int64_t done) {
          for (int64_t b = 0; b < n; ++b) {
            const int64_t place = walk.row(b, t), i = done + b;
            row[i] = place;
            x_row[i] = p.x + place * z.I;
            h_prev_row[i] = p.h_prev + place * DH + d * z.H;
            if (Cell::kMemory) c_prev_row[i] = p.c_prev + place * DH + d * z.H;
            if (S) kept_row[i] = p.kept + (place * z.D + d) * S * z.H;
            du_row[i] = du[half] + i * ld;
            dv_row[i] = dv[half] + i * ld;
          }
          const bool cut = z.bptt && (t + 1) % z.bptt == 0;
          if (cut) {
            memset(dh, 0, static_cast<size_t>(going_on * ld_h) * sizeof(T));
            if (Cell::kMemory) memset(dc, 0, static_cast<size_t>(going_on * ld_h) * sizeof(T));
          }
          step(p, d, t, cut ? 0 : going_on, n, done, w.hh, du[half], dv[half]);
          for (int64_t b = 0; b < n; ++b) {  // the state before this step is the one after the step before
            h[b] = h_prev_row[done + b];
            if (Cell::kMemory) c[b] = c_prev_row[done + b];
            dv_next[b] = dv_row[done + b];
          }
        },
        [&](int64_t m) {
          gradients(p, m, half, d, w.ih, helpers);
          half ^= 1;
        });
    // dh0 = W_hh^T dv of the first step, and what reaches h0 otherwise
    for_groups(padded<T>(z.H), kPanel<T>, false, [&](int64_t unit0, int64_t units) {
      for_tiles(begun, [&](int64_t r0, int height) {
        tile_rows(dv_next + r0, height, w.hh + K * unit0, K, units, tile, kPanel<T>);
        for (int64_t r = 0; r < height; ++r)
          for (int64_t u = 0; u < units; u += W) {
            T* const sum = dh + (r0 + r) * ld_h + unit0 + u;
            const V through_v = load(tile + r * kPanel<T> + u);
            store(sum, Cell::kDirect ? load(sum) + through_v : through_v);
          }
      });
    });
    for (int64_t b = 0; b < task.count; ++b) {
      const int64_t place = (d * z.B + task.sequence[b]) * z.H;
      memcpy(p.dh0 + place, dh + b * ld_h, bytes);
      if (Cell::kMemory) memcpy(p.dc0 + place, dc + b * ld_h, bytes);
    }
  }
};

// -------------------------------------------------------------------------------------------------- calls

template <class T, class Cell>
void fused_forward(const RecurrentForward<T>& p) {
  const auto& z = p.sizes;
  const double C = static_cast<double>(Columns<T, Cell::kGates>::count(z.H));
  run_tasks<T, FusedForwardWeights<T, Cell>, FusedForward<T, Cell>>(
      p, static_cast<double>(z.R * z.D * (z.I + z.H)) * C,
      [&](const Task& task, const FusedForwardWeights<T, Cell>& w, const FusedForward<T, Cell>& memory, int helpers) {
        memory.run(p, task, w, helpers);
      },
      [](const auto&, int64_t, int64_t, int) {});
}

template <class T, class Cell>
void fused_backward(const RecurrentBackward<T>& p) {
  using Gates = Columns<T, Cell::kGates>;
  const auto& z = p.sizes;
  const int64_t C = Gates::count(z.H), GH = Cell::kGates * z.H, ld = leading<T>(C);
  run_tasks<T, FusedBackwardWeights<T, Cell>, FusedBackward<T, Cell>>(
      p, 2 * static_cast<double>(z.R * z.D * (z.I + z.H)) * static_cast<double>(C),
      [&](const Task& task, const FusedBackwardWeights<T, Cell>& w, const FusedBackward<T, Cell>& memory, int helpers) {
        memory.run(p, task, w, helpers);
      },
      // the tasks of a direction, added up in their order
      [&](const auto& memory, int64_t parts, int64_t stride, int threads) {
        sum_columns(threads, z.D, C, [&](int64_t d, int64_t c0, int64_t c1) {
          const FusedBackward<T, Cell> first = memory(d * parts);
          const auto row = [&](int64_t c) { return Gates::row(c, z.H); };
          const auto sum = [&](const T* part, int64_t J, T* out) {
            sum_transposed(part, parts, stride, J, c0, c1, ld, out + d * GH * J, row);
          };
          sum(first.dweight_ih, z.I, p.dweight_ih);
          sum(first.dweight_hh, z.H, p.dweight_hh);
          sum(first.dbias_ih, 1, p.dbias_ih);
          sum(Cell::kSplit ? first.dbias_hh : first.dbias_ih, 1, p.dbias_hh);
        });
      });
}

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
