// Products of large matrices that lie row by row, shared out to threads: packed and cut so that what a tile reads is in cache.
//
//   map_rows       y = a B (+ bias, or + y): rows of a, B packed in panels; the tile writes y itself
//   outer_product  out = (out +) a^T b, summed over tokens: a with padded rows, b in panels
//
// A sum runs over its terms in one order, whatever the number of threads.
#pragma once

#include "gemm.h"
#include "unrolled/parallel.h"

namespace unrolled {
namespace UNROLLED_TARGET {

constexpr int64_t kDepth = 512;    // terms of a sum between two stores: a panel that deep stays in the L2 cache
constexpr int64_t kTokens = 512;   // the same of a sum over tokens
constexpr int64_t kTaskRows = 96;  // rows of a task, about

// Into how many equal parts n rows are cut, so that every thread gets as many.
inline int64_t row_tasks(int64_t n, int threads) {
  const int64_t rounds = ceil_div(n, kTaskRows * threads);
  return rounds * threads < n ? rounds * threads : n;
}

// f(first, count) over n rows in equal tasks, as many for every thread.
template <class F>
void for_row_tasks(int threads, int64_t n, F&& f) {
  const int64_t tasks = row_tasks(n, threads);
  parallel_for(threads, tasks, [&](int64_t i) { f(i * n / tasks, (i + 1) * n / tasks - i * n / tasks); });
}

// out[r][0..columns) = base[r][0..columns) (0 without a base) + a[r][0..K) times a panel of NV vectors.
template <class T, int MR, int NV>
void tile_rows(const T* a, int64_t lda, const T* panel, int64_t K, const T* base, int64_t ld_base, T* out, int64_t ld,
               int64_t columns) {
  constexpr int W = Simd<T>::width;
  Vec<T> sum[MR][NV];
  UNROLL for (int r = 0; r < MR; ++r) UNROLL for (int v = 0; v < NV; ++v)
    sum[r][v] = base ? load(base + r * ld_base + v * W, v + 1 < NV ? W : columns - v * W) : Vec<T>{};
  _Pragma("GCC unroll 4") for (int64_t k = 0; k < K; ++k) {
    Vec<T> b[NV];
    UNROLL for (int v = 0; v < NV; ++v) b[v] = load(panel + (k * NV + v) * W);
    UNROLL for (int r = 0; r < MR; ++r) {
      const T s = a[r * lda + k];
      UNROLL for (int v = 0; v < NV; ++v) sum[r][v] += s * b[v];
    }
  }
  UNROLL for (int r = 0; r < MR; ++r) UNROLL for (int v = 0; v < NV; ++v)
    store(out + r * ld + v * W, sum[r][v], v + 1 < NV ? W : columns - v * W);
}

// out[j][0..columns) = (add: out +) sum over tokens of a[token][j] * panel[token][:].
template <class T, int MR, int NV>
void tile_outer(const T* a, int64_t lda, const T* panel, int64_t tokens, bool add, T* out, int64_t ld, int64_t columns) {
  constexpr int W = Simd<T>::width;
  Vec<T> sum[MR][NV];
  UNROLL for (int r = 0; r < MR; ++r) UNROLL for (int v = 0; v < NV; ++v)
    sum[r][v] = add ? load(out + r * ld + v * W, v + 1 < NV ? W : columns - v * W) : Vec<T>{};
  _Pragma("GCC unroll 4") for (int64_t token = 0; token < tokens; ++token) {
    Vec<T> b[NV];
    UNROLL for (int v = 0; v < NV; ++v) b[v] = load(panel + (token * NV + v) * W);
    UNROLL for (int r = 0; r < MR; ++r) {
      const T s = a[token * lda + r];
      UNROLL for (int v = 0; v < NV; ++v) sum[r][v] += s * b[v];
    }
  }
  UNROLL for (int r = 0; r < MR; ++r) UNROLL for (int v = 0; v < NV; ++v)
    store(out + r * ld + v * W, sum[r][v], v + 1 < NV ? W : columns - v * W);
}

// out[r][o] = bias[o] (0 without one) + a[r][0..K) times b[o][0..K): MR rows of a and NO of b, neither of them packed.
template <class T, int MR, int NO>
void tile_dot(const T* a, int64_t lda, const T* b, int64_t K, const T* bias, T* out, int64_t ld) {
  constexpr int W = Simd<T>::width;
  const int64_t whole = K / W * W;
  Vec<T> sum[MR][NO];
  UNROLL for (int r = 0; r < MR; ++r) UNROLL for (int o = 0; o < NO; ++o) sum[r][o] = Vec<T>{};
  for (int64_t k = 0; k < whole; k += W) {
    Vec<T> w[NO];
    UNROLL for (int o = 0; o < NO; ++o) w[o] = load(b + o * K + k);
    UNROLL for (int r = 0; r < MR; ++r) {
      const Vec<T> x = load(a + r * lda + k);
      UNROLL for (int o = 0; o < NO; ++o) sum[r][o] += x * w[o];
    }
  }
  T lanes[MR][NO][W];  // through memory: taken apart in place, the sums would stay in memory throughout
  UNROLL for (int r = 0; r < MR; ++r) UNROLL for (int o = 0; o < NO; ++o) store(lanes[r][o], sum[r][o]);
  for (int r = 0; r < MR; ++r)
    for (int o = 0; o < NO; ++o) {
      T y = total<T>(load(lanes[r][o])) + (bias ? bias[o] : 0);
      for (int64_t k = whole; k < K; ++k) y += a[r * lda + k] * b[o * K + k];
      out[r * ld + o] = y;
    }
}

template <class T>
using TileRows = void (*)(const T*, int64_t, const T*, int64_t, const T*, int64_t, T*, int64_t, int64_t);
template <class T>
using TileDot = void (*)(const T*, int64_t, const T*, int64_t, const T*, T*, int64_t);
template <class T>
using TileOuter = void (*)(const T*, int64_t, const T*, int64_t, bool, T*, int64_t, int64_t);
template <class T>
constexpr TileRows<T> kTileRows[kVectors][kRows] = UNROLLED_TABLE(tile_rows);
constexpr int kDot = 4;  // rows of a and of b in a tile of sums of products along a row
#define UNROLLED_DOTS(MR) {tile_dot<T, MR, 1>, tile_dot<T, MR, 2>, tile_dot<T, MR, 3>, tile_dot<T, MR, 4>}
template <class T>
constexpr TileDot<T> kTileDot[kDot][kDot] = {UNROLLED_DOTS(1), UNROLLED_DOTS(2), UNROLLED_DOTS(3), UNROLLED_DOTS(4)};
template <class T>
constexpr TileOuter<T> kTileOuter[kVectors][kRows] = UNROLLED_TABLE(tile_outer);

// A K x C matrix, cut into depths of kDepth rows, each in panels.
template <class T>
struct Packed {
  const T* data;
  int64_t K, C;
  static int64_t size(int64_t K, int64_t C) { return K * padded<T>(C); }
  // Its rows from k on, a multiple of kDepth.
  Packed rows(int64_t k, int64_t count) const { return {data + k * padded<T>(C), count, C}; }
};

// y[r][0..columns) = rows of a times the columns of b from `first` on, a multiple of the panel; + bias, or + y where `add`.
template <class T>
void map_rows(const T* a, int64_t lda, int64_t n, const Packed<T>& b, int64_t first, int64_t columns, const T* bias, bool add,
              T* y, int64_t ld) {
  int64_t k = 0;
  do {
    const int64_t depth = b.K - k < kDepth ? b.K - k : kDepth;
    const T* const panels = b.data + k * padded<T>(b.C) + depth * first;
    for_panels<T>(padded<T>(columns), kPanel<T>, [&](int64_t c, int64_t width) {
      for_tiles(n, [&](int64_t r, int height) {
        const T* const base = k || add ? y + r * ld + c : bias ? bias + c : nullptr;
        kTileRows<T>[width / Simd<T>::width - 1][height - 1](a + r * lda + k, lda, panels + depth * c, depth, base,
                                                             k || add ? ld : 0, y + r * ld + c, ld, columns - c);
      });
    });
    k += kDepth;
  } while (k < b.K);
}

// For so few rows to pack the weight takes longer than to multiply.
constexpr int64_t kFewRows = 48;

// y[r][0..columns) = n rows of a times `columns` rows of K numbers of a weight as it lies, + bias.
template <class T>
void map_few_rows(const T* a, int64_t lda, int64_t n, const T* weight, int64_t K, int64_t columns, const T* bias, T* y,
                  int64_t ld) {
  const int64_t share = n > kDot ? K / ceil_div(n, kDot) : K;  // of the rows after the next ones that each tile asks for
  for (int64_t c = 0; c < columns; c += kDot) {
    const int64_t width = columns - c < kDot ? columns - c : kDot;
    for (int64_t r = 0; r < n; r += kDot) {
      const int64_t height = n - r < kDot ? n - r : kDot;
      prefetch(weight + (c + 2 * kDot) * K + r * share, kDot * share);
      kTileDot<T>[height - 1][width - 1](a + r * lda, lda, weight + c * K, K, bias ? bias + c : nullptr, y + r * ld + c, ld);
    }
  }
}

// f(first term, terms, first column, columns, its place in the packed matrix) for the panels of a K x C matrix, shared out.
template <class T, class F>
void for_packed(int threads, int64_t K, int64_t C, T* packed, F&& f) {
  const int64_t panels = ceil_div(C, kPanel<T>), depths = ceil_div(K, kDepth);
  parallel_for(threads, panels * depths, [&](int64_t i) {
    const int64_t k = i / panels * kDepth, c = i % panels * kPanel<T>;
    const int64_t depth = K - k < kDepth ? K - k : kDepth, width = C - c < kPanel<T> ? C - c : kPanel<T>;
    f(k, depth, c, width, packed + k * padded<T>(C) + depth * c);
  });
}

// The matrix whose column c is row c of the weight (C, K): for x W^T.
template <class T>
Packed<T> pack_transposed(int threads, const T* weight, int64_t K, int64_t C, T* packed) {
  for_packed(threads, K, C, packed, [&](int64_t k, int64_t depth, int64_t c, int64_t width, T* to) {
    pack_columns(depth, padded<T>(width), kPanel<T>, to,
                 [&](int64_t j) { return j < width ? weight + (c + j) * K + k : nullptr; });
  });
  return {packed, K, C};
}

// The matrix (K, C) itself: for dy W.
template <class T>
Packed<T> pack_plain(int threads, const T* weight, int64_t K, int64_t C, T* packed) {
  for_packed(threads, K, C, packed, [&](int64_t k, int64_t depth, int64_t c, int64_t width, T* to) {
    pack_rows(depth, width, to, [&](int64_t j) { return weight + (k + j) * C + c; });
  });
  return {packed, K, C};
}

// Tokens of a block (at most `capacity`) in panels of columns, as tile_outer reads them: vector v of a token goes here.
template <class T>
inline T* in_panels(T* panels, int64_t capacity, int64_t columns, int64_t token, int64_t c) {
  const int64_t first = c / kPanel<T> * kPanel<T>, left = padded<T>(columns) - first;
  const int64_t width = left < kPanel<T> ? left : kPanel<T>;
  return panels + capacity * first + token * width + (c - first);
}

// One row of `columns` numbers into the panels.
template <class T>
void put_in_panels(const T* row, T* panels, int64_t capacity, int64_t columns, int64_t token) {
  for (int64_t c = 0; c < columns; c += Simd<T>::width)
    store(in_panels(panels, capacity, columns, token, c), load(row + c, columns - c));
}

// The part of an outer product that a task computes: rows [o0, o1) and columns [i0, i1) of out.
struct Part {
  int64_t o0, o1, i0, i1;
};

// O x I numbers in equal parts, one for each thread.
template <class T>
struct Parts {
  int64_t O, I, rows, columns;  // rows and columns: the parts along each
  Parts(int64_t O_, int64_t I_, int threads) : O(O_), I(I_), rows(1), columns(1) {
    constexpr int64_t kSmallest = 48;
    while (rows * columns < threads) {
      if (O / (rows + 1) >= kSmallest && (O / rows >= I / columns || I / (columns + 1) < kPanel<T>))
        ++rows;
      else if (I / (columns + 1) >= kPanel<T>)
        ++columns;
      else
        break;
    }
  }
  int64_t count() const { return rows * columns; }
  Part operator[](int64_t i) const {
    const int64_t r = i / columns, c = i % columns, panels = ceil_div(I, kPanel<T>);
    const int64_t end = (c + 1) * panels / columns * kPanel<T>;
    return {r * O / rows, (r + 1) * O / rows, c * panels / columns * kPanel<T>, end < I ? end : I};
  }
};

// Part of out (O, I) = (add: out +) a^T b over at most kTokens tokens; b (tokens, I) in panels of that capacity.
template <class T>
void outer_product(const Part& part, const T* a, int64_t lda, const T* b, int64_t capacity, int64_t tokens, int64_t I, bool add,
                   T* out) {
  constexpr int64_t kColumns = 4 * kPanel<T>;  // so many panels stay in the L2 cache
  for (int64_t i0 = part.i0; i0 < part.i1; i0 += kColumns)
    for_tiles(part.o1 - part.o0, [&](int64_t r, int height) {
      const int64_t o = part.o0 + r, i1 = i0 + kColumns < part.i1 ? i0 + kColumns : part.i1;
      for (int64_t i = i0; i < i1; i += kPanel<T>) {
        const int64_t left = padded<T>(I) - i, width = left < kPanel<T> ? left : kPanel<T>;
        kTileOuter<T>[width / Simd<T>::width - 1][height - 1](a + o, lda, b + capacity * i, tokens, add, out + o * I + i, I, I - i);
      }
    });
}

// sum[o] = (add: sum +) sum over the tokens of a[token][o], for o in [o0, o1).
template <class T>
void sum_tokens(const T* a, int64_t lda, int64_t tokens, int64_t o0, int64_t o1, bool add, T* sum) {
  constexpr int W = Simd<T>::width, N = 4;  // vectors side by side: whole cache lines, one after the other
  for (int64_t o = o0; o < o1; o += N * W) {
    const int64_t left = o1 - o;
    Vec<T> total[N];
    UNROLL for (int v = 0; v < N; ++v) total[v] = add && v * W < left ? load(sum + o + v * W, left - v * W) : Vec<T>{};
    if (left >= N * W) {
      for (int64_t t = 0; t < tokens; ++t) UNROLL for (int v = 0; v < N; ++v) total[v] += load(a + t * lda + o + v * W);
    } else {
      for (int64_t t = 0; t < tokens; ++t)
        UNROLL for (int v = 0; v < N; ++v) if (v * W < left) total[v] += load(a + t * lda + o + v * W, left - v * W);
    }
    UNROLL for (int v = 0; v < N; ++v) if (v * W < left) store(sum + o + v * W, total[v], left - v * W);
  }
}

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
