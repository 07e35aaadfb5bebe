// The recurrence with options, forwards; see rows.h.
#pragma once

#include "rows.h"

namespace unrolled {
namespace UNROLLED_TARGET {

template <class T, class Row>
struct PhasedForwardWeights {
  using Gates = Blocks<T, Row::kGates>;
  T *ih, *hh, *hs, *hr, *bias_ih, *bias_hh, *norm_ih, *norm_hh;

  PhasedForwardWeights(Pieces& pieces, const RecurrentForward<T>& p) {
    const auto& z = p.sizes;
    const int64_t C = Gates::count(z.H), K = columns_of_h<T, Row>(z.H);
    ih = pieces.take<T>(C * z.I);
    hh = pieces.take<T>(K * z.P);
    hs = pieces.take<T>((C - K) * z.P);
    hr = pieces.take<T>(p.options.weight_hr ? padded<T>(z.P) * z.H : 0);
    T** const vectors[] = {&bias_ih, &bias_hh, &norm_ih, &norm_hh};
    for (T** vector : vectors) *vector = pieces.take<T>(C);
  }

  void fill(const RecurrentForward<T>& p, int64_t d, int) const {
    const auto& z = p.sizes;
    const int64_t C = Gates::count(z.H), K = columns_of_h<T, Row>(z.H), GH = Row::kGates * z.H;
    const auto row_hh = rows_of<Gates>(p.weight_hh + d * GH * z.P, z.H, z.P);
    pack_columns(z.I, C, kPanel<T>, ih, rows_of<Gates>(p.weight_ih + d * GH * z.I, z.H, z.I));
    pack_columns(z.P, K, kPanel<T>, hh, row_hh);
    pack_columns(z.P, C - K, kPanel<T>, hs, [&](int64_t c) { return row_hh(K + c); });
    if (p.options.weight_hr)
      pack_columns(z.H, padded<T>(z.P), kPanel<T>, hr,
                   [&](int64_t c) { return c < z.P ? p.options.weight_hr + (d * z.P + c) * z.H : nullptr; });
    spread<Gates>(p.bias_ih, d, z.H, GH, bias_ih);
    spread<Gates>(p.bias_hh, d, z.H, GH, bias_hh);
    spread<Gates>(p.options.norm_ih, d, z.H, GH, norm_ih);
    spread<Gates>(p.options.norm_hh, d, z.H, GH, norm_hh);
  }
};

template <class T, class Row>
struct PhasedForward {
  using Gates = Blocks<T, Row::kGates>;
  using Weights = PhasedForwardWeights<T, Row>;
  using V = Vec<T>;
  static constexpr int W = Simd<T>::width, G = Row::kGates;

  const T **x_row, **h_before, **c_before, **g_row, **s_row;  // [block rows], [sequences]
  int64_t* row;                                                        // [block rows]
  T **y_row, **h_after, **c_after, **kept_row, **m_row, **scales_row;  // [sequences]
  T *u, *v, *g, *s, *h_new, *z;  // [block rows, ld of C], [sequences, ld of C, P, H, P], [P or H]
  T *kept, *scales;              // [sequences, blocks * H], [sequences, kScales], where nothing is kept for a backward

  PhasedForward(Pieces& pieces, const RecurrentForward<T>& p, int64_t sequences) {
    const auto& sizes = p.sizes;
    const int64_t rows = block_rows(sequences), ld = leading<T>(Gates::count(sizes.H));
    x_row = pieces.take<const T*>(rows);
    row = pieces.take<int64_t>(rows);
    const T*** const read[] = {&h_before, &c_before, &g_row, &s_row};
    for (const T*** pointers : read) *pointers = pieces.take<const T*>(sequences);
    T*** const written[] = {&y_row, &h_after, &c_after, &kept_row, &m_row, &scales_row};
    for (T*** pointers : written) *pointers = pieces.take<T*>(sequences);
    u = pieces.take<T>(rows * ld);
    v = pieces.take<T>(sequences * ld);
    g = pieces.take<T>(sequences * leading<T>(sizes.P));
    s = pieces.take<T>(Row::kReset ? sequences * leading<T>(sizes.H) : 0);
    h_new = pieces.take<T>(p.options.weight_hr ? sequences * leading<T>(sizes.P) : 0);
    z = pieces.take<T>(leading<T>(sizes.H > sizes.P ? sizes.H : sizes.P));
    kept = pieces.take<T>(p.kept ? 0 : sequences * sizes.blocks * sizes.H);
    scales = pieces.take<T>(sequences * kScales);
  }

  // A row of products: the bias, or the layer norm around it, of blocks [first, first + count).
  void finish(T* a, int64_t first, int64_t count, int64_t H, const T* gain, const T* bias, T* normal, T* scale) const {
    const int64_t at = first * padded<T>(H);
    if (gain)
      normalise(a + at, count, H, gain + at, bias + at, normal + first * H, scale);
    else
      add_to(a + at, bias + at, count * padded<T>(H));
  }

  void run(const RecurrentForward<T>& p, const Task& task, const Weights& w, int helpers) const {
    const auto& sizes = p.sizes;
    const auto& o = p.options;
    const int64_t D = sizes.D, H = sizes.H, P = sizes.P, DH = D * H, DP = D * P, d = task.direction;
    const int64_t C = Gates::count(H), K = columns_of_h<T, Row>(H), ld = leading<T>(C), stride = padded<T>(H);
    const int64_t ld_h = leading<T>(H), ld_p = leading<T>(P), kept_size = sizes.blocks * H;
    const T* const norm_ih = o.norm_ih ? w.norm_ih : nullptr;
    const T* const norm_hh = o.norm_hh ? w.norm_hh : nullptr;
    const auto bytes_h = static_cast<size_t>(P) * sizeof(T), bytes_c = static_cast<size_t>(H) * sizeof(T);
    const Walk walk(p.rows, task);
    for (int64_t b = 0; b < task.count; ++b) {
      const int64_t place = d * sizes.B + task.sequence[b], first = walk.length(b) ? walk.row(b, 0) : -1;
      h_before[b] = p.h0 + place * P;
      if (first < 0) memcpy(p.h_last + place * P, h_before[b], bytes_h);
      if (p.h_prev && first >= 0) memcpy(p.h_prev + first * DP + d * P, h_before[b], bytes_h);
      if (!Row::kMemory) continue;
      c_before[b] = p.c0 + place * H;
      if (first < 0) memcpy(p.c_last + place * H, c_before[b], bytes_c);
      if (p.c_prev && first >= 0) memcpy(p.c_prev + first * DH + d * H, c_before[b], bytes_c);
    }
    const auto kept_of = [&](int64_t r, int64_t b) { return p.kept ? p.kept + (r * D + d) * kept_size : kept + b * kept_size; };
    const auto normal_in = [&](T* own, int block) { return o.norm_ih ? own + block * H : nullptr; };
    const auto scales_of = [&](int64_t r, int64_t b) {
      return p.scales ? p.scales + (r * D + d) * kScales : scales + b * kScales;
    };
    walk.forward(
        [&](int64_t i, int64_t r) { x_row[i] = p.x + r * sizes.I, row[i] = r; },
        [&](int64_t m) {
          share(helpers, m, [&](int64_t first, int64_t rows) {
            multiply(x_row + first, rows, w.ih, sizes.I, C, kPanel<T>, u + first * ld, ld);  // (1)
          });
          for (int64_t i = 0; i < m; ++i)
            finish(u + i * ld, 0, G, H, norm_ih, w.bias_ih, normal_in(kept_of(row[i], 0), Kept<Row>::u), scales_of(row[i], 0));
        },
        [&](int64_t t, int64_t n, int64_t begin) {
          for (int64_t b = 0; b < n; ++b) {
            const bool last = t + 1 == walk.length(b);
            const int64_t r = walk.row(b, t), place = d * sizes.B + task.sequence[b], next = last ? 0 : walk.row(b, t + 1);
            y_row[b] = p.y + r * DP + d * P;
            h_after[b] = last ? p.h_last + place * P : p.h_prev ? p.h_prev + next * DP + d * P : y_row[b];
            if (Row::kMemory) c_after[b] = last || !p.c_prev ? p.c_last + place * H : p.c_prev + next * DH + d * H;
            kept_row[b] = kept_of(r, b);
            scales_row[b] = scales_of(r, b);
            scales_row[b][2] = scales_row[b][3] = 0;  // not every cell has these norms
            m_row[b] = kept_row[b] + Kept<Row>::h * H;
            g_row[b] = h_before[b];
            if (!o.mask) continue;
            const T* const mask = o.mask + place * P;
            T* const masked = g + b * ld_p;
            for (int64_t i = 0; i < P; i += W) store(masked + i, load(h_before[b] + i, P - i) * load(mask + i, P - i));  // (2)
            g_row[b] = masked;
          }
          multiply(g_row, n, w.hh, P, K, kPanel<T>, v, ld);  // (3)
          for (int64_t b = 0; b < n; ++b)
            finish(v + b * ld, 0, K / stride, H, norm_hh, w.bias_hh, normal_in(kept_row[b], Kept<Row>::v), scales_row[b] + 1);
          if constexpr (Row::kReset) {
            for (int64_t b = 0; b < n; ++b) {
              const T* const own_u = u + (begin + b) * ld;
              for (int64_t i = 0; i < H; i += W) {
                const V r = Row::reset(load(own_u + i), load(v + b * ld + i));
                store(v + b * ld + i, r);  // in the place of v_r, for the cell
                store(s + b * ld_h + i, r * load(g_row[b] + i, H - i));
              }
              s_row[b] = s + b * ld_h;
            }
            multiply(s_row, n, w.hs, P, C - K, kPanel<T>, v + K, ld);  // (4)
            for (int64_t b = 0; b < n; ++b)
              finish(v + b * ld, G - 1, 1, H, norm_hh, w.bias_hh, normal_in(kept_row[b], Kept<Row>::v), scales_row[b] + 3);
          }
          for (int64_t b = 0; b < n; ++b) {
            T* const own = kept_row[b];
            Row::forward({H, u + (begin + b) * ld, v + b * ld, h_before[b], Row::kMemory ? c_before[b] : nullptr, own,
                          m_row[b], Row::kMemory ? own + Kept<Row>::c * H : nullptr, part(o.peephole, d, 3 * H),
                          part(o.norm_c, d, H), part(o.bias_c, d, H), normal_in(own, Kept<Row>::normal_c),
                          scales_row[b] + 2});
          }
          if (o.weight_hr) multiply(m_row, n, w.hr, H, padded<T>(P), kPanel<T>, h_new, ld_p);  // (5)
          for (int64_t b = 0; b < n; ++b) {
            const T* const h = o.weight_hr ? h_new + b * ld_p : m_row[b];
            mix(o, o.zoneout_h, 2 * d, task.sequence[b], walk.position(b, t), P, h, h_before[b], y_row[b]);
            if (h_after[b] != y_row[b]) memcpy(h_after[b], y_row[b], bytes_h);
            h_before[b] = h_after[b];
            if (!Row::kMemory) continue;
            mix(o, o.zoneout_c, 2 * d + 1, task.sequence[b], walk.position(b, t), H, kept_row[b] + Kept<Row>::c * H,
                c_before[b], c_after[b]);
            c_before[b] = c_after[b];
          }
        });
  }

  // out = z * old + (1 - z) * fresh; where nothing is kept out may be old.
  void mix(const RecurrentOptions<T>& o, double rate, int64_t stream, int64_t sequence, int64_t t, int64_t n, const T* fresh,
           const T* old, T* out) const {
    if (rate == 0) {
      memcpy(out, fresh, static_cast<size_t>(n) * sizeof(T));
      return;
    }
    zoneout_row(o, rate, stream, sequence, t, n, z);
    for (int64_t i = 0; i < n; i += W) {
      const V share = load(z + i, n - i), a = load(fresh + i, n - i), b = load(old + i, n - i);
      store(out + i, share * b + (1 - share) * a, n - i);
    }
  }
};

template <class T, class Row>
void phased_forward(const RecurrentForward<T>& p) {
  const auto& z = p.sizes;
  run_tasks<T, PhasedForwardWeights<T, Row>, PhasedForward<T, Row>>(
      p, static_cast<double>(z.R * z.D * (z.I + z.P)) * static_cast<double>(Row::kGates * z.H), false,
      [&](const Task& task, const PhasedForwardWeights<T, Row>& w, const PhasedForward<T, Row>& memory, int helpers) {
        memory.run(p, task, w, helpers);
      },
      [](const auto&, int64_t, int64_t, int) {});
}

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
