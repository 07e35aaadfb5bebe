// The recurrence with options: layer norm, recurrent dropout, projection, zoneout, a reset before the product. A step goes
// through phases, each over all live rows: product, norm, cell, projection, zoneout. The equations are in
// src/unrolled/equations/recurrent_options.py. A cell works on whole rows:
//
//   struct RowCell {
//     static constexpr int kGates, kKept;               // G, S of core.h
//     static constexpr bool kMemory, kDirect, kReset;   // has c; h reaches the next h directly; resets before the product
//     static void forward(const ForwardRow<T>&);
//     static void backward(const BackwardRow<T>&);
//     static V reset(V u, V v), reset_backward(V dr, V r);   // kReset: r, its block 0 of what is kept; the gradient of u and v
//   };
//
// The gates of a row stand in blocks of H numbers, here padded to whole vectors, whose pads are 0.
#pragma once

#include "fused_backward.h"
#include "philox.h"

namespace unrolled {
namespace UNROLLED_TARGET {

template <class T, int G>
struct Blocks {
  static int64_t count(int64_t H) { return G * padded<T>(H); }
  static int64_t row(int64_t place, int64_t H) {
    const int64_t unit = place % padded<T>(H);
    return unit < H ? place / padded<T>(H) * H + unit : -1;
  }
};

template <class T>
struct ForwardRow {
  int64_t H;
  const T *u, *v;                        // [G * padded H]
  const T *h_prev, *c_prev;              // [H]; h_prev only where kDirect, which no projection may follow
  T *kept, *h, *c;                       // [S * H], [H], [H]
  const T *peephole, *norm_c, *bias_c;   // [3 * H], [H], [H], or null
  T *normal_c, *scale_c;                 // [H], [1]
};

template <class T>
struct BackwardRow {
  int64_t H;
  const T* dh;                           // [padded H] to h as the cell gave it
  T *dc, *dh_prev;                       // [padded H] to c in, with its path through h out; only where kDirect
  T* dc_prev;                            // [padded H]
  const T *kept, *h, *c, *h_prev, *c_prev;
  const T *peephole, *norm_c, *bias_c, *normal_c, *scale_c;
  T *du, *dv;                            // [G * padded H]
  T *dpeephole, *dnorm_c, *dbias_c;      // accumulate: [3 * padded H], [padded H], [padded H]
};

// A pointwise cell of fused_forward.h on a row.
template <class T, class Cell>
struct Pointwise {
  using V = Vec<T>;
  static constexpr int kGates = Cell::kGates, kKept = Cell::kKept, W = Simd<T>::width;
  static constexpr bool kMemory = Cell::kMemory, kDirect = Cell::kDirect, kReset = false;

  static void forward(const ForwardRow<T>& r) {
    const int64_t stride = padded<T>(r.H);
    for (int64_t unit = 0; unit < r.H; unit += W) {
      const int64_t left = r.H - unit;
      V u[kGates], v[kGates], kept[kKept + 1], h, c{};
      UNROLL for (int g = 0; g < kGates; ++g) u[g] = load(r.u + g * stride + unit), v[g] = load(r.v + g * stride + unit);
      Cell::forward(u, v, kDirect ? load(r.h_prev + unit, left) : V{}, kMemory ? load(r.c_prev + unit, left) : V{}, h, c, kept);
      UNROLL for (int k = 0; k < kKept; ++k) store(r.kept + k * r.H + unit, kept[k], left);
      store(r.h + unit, h, left);
      if (kMemory) store(r.c + unit, c, left);
    }
  }

  static void backward(const BackwardRow<T>& r) {
    const int64_t stride = padded<T>(r.H);
    for (int64_t unit = 0; unit < r.H; unit += W) {
      const int64_t left = r.H - unit;
      Point<T> at{load(r.h + unit, left), {}, kDirect ? load(r.h_prev + unit, left) : V{}, {}};
      if (kMemory) at.c = load(r.c + unit, left), at.c_prev = load(r.c_prev + unit, left);
      V kept[kKept + 1], du[kGates], dv[kGates], dh_prev{}, dc_prev{}, dc = kMemory ? load(r.dc + unit) : V{};
      UNROLL for (int k = 0; k < kKept; ++k) kept[k] = load(r.kept + k * r.H + unit, left);
      Cell::backward(load(r.dh + unit), dc, at, kept, du, dv, dh_prev, dc_prev);
      UNROLL for (int g = 0; g < kGates; ++g) {
        store(r.du + g * stride + unit, du[g]);
        store(r.dv + g * stride + unit, Cell::kSplit ? dv[g] : du[g]);
      }
      if (kDirect) store(r.dh_prev + unit, dh_prev);
      if (kMemory) store(r.dc + unit, dc), store(r.dc_prev + unit, dc_prev);
    }
  }
};

// f(place in padded blocks, place in blocks of H, units left) for every vector of a row of blocks.
template <class T, class F>
inline void for_units(int64_t blocks, int64_t H, F&& f) {
  for (int64_t g = 0; g < blocks; ++g)
    for (int64_t unit = 0; unit < H; unit += Simd<T>::width) f(g * padded<T>(H) + unit, g * H + unit, H - unit);
}

constexpr double kEpsilon = 1e-5;  // added to a variance

// row = normal * gain + bias, in place, over blocks of H numbers; gain and bias padded, normal not.
template <class T>
inline void normalise(T* row, int64_t blocks, int64_t H, const T* gain, const T* bias, T* normal, T* scale) {
  const T n = static_cast<T>(blocks * H);
  Vec<T> sum{}, squares{};
  for_units<T>(blocks, H, [&](int64_t i, int64_t, int64_t) { sum += load(row + i); });
  const T mean = total<T>(sum) / n;
  for_units<T>(blocks, H, [&](int64_t i, int64_t, int64_t left) {
    const Vec<T> centred = first_lanes<T>(load(row + i) - mean, left);
    squares += centred * centred;
    store(row + i, centred);
  });
  *scale = 1 / root(total<T>(squares) / n + static_cast<T>(kEpsilon));
  for_units<T>(blocks, H, [&](int64_t i, int64_t j, int64_t left) {
    const Vec<T> x = load(row + i) * *scale;
    store(normal + j, x, left);
    store(row + i, x * load(gain + i) + load(bias + i));
  });
}

// dy becomes the gradient of what was normalised; dgain accumulates.
template <class T>
inline void normalise_backward(T* dy, int64_t blocks, int64_t H, const T* gain, const T* normal, T scale, T* dgain) {
  const T n = static_cast<T>(blocks * H);
  Vec<T> sum{}, slopes{};
  for_units<T>(blocks, H, [&](int64_t i, int64_t j, int64_t left) {
    const Vec<T> x = load(normal + j, left), d = load(dy + i), dnormal = d * load(gain + i);
    store(dgain + i, load(dgain + i) + d * x);
    store(dy + i, dnormal);
    sum += dnormal;
    slopes += dnormal * x;
  });
  const T mean = total<T>(sum) / n, slope = total<T>(slopes) / n;
  for_units<T>(blocks, H, [&](int64_t i, int64_t j, int64_t left) {
    const Vec<T> x = load(normal + j, left);
    store(dy + i, first_lanes<T>(scale * (load(dy + i) - mean - x * slope), left));
  });
}

template <class T>
inline void add_to(T* sum, const T* row, int64_t n) {
  for (int64_t i = 0; i < n; i += Simd<T>::width) store(sum + i, load(sum + i) + load(row + i));
}

// z of zoneout for a row: 1 where a unit keeps its old value, or in evaluation the rate.
template <class T>
inline void zoneout_row(const RecurrentOptions<T>& o, double rate, int64_t stream, int64_t sequence, int64_t t, int64_t units,
                        T* z) {
  if (!o.seed || rate == 0) {
    for (int64_t i = 0; i < units; ++i) z[i] = static_cast<T>(rate);
    return;
  }
  const uint64_t limit = threshold_of(rate);
  random_units(units, t, o.keys[sequence], 4 * o.layer + stream, *o.seed,
               [&](int64_t first, int64_t count, const uint32_t* word) {
                 for (int64_t i = 0; i < count; ++i) z[first + i] = word[i] < limit ? 1 : 0;
               });
}

// Where the parts of a row of `kept` begin, in blocks of H.
template <class Row>
struct Kept {
  static constexpr int h = Row::kKept, c = h + 1, u = h + 1 + Row::kMemory, v = u + Row::kGates, normal_c = v + Row::kGates;
};

template <class T>
inline const T* part(const T* weights, int64_t d, int64_t size) {
  return weights ? weights + d * size : nullptr;
}

// The columns of W_hh that multiply h; those after them multiply what is reset.
template <class T, class Row>
inline int64_t columns_of_h(int64_t H) {
  return (Row::kGates - Row::kReset) * padded<T>(H);
}

// A vector of the weights in the padded layout; 0 where there is none.
template <class Gates, class T>
inline void spread(const T* vector, int64_t d, int64_t H, int64_t GH, T* out) {
  for (int64_t c = 0; c < Gates::count(H); ++c) {
    const int64_t row = Gates::row(c, H);
    out[c] = vector && row >= 0 ? vector[d * GH + row] : 0;
  }
}

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
