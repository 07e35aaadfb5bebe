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

// For the groups of C columns, shared out, forth in even steps and back in odd ones, so that the weights a step ended with
// are still in the nearest cache when the next begins: f(first column, columns).
template <class F>
inline void for_groups(int helpers, int64_t C, int64_t group, bool backwards, F&& f) {
  share(helpers, ceil_div(C, group), [&](int64_t first, int64_t groups) {
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t c = (first + (backwards ? groups - 1 - i : i)) * group;
      f(c, C - c < group ? C - c : group);
    }
  });
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

template <class T, class Cell>
struct FusedForwardWeights {
  using Gates = Columns<T, Cell::kGates>;
  T *ih, *hh, *bias_ih, *bias_hh;

  FusedForwardWeights(Pieces& pieces, const RecurrentForward<T>& p) {
    const auto& z = p.sizes;
    const int64_t C = Gates::count(z.H);
    ih = pieces.take<T>(C * z.I);
    hh = pieces.take<T>(C * z.H);
    bias_ih = pieces.take<T>(C);
    bias_hh = pieces.take<T>(C);
  }

  void fill(const RecurrentForward<T>& p, int64_t d, int helpers) const {
    const auto& z = p.sizes;
    const int64_t C = Gates::count(z.H), GH = Cell::kGates * z.H;
    const auto pack = [&](const T* weight, int64_t width, T* packed) {
      const auto row = rows_of<Gates>(weight + d * GH * width, z.H, width);
      for_groups(helpers, C, Gates::kGroup, false, [&](int64_t c, int64_t columns) {
        pack_columns(width, columns, Gates::kGroup, packed + width * c, [&](int64_t j) { return row(c + j); });
      });
    };
    pack(p.weight_ih, z.I, ih);
    pack(p.weight_hh, z.H, hh);
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
  T* u;                                              // [block rows, ld]

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
  }

  // The n live sequences of step t.
  void step(int64_t H, int64_t t, int64_t n, const T* u_step, const FusedForwardWeights<T, Cell>& w, int helpers) const {
    const int64_t C = Gates::count(H), ld = leading<T>(C);
    const int threads = useful_threads(helpers, static_cast<double>(n * H * C));
    for_groups(threads, C, Gates::kGroup, t % 2 == 1, [&](int64_t c0, int64_t columns) {
      T tile[kRows * Gates::kGroup];
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
          if (C >= 4 * helpers * Gates::kGroup)  // the columns that a thread will read in the steps
            return for_groups(helpers, C, Gates::kGroup, false, [&](int64_t c, int64_t columns) {
              multiply(x_row, m, w.ih + z.I * c, z.I, columns, Gates::kGroup, u + c, ld);  // (1)
            });
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
          step(z.H, t, n, u + first * ld, w, helpers);
          for (int64_t b = 0; b < n; ++b) {
            h_before[b] = h_after[b];
            if (Cell::kMemory) c_before[b] = c_after[b];
          }
        });
  }
};

template <class T, class Cell>
void fused_forward(const RecurrentForward<T>& p) {
  const auto& z = p.sizes;
  const double C = static_cast<double>(Columns<T, Cell::kGates>::count(z.H));
  run_tasks<T, FusedForwardWeights<T, Cell>, FusedForward<T, Cell>>(
      p, static_cast<double>(z.R * z.D * (z.I + z.H)) * C, true,
      [&](const Task& task, const FusedForwardWeights<T, Cell>& w, const FusedForward<T, Cell>& memory, int helpers) {
        memory.run(p, task, w, helpers);
      },
      [](const auto&, int64_t, int64_t, int) {});
}

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
