// Attention of a few queries of each sequence, as in decoding token by token: keys and values are read where they lie, for to
// pack them costs more, and for several heads together, for these lie side by side.
#pragma once

#include "scores.h"
#include "unrolled/parallel.h"
#include "unrolled/schedule.h"

namespace unrolled {
namespace UNROLLED_TARGET {

constexpr int64_t kFew = 4;     // queries of a sequence, at most
constexpr int64_t kAhead = 16;  // keys whose numbers are asked for before they are read

// Lines (1) to (4) for a row of n keys in place, without the division by what all rows of the query sum to; returns by what
// the former sum and total are to be multiplied.
template <class T>
T soften(const Head<T>& head, T* s, int64_t i, int64_t k0, int64_t n, T& highest, T& sum) {
  constexpr int W = Simd<T>::width;
  constexpr T kNone = -static_cast<T>(__builtin_inf());
  if (n <= 0) return 1;
  T factor = head.factor;
  if (head.biased) head.bias(s, i, k0, n), factor = 1;
  for (int64_t j = n; j < padded<T>(n); ++j) s[j] = kNone;
  Vec<T> best = load(s);
  for (int64_t j = W; j < n; j += W) {
    const Vec<T> v = load(s + j);
    best = v > best ? v : best;
  }
  const T before = highest, found = factor * largest<T>(best);
  highest = found > before ? found : before;
  const T base = highest == kNone ? 0 : highest;
  Vec<T> part{};
  for (int64_t j = 0; j < n; j += W) {
    const Vec<T> p = power(load(s + j) * factor - base);  // (3)
    store(s + j, p);
    part += p;
  }
  if (head.in.dropping.p > 0) head.drop(s, i, k0, n);  // (4)
  const T former = before == kNone ? 0 : power_of(before - base);
  sum = sum * former + total<T>(part);
  return former;
}

// The division by the sum of line (3), and line (2), for query i.
template <class T>
void finish(const AttentionForward<T>& p, const Head<T>& head, int64_t i, const T* sum, T highest, T total) {
  const AttentionSizes& z = p.in.sizes;
  const int64_t at = head.query_row(i) * z.A + head.a;
  const T share = total == 0 ? 0 : head.keeping.factor / total;
  for (int64_t c = 0; c < z.G; c += Simd<T>::width) store(p.o + at * z.G + c, load(sum + c) * share, z.G - c);
  p.log_sum[at] = total == 0 ? 0 : highest / kUnit<T> + logarithm(total);
}

// The products of a query with n keys, at most a vector of them, `step` numbers apart.
template <class T>
Vec<T> products_of_one(const T* q, const T* k, int64_t step, int64_t n, int64_t F) {
  constexpr int W = Simd<T>::width;
  const int64_t whole = F / W * W;
  Vec<T> sum[W];
  for (int64_t j = 0; j < W; ++j) {
    sum[j] = whole < F ? load(q + whole) * load(k + whole, F - whole) : Vec<T>{};
    for (int64_t c = 0; c < whole; c += W) sum[j] += load(q + c) * load(k + c);
    k += j + 1 < n ? step : 0;  // beyond the last key it is read again, to be masked
  }
  return totals<T>(sum);
}

// sum += p[j] times the row of key j, for n keys: NV vectors of it, or the first `width` numbers of one.
template <class T, int NV>
inline void add_columns(const T* p, const T* v, int64_t step, int64_t n, int64_t width, T* out) {
  constexpr int W = Simd<T>::width;
  Vec<T> sum[NV];
  UNROLL for (int u = 0; u < NV; ++u) sum[u] = load(out + u * W);
  for (int64_t j = 0; j < n; ++j, v += step)
    UNROLL for (int u = 0; u < NV; ++u) sum[u] += p[j] * load(v + u * W, NV == 1 ? width : W);
  UNROLL for (int u = 0; u < NV; ++u) store(out + u * W, sum[u]);
}

template <class T>
void add_row_of_one(const T* p, const T* v, int64_t step, int64_t n, int64_t G, T* out) {
  constexpr int64_t W = Simd<T>::width;
  int64_t c = 0;
  for (; c + 4 * W <= G; c += 4 * W) add_columns<T, 4>(p, v + c, step, n, 4 * W, out + c);
  for (; c < G; c += W) add_columns<T, 1>(p, v + c, step, n, G - c, out + c);
}

// f(first key, keys, head, its numbers of the first key) for n keys, a few at a time, of which the next ones are asked for.
template <class T, class Body>
inline void for_keys(const T* row, int64_t step, int64_t n, int64_t heads, int64_t width, Body&& f) {
  for (int64_t j = 0; j < n; j += kAhead, row += kAhead * step)
    for (int64_t a = 0; a < heads; ++a) {
      for (int64_t l = kAhead; l < smaller(2 * kAhead, n - j); ++l) prefetch(row + l * step + a * width, width);
      f(j, smaller(kAhead, n - j), a, row + a * width);
    }
}

// Of the heads [first, last) of query i.
template <class T>
void forward_of_one(const AttentionForward<T>& p, int64_t b, int64_t i, int64_t first, int64_t last, T* scratch) {
  const AttentionSizes& z = p.in.sizes;
  const int64_t heads = last - first, ld_f = padded<T>(z.F), ld_g = padded<T>(z.G);
  const int64_t step_k = p.in.keys.step * z.k, step_v = p.in.keys.step * z.v;
  T *const q = scratch, *const scores = q + heads * ld_f, *const sum = scores + heads * kKeys;
  T *const highest = sum + heads * ld_g, *const total = highest + heads;
  const auto head = [&](int64_t a) { return Head<T>(p.in, b, first + a); };
  const Head<T> one = head(0);
  gather(q, ld_f, heads, z.F, [&](int64_t a) { return one.q(i) + a * z.F; });
  memset(sum, 0, static_cast<size_t>(heads * ld_g) * sizeof(T));
  for (int64_t a = 0; a < heads; ++a) highest[a] = -static_cast<T>(__builtin_inf()), total[a] = 0;
  for (int64_t k0 = 0, all = one.visible(i); k0 < all; k0 += kKeys) {
    const int64_t n = smaller(kKeys, all - k0);
    for_keys(one.k(k0), step_k, n, heads, z.F, [&](int64_t j, int64_t count, int64_t a, const T* k) {
      for (int64_t l = 0; l < count; l += Simd<T>::width)
        store(scores + a * kKeys + j + l, products_of_one(q + a * ld_f, k + l * step_k, step_k, count - l, z.F));
    });
    for (int64_t a = 0; a < heads; ++a) {
      const T former = soften(head(a), scores + a * kKeys, i, k0, n, highest[a], total[a]);
      for (int64_t c = a * ld_g; k0 && c < (a + 1) * ld_g; c += Simd<T>::width) store(sum + c, load(sum + c) * former);
    }
    for_keys(one.v(k0), step_v, n, heads, z.G, [&](int64_t j, int64_t count, int64_t a, const T* v) {
      add_row_of_one(scores + a * kKeys + j, v, step_v, count, z.G, sum + a * ld_g);  // (5)
    });
  }
  for (int64_t a = 0; a < heads; ++a) finish(p, head(a), i, sum + a * ld_g, highest[a], total[a]);
}

template <class T>
void forward_of_few(const AttentionForward<T>& p, int threads) {
  const AttentionSizes& z = p.in.sizes;
  const int64_t most = ceil_div(2 * threads, larger(1, z.B)), groups = threads == 1 ? 1 : smaller(most, z.A);
  const int64_t heads = ceil_div(z.A, groups), share = heads * (padded<T>(z.F) + kKeys + padded<T>(z.G) + 2) + 64;
  const Scratch scratch(static_cast<size_t>(share * threads) * sizeof(T));
  share_out(threads, z.B * groups, [&](int64_t worker, int64_t task) {
    const int64_t b = task / groups, a = task % groups;
    for (int64_t i = 0; i < p.in.queries.length[b]; ++i)
      forward_of_one(p, b, i, a * z.A / groups, (a + 1) * z.A / groups, reinterpret_cast<T*>(scratch.data()) + worker * share);
  });
}

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
