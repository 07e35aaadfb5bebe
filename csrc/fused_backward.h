// The gradient of a plain cell: back-propagation through time, the cell on the register tile of W_hh^T dv.
#pragma once

#include "fused_forward.h"

namespace unrolled {
namespace UNROLLED_TARGET {

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
    ih = pieces.take<T>(Gates::count(z.H) * padded<T>(z.I));
    hh = pieces.take<T>(Gates::count(z.H) * padded<T>(z.H));
  }

  void fill(const RecurrentBackward<T>& p, int64_t d, int helpers) const {
    const auto& z = p.sizes;
    const int64_t C = Gates::count(z.H), GH = Cell::kGates * z.H;
    const auto pack = [&](const T* weight, int64_t width, T* packed) {
      const auto row = rows_of<Gates>(weight + d * GH * width, z.H, width);
      for_groups(helpers, width, kPanel<T>, false, [&](int64_t c, int64_t columns) {
        pack_rows(C, columns, packed + C * c, [&](int64_t k) { return row(k) ? row(k) + c : nullptr; });
      });
    };
    if (p.dx) pack(p.weight_ih, z.I, ih);
    pack(p.weight_hh, z.H, hh);
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
  T *du[2], *dv[2], *dx_block;         // [block rows, ld] twice, [block rows, ld of I]
  T *dh, *dc;                          // [sequences, ld of H] what reaches the state other than through v
  T *dweight_ih, *dweight_hh, *dbias_ih, *dbias_hh;  // [I, ld], [H, ld], [ld], [ld]: transposed, summed over tasks at the end
  int64_t sums;                                      // bytes of these four

  FusedBackward(Pieces& pieces, const RecurrentBackward<T>& p, int64_t sequences) {
    const auto& z = p.sizes;
    const int64_t rows = block_rows(sequences), ld = leading<T>(Gates::count(z.H)), ld_h = leading<T>(z.H);
    const int64_t before = pieces.used();
    dweight_ih = pieces.take<T>(z.I * ld);
    dweight_hh = pieces.take<T>(z.H * ld);
    dbias_ih = pieces.take<T>(ld);
    dbias_hh = pieces.take<T>(ld);
    sums = pieces.used() - before;
    const T*** const by_row[] = {&x_row, &h_prev_row, &c_prev_row, &kept_row, &du_row, &dv_row};
    for (const T*** pointers : by_row) *pointers = pieces.take<const T*>(rows);
    const T*** const by_sequence[] = {&h, &c, &dv_next};
    for (const T*** pointers : by_sequence) *pointers = pieces.take<const T*>(sequences);
    row = pieces.take<int64_t>(rows);
    for (int half = 0; half < 2; ++half) {
      du[half] = pieces.take<T>(rows * ld);
      dv[half] = Cell::kSplit ? pieces.take<T>(rows * ld) : du[half];
    }
    dh = pieces.take<T>(sequences * ld_h);
    dc = pieces.take<T>(Cell::kMemory ? sequences * ld_h : 0);
    dx_block = pieces.take<T>(p.dx ? rows * leading<T>(z.I) : 0);
  }

  // du and dv of the n live sequences of step t, whose rows begin at `done` of the block. The first `going_on` of them have
  // a next step, whose dv comes back.
  void step(const RecurrentBackward<T>& p, int64_t d, int64_t t, int64_t going_on, int64_t n, int64_t done,
            const T* packed_hh, T* du_block, T* dv_block, int helpers) const {
    const int64_t H = p.sizes.H, DH = p.sizes.D * H, K = Gates::count(H), ld = leading<T>(K), ld_h = leading<T>(H);
    const int threads = useful_threads(helpers, static_cast<double>(n * H * K));
    for_groups(threads, padded<T>(H), kPanel<T>, t % 2 == 1, [&](int64_t unit0, int64_t units) {
      T tile[kRows * kPanel<T>];
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
    if (padded<T>(I) >= 2 * helpers * kPanel<T>)
      return for_groups(helpers, padded<T>(I), kPanel<T>, false, [&](int64_t c, int64_t columns) {
        multiply(du_row, m, packed_ih + C * c, C, columns, kPanel<T>, dx_block + c, ld_x);
        const int64_t width = columns < I - c ? columns : I - c;
        for (int64_t i = 0; i < m; ++i)
          memcpy(p.dx + (d * p.sizes.R + row[i]) * I + c, dx_block + i * ld_x + c, static_cast<size_t>(width) * sizeof(T));
      });
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
    memset(dweight_ih, 0, static_cast<size_t>(sums));
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
          step(p, d, t, cut ? 0 : going_on, n, done, w.hh, du[half], dv[half], helpers);
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
    for_groups(helpers, padded<T>(z.H), kPanel<T>, false, [&](int64_t unit0, int64_t units) {
      T tile[kRows * kPanel<T>];
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

template <class T, class Cell>
void fused_backward(const RecurrentBackward<T>& p) {
  using Gates = Columns<T, Cell::kGates>;
  const auto& z = p.sizes;
  const int64_t C = Gates::count(z.H), GH = Cell::kGates * z.H, ld = leading<T>(C);
  run_tasks<T, FusedBackwardWeights<T, Cell>, FusedBackward<T, Cell>>(
      p, 2 * static_cast<double>(z.R * z.D * (z.I + z.H)) * static_cast<double>(C), true,
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
