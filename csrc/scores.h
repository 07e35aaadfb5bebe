// Blocks of attention scores, and their exponentials: what the forward and the backward of attention share.
#pragma once

#include "gemm.h"
#include "philox.h"
#include "unrolled/attention.h"

namespace unrolled {
namespace UNROLLED_TARGET {

constexpr int64_t kKeys = 256;     // keys of a block: a multiple of 64, the units of one call of philox
constexpr int64_t kQueries = 48;   // queries of a block: a multiple of the tile

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// exp(x) = power(kUnit * x). In float32 powers of two, without the range checks of vexp above 0; 0 below 2^-126, NaN stays.
template <class T>
constexpr T kUnit = 1;
template <>
constexpr float kUnit<float> = kLog2e;

inline F power(F x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the sum has the nearest whole number in its last bits
  const F shifted = (x > -126 ? x : F{} - 126) + (kRound + 127);
  const F r = x - (shifted - (kRound + 127));
  F y = r * 1.5353362e-4f + 1.3398874e-3f;
  y = y * r + 9.6184373e-3f;
  y = y * r + 5.5503324e-2f;
  y = y * r + 2.4022648e-1f;
  y = y * r + 6.9314720e-1f;
  y = y * r + 1.0f;
  y *= (F)((I32)shifted << 23);
  return x < -126 ? F{} : y;
}
inline D power(D x) { return vexp(x); }
inline float power_of(float x) { return power(F{} + x)[0]; }
inline double power_of(double x) { return __builtin_exp(x); }

inline float logarithm(float x) { return __builtin_logf(x); }
inline double logarithm(double x) { return __builtin_log(x); }

// p where the 32-bit number of its place is at least `least`, else 0.
inline F kept(F p, const uint32_t* word, uint32_t least) {
  typedef uint32_t Words __attribute__((vector_size(UNROLLED_BYTES)));
  Words w;
  memcpy(&w, word, sizeof w);
  return (F)((I32)p & (I32)(w >= least));
}
inline D kept(D p, const uint32_t* word, uint32_t least) {
  typedef int64_t I64 __attribute__((vector_size(UNROLLED_BYTES)));
  U32 w;
  memcpy(&w, word, sizeof w);
  return (D)((I64)p & __builtin_convertvector(w >= least, I64));
}

// One head of one sequence.
template <class T>
struct Head {
  const AttentionInputs<T>& in;
  int64_t b, a, Tq, Tk;
  T factor;         // of the products, before power()
  bool biased;      // by a mask or by slopes, or multiplied so that the largest product is not the largest score
  Keeping<T> keeping;

  Head(const AttentionInputs<T>& inputs, int64_t sequence, int64_t head)
      : in(inputs), b(sequence), a(head), Tq(inputs.queries.length[sequence]), Tk(inputs.keys.length[sequence]),
        factor(static_cast<T>(inputs.sizes.scale) * kUnit<T>),
        biased(inputs.mask.seen || inputs.mask.added || inputs.slopes || !(factor > 0)),
        keeping(inputs.dropping.p) {}

  int64_t query_row(int64_t i) const { return in.queries.start[b] + i * in.queries.step; }
  int64_t key_row(int64_t j) const { return in.keys.start[b] + j * in.keys.step; }
  const T* q(int64_t i) const { return in.q + query_row(i) * in.sizes.q + a * in.sizes.F; }
  const T* k(int64_t j) const { return in.k + key_row(j) * in.sizes.k + a * in.sizes.F; }
  const T* v(int64_t j) const { return in.v + key_row(j) * in.sizes.v + a * in.sizes.G; }

  // How many of the first keys query i may see, masks aside; it never falls with i.
  int64_t visible(int64_t i) const { return in.sizes.causal ? larger(0, smaller(Tk, i + 1 + Tk - Tq)) : Tk; }
  // The first query that may see key j.
  int64_t first_query(int64_t j) const { return in.sizes.causal ? smaller(Tq, larger(0, j - (Tk - Tq))) : 0; }

  // The line (1) for query i and n keys from k0 on, out of its products s: what goes into power(), masked ones -inf.
  void bias(T* s, int64_t i, int64_t k0, int64_t n) const {
    const AttentionMask<T>& m = in.mask;
    const int64_t first = b * m.stride[0] + a * m.stride[1] + i * m.stride[2] + k0 * m.stride[3], step = m.stride[3];
    for (int64_t j = 0; j < n; ++j) s[j] *= factor;
    if (m.added)
      for (int64_t j = 0; j < n; ++j) s[j] += kUnit<T> * m.added[first + j * step];
    if (in.slopes) {
      const T slope = kUnit<T> * in.slopes[a];
      const int64_t origin = i + Tk - Tq - k0;
      for (int64_t j = 0; j < n; ++j) s[j] -= slope * static_cast<T>(origin > j ? origin - j : j - origin);
    }
    if (m.seen)
      for (int64_t j = 0; j < n; ++j) s[j] = m.seen[first + j * step] ? s[j] : -static_cast<T>(__builtin_inf());
  }

  // Sets to 0 what is dropped of query i, keys from k0 on.
  void drop(T* p, int64_t i, int64_t k0, int64_t n) const {
    const Dropping& d = in.dropping;
    const int64_t row = query_row(i);
    uint32_t word[4 * kLanes];
    for (int64_t j = 0; j < n; j += 4 * kLanes) {
      philox(static_cast<uint32_t>((k0 + j) / 4), static_cast<uint32_t>(d.t[row]), static_cast<uint32_t>(d.key[row]),
             static_cast<uint32_t>(d.layer + a), static_cast<uint64_t>(d.seed), word);
      for (int64_t l = j; l < n && l < j + 4 * kLanes; l += Simd<T>::width)
        store(p + l, kept(load(p + l), word + (l - j), keeping.least));
    }
  }
};

// The largest sizes of a call.
struct Extent {
  int64_t Tq = 0, Tk = 0;
  double work = 0;  // scores of one head of every sequence
  template <class T>
  explicit Extent(const AttentionInputs<T>& in) {
    for (int64_t b = 0; b < in.sizes.B; ++b) {
      Tq = larger(Tq, in.queries.length[b]), Tk = larger(Tk, in.keys.length[b]);
      work += scores(in, b, 0, in.queries.length[b], 0, in.keys.length[b]);
    }
  }
  // About how many scores there are for these queries and keys.
  template <class T>
  static double scores(const AttentionInputs<T>& in, int64_t b, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    const Head<T> head(in, b, 0);
    const auto seen = [&](int64_t i) { return static_cast<double>(larger(0, smaller(head.visible(i), j1) - j0)); };
    return i1 > i0 ? static_cast<double>(i1 - i0) * (seen(i0) + seen(i1 - 1) + 4 * seen((i0 + i1) / 2)) / 6 + 1 : 1;
  }
};

// A block of products: s[i][j] = a_i . b_j for n rows a of K numbers and the C columns b of a packed matrix, in whole panels
// only as far as row i sees; `seen` says how far, and never falls.
template <class T, class Seen>
void products(const T* const* a, int64_t n, const T* packed, int64_t K, int64_t C, T* s, int64_t ld, Seen&& seen) {
  for_panels<T>(C, kPanel<T>, [&](int64_t c, int64_t width) {
    for_tiles(n, [&](int64_t r, int height) {
      if (seen(r + height - 1) > c)
        kTile<T>[width / Simd<T>::width - 1][height - 1](a + r, packed + K * c, K, s + r * ld + c, ld);
    });
  });
}

// out[i][0..C) = the sum over the keys that row i sees of s[i][j] times row j of a packed K x C matrix.
template <class T, class Seen>
void read_rows(const T* const* s, int64_t n, const T* packed, int64_t K, int64_t C, T* out, int64_t ld, Seen&& seen) {
  for_panels<T>(C, kPanel<T>, [&](int64_t c, int64_t width) {
    for_tiles(n, [&](int64_t r, int height) {
      kTile<T>[width / Simd<T>::width - 1][height - 1](s + r, packed + K * c, seen(r + height - 1), out + r * ld + c, ld);
    });
  });
}

// x of n rows of `width` numbers, side by side and filled with 0 to whole vectors.
template <class T, class Row>
void gather(T* to, int64_t ld, int64_t n, int64_t width, Row&& row) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < width; c += Simd<T>::width) store(to + i * ld + c, load(row(i) + c, width - c));
}

// Numbers out of an array for one worker after the other.
template <class T>
struct Carver {
  T* next;
  T* take(int64_t n) {
    T* const here = next;
    next += padded<T>(n) + 64 / static_cast<int64_t>(sizeof(T));
    return here;
  }
};

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
