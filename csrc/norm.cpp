// Layer and root-mean-square normalisation, with or without residual and dropout, one pass over memory each way; the equations
// are in src/unrolled/equations/{layer_norm,rms_norm,residual_norm}.py.
#include "kernels.h"
#include "philox.h"
#include "simd.h"
#include "unrolled/parallel.h"
#include "unrolled/schedule.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

constexpr int64_t kBlock = 16;  // rows summed as T, the sums as double: few are added to many, so little is rounded away

// f(first, count) for the vectors of a row; count is below the width in the last one alone.
template <class T, class Body>
inline void along(int64_t F, Body&& f) {
  constexpr int64_t W = Simd<T>::width;
  int64_t c = 0;
  for (; c + W <= F; c += W) f(c, W);
  if (c < F) f(c, F - c);
}

struct Sums {
  double a, b;
};

template <class T>
inline double whole(const Vec<T> (&v)[4]) {
  const Vec<T> sum = (v[0] + v[1]) + (v[2] + v[3]);
  double lane[Simd<T>::width];
  UNROLL for (int i = 0; i < Simd<T>::width; ++i) lane[i] = static_cast<double>(sum[i]);
  UNROLL for (int half = Simd<T>::width / 2; half > 0; half /= 2)
    UNROLL for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

// Two sums over a row; term(first, count, a, b) adds a vector to each. Four of each, for speed and as they round less.
template <class T, class Term>
inline Sums sums(int64_t F, Term&& term) {
  constexpr int64_t W = Simd<T>::width;
  Vec<T> a[4]{}, b[4]{};
  int64_t c = 0;
  for (; c + 4 * W <= F; c += 4 * W) {
    UNROLL for (int k = 0; k < 4; ++k) term(c + k * W, W, a[k], b[k]);
  }
  for (; c < F; c += W) term(c, F - c, a[0], b[0]);
  return {whole<T>(a), whole<T>(b)};
}

// f(first unit, count, multiplier of a unit) for the blocks of row n.
template <class T>
struct Mask {
  const Dropping& dropping;
  const Keeping<T> keeping{dropping.p};

  template <class Body>
  inline void row(int64_t n, int64_t F, Body&& f) const {
    const uint32_t least = keeping.least;  // of this call's own: no store can change it, so the loop becomes vectors
    const T factor = keeping.factor;
    random_units(F, dropping.t[n], dropping.key[n], dropping.layer, dropping.seed,
                 [&](int64_t first, int64_t count, const uint32_t* word) {
                   f(first, count, [=](int64_t i) { return word[i] >= least ? factor : 0; });
                 });
  }
};

template <class T>
inline void residual_row(const NormForward<T>& p, const Mask<T>& mask, int64_t n) {
  const T* const x = p.x + n * p.F;
  const T* const s = p.s + n * p.F;
  T* const r = p.r + n * p.F;
  if (p.dropping.p == 0) {
    for (int64_t f = 0; f < p.F; ++f) r[f] = x[f] + s[f];
    return;
  }
  mask.row(n, p.F, [&](int64_t first, int64_t count, auto&& m) {
    for (int64_t f = 0; f < count; ++f) r[first + f] = x[first + f] + m(f) * s[first + f];
  });
}

struct Moments {
  double mean, square;
};

// The variance from the differences to the mean, and the mean once more from their sum, which is what rounding left of it.
template <class T>
inline Moments moments(const T* r, int64_t F) {
  const double share = 1 / static_cast<double>(F);
  const T mean = static_cast<T>(sums<T>(F, [&](int64_t c, int64_t k, Vec<T>& a, Vec<T>&) { a += load(r + c, k); }).a * share);
  const Sums s = sums<T>(F, [&](int64_t c, int64_t k, Vec<T>& a, Vec<T>& b) {
    const Vec<T> d = first_lanes<T>(load(r + c, k) - mean, k);
    a += d;
    b += d * d;
  });
  const double rest = s.a * share, variance = s.b * share - rest * rest;
  return {static_cast<double>(mean) + rest, variance < 0 ? 0 : variance};
}

template <class T>
inline Moments mean_square(const T* r, int64_t F) {
  const Sums s = sums<T>(F, [&](int64_t c, int64_t k, Vec<T>&, Vec<T>& b) {
    const Vec<T> v = load(r + c, k);
    b += v * v;
  });
  return {0, s.b / static_cast<double>(F)};
}

template <class T>
inline void norm_row(const NormForward<T>& p, const T* r, int64_t n) {
  const Moments m = p.centred ? moments(r, p.F) : mean_square(r, p.F);
  const T mean = static_cast<T>(m.mean), scale = static_cast<T>(1 / root(m.square + p.epsilon));  // (1)
  if (p.centred) p.mean[n] = mean;
  p.scale[n] = scale;
  T* const y = p.y + n * p.F;
  along<T>(p.F, [&](int64_t c, int64_t k) {
    Vec<T> v = (load(r + c, k) - mean) * scale;  // (2)
    if (p.gain) v *= load(p.gain + c, k);       // (3)
    if (p.bias) v += load(p.bias + c, k);
    store(y + c, v, k);
  });
}

// dx of row n, and its part of dgain and dbias.
template <class T>
inline void backward_row(const NormBackward<T>& p, int64_t n, T* dgain, T* dbias) {
  const T* const r = p.r + n * p.F;
  const T* const dy = p.dy + n * p.F;
  const T mean = p.centred ? p.mean[n] : 0, scale = p.scale[n];
  const double share = 1 / static_cast<double>(p.F);
  const auto normal = [&](int64_t c, int64_t k) { return (load(r + c, k) - mean) * scale; };
  const auto dnormal = [&](int64_t c, int64_t k) {
    return p.gain ? load(dy + c, k) * load(p.gain + c, k) : load(dy + c, k);
  };
  const Sums s = sums<T>(p.F, [&](int64_t c, int64_t k, Vec<T>& a, Vec<T>& b) {
    const Vec<T> d = dnormal(c, k), z = normal(c, k), dyc = load(dy + c, k);
    a += d;
    b += d * z;
    if (p.dgain) store(dgain + c, load(dgain + c, k) + dyc * z, k);
    if (p.dbias) store(dbias + c, load(dbias + c, k) + dyc, k);
  });
  const T level = static_cast<T>(p.centred ? s.a * share : 0), slope = static_cast<T>(s.b * share);
  const T* const dr = p.dr ? p.dr + n * p.F : nullptr;
  T* const dx = p.dx + n * p.F;
  along<T>(p.F, [&](int64_t c, int64_t k) {
    Vec<T> d = scale * (dnormal(c, k) - level - normal(c, k) * slope);
    if (dr) d += load(dr + c, k);
    store(dx + c, d, k);
  });
}

template <class T>
inline void dropped_row(const NormBackward<T>& p, const Mask<T>& mask, int64_t n) {
  const T* const dx = p.dx + n * p.F;
  T* const ds = p.ds + n * p.F;
  mask.row(n, p.F, [&](int64_t first, int64_t count, auto&& m) {
    for (int64_t f = 0; f < count; ++f) ds[first + f] = m(f) * dx[first + f];
  });
}

template <class T>
int64_t parts_of(int64_t N, int64_t F, double p, int threads) {
  return useful_threads(threads, (p == 0 ? 10.0 : 15.0) * static_cast<double>(N * F));
}

}  // namespace

template <class T>
void norm_forward(const NormForward<T>& p) {
  const Mask<T> mask{p.dropping};
  const int64_t parts = parts_of<T>(p.N, p.F, p.dropping.p, p.threads);
  parallel_for(p.threads, parts, [&](int64_t part) {
    for (int64_t n = part * p.N / parts; n < (part + 1) * p.N / parts; ++n) {
      if (p.s) residual_row(p, mask, n);
      norm_row(p, (p.s ? p.r : p.x) + n * p.F, n);
    }
  });
}

template <class T>
void norm_backward(const NormBackward<T>& p) {
  const Mask<T> mask{p.dropping};
  const int64_t parts = parts_of<T>(p.N, p.F, p.dropping.p, p.threads), both = 2 * p.F;  // dgain and dbias
  const Scratch scratch(static_cast<size_t>(parts * both) * (sizeof(double) + sizeof(T)));
  auto* const totals = reinterpret_cast<double*>(scratch.data());
  T* const blocks = reinterpret_cast<T*>(totals + parts * both);
  parallel_for(p.threads, parts, [&](int64_t part) {
    double* const total = totals + part * both;
    T* const block = blocks + part * both;
    for (int64_t f = 0; f < both; ++f) total[f] = 0;
    const int64_t end = (part + 1) * p.N / parts;
    for (int64_t first = part * p.N / parts; first < end; first += kBlock) {
      memset(block, 0, static_cast<size_t>(both) * sizeof(T));
      for (int64_t n = first; n < end && n < first + kBlock; ++n) {
        backward_row(p, n, block, block + p.F);
        if (p.ds) dropped_row(p, mask, n);
      }
      for (int64_t f = 0; f < both; ++f) total[f] += static_cast<double>(block[f]);
    }
  });
  for (int64_t part = 1; part < parts; ++part)
    for (int64_t f = 0; f < both; ++f) totals[f] += totals[part * both + f];
  for (int64_t f = 0; p.dgain && f < p.F; ++f) p.dgain[f] = static_cast<T>(totals[f]);
  for (int64_t f = 0; p.dbias && f < p.F; ++f) p.dbias[f] = static_cast<T>(totals[p.F + f]);
}

template void norm_forward(const NormForward<float>&);
template void norm_forward(const NormForward<double>&);
template void norm_backward(const NormBackward<float>&);
template void norm_backward(const NormBackward<double>&);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
