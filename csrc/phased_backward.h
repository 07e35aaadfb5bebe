// The recurrence with options, backwards; see rows.h.
#pragma once

#include "phased_forward.h"

namespace unrolled {
namespace UNROLLED_TARGET {

template <class T, class Row>
struct PhasedBackwardWeights {
  using Gates = Blocks<T, Row::kGates>;
  T *ih, *hh, *hs, *hr, *norm_ih, *norm_hh;

  PhasedBackwardWeights(Pieces& pieces, const RecurrentBackward<T>& p) {
    const auto& z = p.sizes;
    const int64_t C = Gates::count(z.H), K = columns_of_h<T, Row>(z.H);
    ih = pieces.take<T>(C * padded<T>(z.I));
    hh = pieces.take<T>(K * padded<T>(z.P));
    hs = pieces.take<T>((C - K) * padded<T>(z.P));
    hr = pieces.take<T>(p.options.weight_hr ? z.P * padded<T>(z.H) : 0);
    norm_ih = pieces.take<T>(C);
    norm_hh = pieces.take<T>(C);
  }

  void fill(const RecurrentBackward<T>& p, int64_t d, int) const {
    const auto& z = p.sizes;
    const int64_t C = Gates::count(z.H), K = columns_of_h<T, Row>(z.H), GH = Row::kGates * z.H;
    const auto row_hh = rows_of<Gates>(p.weight_hh + d * GH * z.P, z.H, z.P);
    if (p.dx) pack_rows(C, z.I, ih, rows_of<Gates>(p.weight_ih + d * GH * z.I, z.H, z.I));
    pack_rows(K, z.P, hh, row_hh);
    pack_rows(C - K, z.P, hs, [&](int64_t k) { return row_hh(K + k); });
    if (p.options.weight_hr)
      pack_rows(z.P, z.H, hr, [&](int64_t k) { return p.options.weight_hr + (d * z.P + k) * z.H; });
    spread<Gates>(p.options.norm_ih, d, z.H, GH, norm_ih);
    spread<Gates>(p.options.norm_hh, d, z.H, GH, norm_hh);
  }
};

template <class T, class Row>
struct PhasedBackward {
  using Gates = Blocks<T, Row::kGates>;
  using Weights = PhasedBackwardWeights<T, Row>;
  using V = Vec<T>;
  static constexpr int W = Simd<T>::width, G = Row::kGates;

  const T **x_row, **g_row, **s_row, **m_row, **du_row, **dp_row, **dprojected_row;  // [block rows]
  int64_t* row;                                                                      // [block rows]
  T *du, *dp, *g, *s, *dprojected, *dx_block;  // [block rows, ld of C, C, P, H, P, I]
  T *dh, *dc;                                  // [sequences, ld of P, H] of the state, with what is not yet in dy
  T *dm, *dc_new, *dg, *ds, *path, *z;         // [sequences, ld of H, H, P, H, H], [P or H]
  T *dweight_ih, *dweight_hh, *dweight_hr;     // [I, ld of C], [P, ld of C], [H, ld of P]: transposed sums of this task
  T *dbias_ih, *dbias_hh, *dnorm_ih, *dnorm_hh, *dpeephole, *dnorm_c, *dbias_c;  // [C] each, [3 * padded H], [padded H]
  int64_t sums;                                // bytes from dweight_ih to the end of dbias_c

  PhasedBackward(Pieces& pieces, const RecurrentBackward<T>& p, int64_t sequences) {
    const auto& sizes = p.sizes;
    const int64_t rows = block_rows(sequences), ld = leading<T>(Gates::count(sizes.H)), ld_h = leading<T>(sizes.H);
    const int64_t ld_p = leading<T>(sizes.P), before = pieces.used();
    const bool projected = p.options.weight_hr;
    dweight_ih = pieces.take<T>(sizes.I * ld);
    dweight_hh = pieces.take<T>(sizes.P * ld);
    dweight_hr = pieces.take<T>(projected ? sizes.H * ld_p : 0);
    T** const vectors[] = {&dbias_ih, &dbias_hh, &dnorm_ih, &dnorm_hh};
    for (T** vector : vectors) *vector = pieces.take<T>(ld);
    dpeephole = pieces.take<T>(3 * ld_h);
    dnorm_c = pieces.take<T>(ld_h);
    dbias_c = pieces.take<T>(ld_h);
    sums = pieces.used() - before;
    const T*** const pointers[] = {&x_row, &g_row, &s_row, &m_row, &du_row, &dp_row, &dprojected_row};
    for (const T*** pointer : pointers) *pointer = pieces.take<const T*>(rows);
    row = pieces.take<int64_t>(rows);
    du = pieces.take<T>(rows * ld);
    dp = pieces.take<T>(rows * ld);
    g = pieces.take<T>(p.options.mask ? rows * ld_p : 0);
    s = pieces.take<T>(Row::kReset ? rows * ld_h : 0);
    dprojected = pieces.take<T>(projected ? rows * ld_p : 0);
    dx_block = pieces.take<T>(p.dx ? rows * leading<T>(sizes.I) : 0);
    dh = pieces.take<T>(sequences * ld_p);
    dc = pieces.take<T>(sequences * ld_h);
    dm = pieces.take<T>(sequences * ld_h);
    dc_new = pieces.take<T>(sequences * ld_h);
    dg = pieces.take<T>(sequences * ld_p);
    ds = pieces.take<T>(Row::kReset ? sequences * ld_h : 0);
    path = pieces.take<T>(sequences * ld_h);
    z = pieces.take<T>(ld_h > ld_p ? ld_h : ld_p);
  }

  // dnew = d * (1 - z), and d becomes d * z.
  void unmix(const RecurrentOptions<T>& o, double rate, int64_t stream, int64_t sequence, int64_t t, int64_t n, T* d,
             T* dnew) const {
    if (rate == 0) {
      memcpy(dnew, d, static_cast<size_t>(padded<T>(n)) * sizeof(T));
      memset(d, 0, static_cast<size_t>(n) * sizeof(T));
      return;
    }
    zoneout_row(o, rate, stream, sequence, t, n, z);
    for (int64_t i = 0; i < n; i += W) {
      const V share = load(z + i, n - i), all = load(d + i);
      store(dnew + i, all * (1 - share));
      store(d + i, all * share);
    }
  }

  // The sums of blocks [first, first + count) of a row of du or dv, which becomes the gradient of the bare product.
  void bare(T* a, int64_t first, int64_t count, int64_t H, const T* gain, const T* normal, const T* scale, T* dbias,
            T* dgain) const {
    const int64_t at = first * padded<T>(H);
    add_to(dbias + at, a + at, count * padded<T>(H));
    if (gain) normalise_backward(a + at, count, H, gain + at, normal + first * H, *scale, dgain + at);
  }

  void run(const RecurrentBackward<T>& p, const Task& task, const Weights& w, int helpers) const {
    const auto& sizes = p.sizes;
    const auto& o = p.options;
    const int64_t D = sizes.D, H = sizes.H, P = sizes.P, DH = D * H, DP = D * P, d = task.direction;
    const int64_t C = Gates::count(H), K = columns_of_h<T, Row>(H), ld = leading<T>(C), stride = padded<T>(H);
    const int64_t ld_h = leading<T>(H), ld_p = leading<T>(P), kept_size = sizes.blocks * H;
    const T* const norm_ih = o.norm_ih ? w.norm_ih : nullptr;
    const T* const norm_hh = o.norm_hh ? w.norm_hh : nullptr;
    const Walk walk(p.rows, task);
    const T no_scales[kScales] = {};
    const auto normal_in = [&](const T* own, int block) { return o.norm_ih ? own + block * H : nullptr; };
    const auto scales_of = [&](int64_t r) { return p.scales ? p.scales + (r * D + d) * kScales : no_scales; };
    memset(dweight_ih, 0, static_cast<size_t>(sums));
    memset(dh, 0, static_cast<size_t>(task.count * ld_p) * sizeof(T));  // and so the units beyond P and H
    memset(dc, 0, static_cast<size_t>(task.count * ld_h) * sizeof(T));
    for (int64_t b = 0; b < task.count; ++b) {
      const int64_t place = d * sizes.B + task.sequence[b];
      memcpy(dh + b * ld_p, p.dh_last + place * P, static_cast<size_t>(P) * sizeof(T));
      if (Row::kMemory) memcpy(dc + b * ld_h, p.dc_last + place * H, static_cast<size_t>(H) * sizeof(T));
    }
    walk.backward(
        [&](int64_t t, int64_t going_on, int64_t n, int64_t done) {
          if (sizes.bptt && (t + 1) % sizes.bptt == 0) {
            memset(dh, 0, static_cast<size_t>(going_on * ld_p) * sizeof(T));
            memset(dc, 0, static_cast<size_t>(going_on * ld_h) * sizeof(T));
          }
          for (int64_t b = 0; b < n; ++b) {
            const int64_t r = walk.row(b, t), i = done + b, sequence = task.sequence[b], position = walk.position(b, t);
            row[i] = r;
            x_row[i] = p.x + r * sizes.I;
            m_row[i] = p.kept + (r * D + d) * kept_size + Kept<Row>::h * H;
            du_row[i] = du + i * ld;
            dp_row[i] = dp + i * ld;
            T* const own = dh + b * ld_p;
            for (int64_t j = 0; j < P; j += W) {
              const V all = load(p.dy + r * DP + d * P + j, P - j) + load(own + j);
              store(own + j, all);
              if (p.dh) store(p.dh + r * DP + d * P + j, all, P - j);
            }
            T* const dnew = o.weight_hr ? dprojected + i * ld_p : dm + b * ld_h;
            dprojected_row[i] = dnew;
            unmix(o, o.zoneout_h, 2 * d, sequence, position, P, own, dnew);
            if (Row::kMemory) unmix(o, o.zoneout_c, 2 * d + 1, sequence, position, H, dc + b * ld_h, dc_new + b * ld_h);
            const T* const h_prev = p.h_prev + r * DP + d * P;
            g_row[i] = h_prev;
            if (!o.mask) continue;
            const T* const mask = o.mask + (d * sizes.B + sequence) * P;
            for (int64_t j = 0; j < P; j += W) store(g + i * ld_p + j, load(h_prev + j, P - j) * load(mask + j, P - j));  // (2)
            g_row[i] = g + i * ld_p;
          }
          if (o.weight_hr) multiply(dprojected_row + done, n, w.hr, P, stride, kPanel<T>, dm, ld_h);  // (5)
          for (int64_t b = 0; b < n; ++b) {
            const int64_t i = done + b, r = row[i];
            const T* const kept = p.kept + (r * D + d) * kept_size;
            const T* const scales = scales_of(r);
            T *const du_own = du + i * ld, *const dv_own = dp + i * ld, *const dc_own = dc_new + b * ld_h, *const dc_prev = z;
            Row::backward({H, dm + b * ld_h, dc_own, path + b * ld_h, dc_prev, kept, m_row[i],
                           Row::kMemory ? kept + Kept<Row>::c * H : nullptr,
                           p.h_prev + r * DP + d * P, Row::kMemory ? p.c_prev + r * DH + d * H : nullptr,
                           part(o.peephole, d, 3 * H), part(o.norm_c, d, H), part(o.bias_c, d, H),
                           normal_in(kept, Kept<Row>::normal_c), scales + 2, du_own, dv_own, dpeephole, dnorm_c, dbias_c});
            if (Row::kMemory) {
              add_to(dc + b * ld_h, dc_prev, stride);
              for (int64_t j = 0; p.dc && j < H; j += W) store(p.dc + r * DH + d * H + j, load(dc_own + j), H - j);
            }
            if (Row::kReset)
              bare(dv_own, G - 1, 1, H, norm_hh, normal_in(kept, Kept<Row>::v), scales + 3, dbias_hh, dnorm_hh);
            else
              products(du_own, dv_own, K, H, norm_ih, norm_hh, normal_in(kept, Kept<Row>::u), scales);
          }
          if constexpr (Row::kReset) {
            for (int64_t b = 0; b < n; ++b) s_row[done + b] = dp + (done + b) * ld + K;  // for a moment: what W_hs multiplied
            multiply(s_row + done, n, w.hs, C - K, padded<T>(P), kPanel<T>, ds, ld_h);   // (4)
            for (int64_t b = 0; b < n; ++b) {
              const int64_t i = done + b, r = row[i];
              const T* const kept = p.kept + (r * D + d) * kept_size;
              for (int64_t j = 0; j < H; j += W) {
                const V gate = load(kept + j, H - j), ds_j = load(ds + b * ld_h + j), g_j = load(g_row[i] + j, H - j);
                const V da = Row::reset_backward(ds_j * g_j, gate);
                store(du + i * ld + j, da);
                store(dp + i * ld + j, da);
                store(ds + b * ld_h + j, ds_j * gate);  // now what reaches g directly
                store(s + i * ld_h + j, gate * g_j);
              }
              s_row[i] = s + i * ld_h;
              products(du + i * ld, dp + i * ld, K, H, norm_ih, norm_hh, normal_in(kept, Kept<Row>::u), scales_of(r));
            }
          }
          multiply(dp_row + done, n, w.hh, K, padded<T>(P), kPanel<T>, dg, ld_p);  // (3)
          for (int64_t b = 0; b < n; ++b)
            for (int64_t j = 0; j < P; j += W) {
              V through = load(dg + b * ld_p + j);
              if (Row::kReset) through += load(ds + b * ld_h + j);
              if (o.mask) through *= load(o.mask + (d * sizes.B + task.sequence[b]) * P + j, P - j);  // (2)
              if (Row::kDirect) through += load(path + b * ld_h + j);
              store(dh + b * ld_p + j, load(dh + b * ld_p + j) + through);
            }
        },
        [&](int64_t m) { gradients(p, m, d, w.ih, helpers); });
    for (int64_t b = 0; b < task.count; ++b) {
      const int64_t place = d * sizes.B + task.sequence[b];
      memcpy(p.dh0 + place * P, dh + b * ld_p, static_cast<size_t>(P) * sizeof(T));
      if (Row::kMemory) memcpy(p.dc0 + place * H, dc + b * ld_h, static_cast<size_t>(H) * sizeof(T));
    }
  }

  // `normals`: of u, and behind them of v; null without a layer norm.
  void products(T* du_own, T* dv_own, int64_t K, int64_t H, const T* norm_ih, const T* norm_hh, const T* normals,
                const T* scales) const {
    bare(du_own, 0, G, H, norm_ih, normals, scales, dbias_ih, dnorm_ih);
    bare(dv_own, 0, K / padded<T>(H), H, norm_hh, normals ? normals + G * H : nullptr, scales + 1, dbias_hh, dnorm_hh);
  }

  // What a block of m tokens adds to the gradients of the matrices, and its rows of dx.                (3), (4), (5), (1)
  void gradients(const RecurrentBackward<T>& p, int64_t m, int64_t d, const T* packed_ih, int helpers) const {
    const int64_t I = p.sizes.I, H = p.sizes.H, P = p.sizes.P, C = Gates::count(H), K = columns_of_h<T, Row>(H);
    const int64_t ld = leading<T>(C), ld_p = leading<T>(P), ld_x = leading<T>(I);
    share(helpers, P, [&](int64_t j, int64_t n) {
      multiply_transposed(g_row, j, n, dp, ld, m, K, dweight_hh, ld);
      if (Row::kReset) multiply_transposed(s_row, j, n, dp + K, ld, m, C - K, dweight_hh + K, ld);
    });
    share(helpers, I, [&](int64_t j, int64_t n) { multiply_transposed(x_row, j, n, du, ld, m, C, dweight_ih, ld); });
    if (p.options.weight_hr)
      share(helpers, H, [&](int64_t j, int64_t n) {
        multiply_transposed(m_row, j, n, dprojected, ld_p, m, padded<T>(P), dweight_hr, ld_p);
      });
    if (!p.dx) return;
    share(helpers, m, [&](int64_t first, int64_t n) {
      multiply(du_row + first, n, packed_ih, C, padded<T>(I), kPanel<T>, dx_block + first * ld_x, ld_x);
      for (int64_t i = first; i < first + n; ++i)
        memcpy(p.dx + (d * p.sizes.R + row[i]) * I, dx_block + i * ld_x, static_cast<size_t>(I) * sizeof(T));
    });
  }
};

template <class T, class Row>
void phased_backward(const RecurrentBackward<T>& p) {
  using Gates = Blocks<T, Row::kGates>;
  const auto& z = p.sizes;
  const int64_t H = z.H, P = z.P, C = Gates::count(H), GH = Row::kGates * H, ld = leading<T>(C);
  run_tasks<T, PhasedBackwardWeights<T, Row>, PhasedBackward<T, Row>>(
      p, 2 * static_cast<double>(z.R * z.D * (z.I + P)) * static_cast<double>(GH), false,
      [&](const Task& task, const PhasedBackwardWeights<T, Row>& w, const PhasedBackward<T, Row>& memory, int helpers) {
        memory.run(p, task, w, helpers);
      },
      // the tasks of a direction, added up in their order
      [&](const auto& memory, int64_t parts, int64_t stride, int threads) {
        sum_columns(threads, z.D, C, [&](int64_t d, int64_t c0, int64_t c1) {
          const PhasedBackward<T, Row> first = memory(d * parts);
          const auto row = [&](int64_t c) { return Gates::row(c, H); };
          const auto sum = [&](const T* own, int64_t J, T* out) {
            if (out) sum_transposed(own, parts, stride, J, c0, c1, ld, out + d * GH * J, row);
          };
          sum(first.dweight_ih, z.I, p.dweight_ih);
          sum(first.dweight_hh, P, p.dweight_hh);
          sum(first.dbias_ih, 1, p.dbias_ih);
          sum(first.dbias_hh, 1, p.dbias_hh);
          sum(first.dnorm_ih, 1, p.dnorm_ih);
          sum(first.dnorm_hh, 1, p.dnorm_hh);
          if (c0 > 0) return;
          const auto small = [&](const T* own, int64_t J, int64_t columns, T* out) {
            if (out) sum_transposed(own, parts, stride, J, 0, columns, leading<T>(columns), out + d * columns * J, [](int64_t c) { return c; });
          };
          small(first.dweight_hr, H, P, p.dweight_hr);
          for (int k = 0; k < 3 && p.dpeephole; ++k)
            sum_transposed(first.dpeephole + k * padded<T>(H), parts, stride, 1, 0, H, ld, p.dpeephole + (d * 3 + k) * H,
                           [](int64_t c) { return c; });
          small(first.dnorm_c, 1, H, p.dnorm_c);
          small(first.dbias_c, 1, H, p.dbias_c);
        });
      });
}

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
