// The matrix products of the core, on rows found through pointers: A is never copied, the weights are packed once a call.
#pragma once

#include "transpose.h"

namespace unrolled {
namespace UNROLLED_TARGET {

// A register tile is kRows rows x kVectors vectors; a packed matrix is cut into panels that wide.
constexpr int kRows = 6;
constexpr int kVectors = UNROLLED_VECTORS;

template <class T>
constexpr int64_t kPanel = kVectors * Simd<T>::width;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
inline int64_t padded(int64_t columns) {
  return ceil_div(columns, Simd<T>::width) * Simd<T>::width;
}

// Leading dimension of a scratch matrix: an odd number of cache lines, so that rows do not fall on one another in the cache.
template <class T>
inline int64_t leading(int64_t columns) {
  const int64_t lines = ceil_div(padded<T>(columns) * static_cast<int64_t>(sizeof(T)), 64) | 1;
  return lines * 64 / static_cast<int64_t>(sizeof(T));
}

// How the columns of a packed matrix stand for G gates of H units: the gates of W units side by side, so that one tile holds
// every gate of a unit and the cell's algebra can follow at once. Units beyond H are 0. With G = 1: the columns in order.
template <class T, int G>
struct Columns {
  static constexpr int64_t kWidth = Simd<T>::width;
  static constexpr int64_t kGroup = (G == 1 ? kVectors : G) * kWidth;  // columns between two calls of the cell
  static int64_t count(int64_t H) { return padded<T>(H) * G; }
  // The row gate * H + unit of the weights that stands there, or -1 for a unit beyond H.
  static int64_t row(int64_t column, int64_t H) {
    const int64_t unit = column / (G * kWidth) * kWidth + column % kWidth;
    return unit < H ? column / kWidth % G * H + unit : -1;
  }
};

// Cuts C columns into panels of at most kPanel that cross no border of a group: f(first column, columns).
template <class T, class F>
inline void for_panels(int64_t C, int64_t group, F&& f) {
  for (int64_t c = 0, width; c < C; c += width) {
    width = group - c % group;
    width = width < kPanel<T> ? width : kPanel<T>;
    width = width < C - c ? width : C - c;
    f(c, width);
  }
}

// packed[k][c] = column(c)[k], panel after panel; a null column is 0. C is a multiple of the vector.
template <class T, class Column>
void pack_columns(int64_t K, int64_t C, int64_t group, T* packed, Column&& column) {
  constexpr int W = Simd<T>::width;
  for_panels<T>(C, group, [&](int64_t c0, int64_t width) {
    T* const panel = packed + K * c0;
    for (int64_t c = 0; c < width; c += W) {
      const T* from[W];
      for (int i = 0; i < W; ++i) from[i] = column(c0 + c + i);
      for (int64_t k0 = 0; k0 < K; k0 += W) {
        Vec<T> block[W];
        _Pragma("GCC unroll 16") for (int i = 0; i < W; ++i) block[i] = from[i] ? load(from[i] + k0, K - k0) : Vec<T>{};
        transpose<T>(block);
        T* const to = panel + k0 * width + c;
        if (K - k0 >= W) {
          _Pragma("GCC unroll 16") for (int i = 0; i < W; ++i) store(to + i * width, block[i]);
        } else {
          for (int64_t i = 0; i < K - k0; ++i) store(to + i * width, block[i]);
        }
      }
    }
  });
}

// packed[k][c] = row(k)[c] for c < real, else 0, panel after panel; a null row is 0.
template <class T, class Row>
void pack_rows(int64_t K, int64_t real, T* packed, Row&& row) {
  for_panels<T>(padded<T>(real), kPanel<T>, [&](int64_t c0, int64_t width) {
    for (int64_t k = 0; k < K; ++k) {
      const T* const from = row(k);
      T* const to = packed + K * c0 + k * width;
      for (int64_t c = 0; c < width; c += Simd<T>::width)
        store(to + c, from ? load(from + c0 + c, real - c0 - c) : Vec<T>{});
    }
  });
}

// out[r][:] = a[r][0..K) times a panel of NV vectors.
template <class T, int MR, int NV>
void tile(const T* const* a, const T* panel, int64_t K, T* out, int64_t ld) {
  constexpr int W = Simd<T>::width;
  const T* row[MR];
  Vec<T> sum[MR][NV];
  UNROLL for (int r = 0; r < MR; ++r) {
    row[r] = a[r];
    UNROLL for (int v = 0; v < NV; ++v) sum[r][v] = Vec<T>{};
  }
  _Pragma("GCC unroll 4") for (int64_t k = 0; k < K; ++k) {
    Vec<T> b[NV];
    UNROLL for (int v = 0; v < NV; ++v) b[v] = load(panel + (k * NV + v) * W);
    UNROLL for (int r = 0; r < MR; ++r) {
      const T s = row[r][k];
      UNROLL for (int v = 0; v < NV; ++v) sum[r][v] += s * b[v];
    }
  }
  UNROLL for (int r = 0; r < MR; ++r) UNROLL for (int v = 0; v < NV; ++v) store(out + r * ld + v * W, sum[r][v]);
}

// out[j][:] += sum over tokens of a[token][j] * b[token][:], j in [0, MR), NV vectors of b.
template <class T, int MR, int NV>
void outer(const T* const* a, int64_t first, const T* b, int64_t ldb, int64_t tokens, T* out, int64_t ld) {
  constexpr int W = Simd<T>::width;
  Vec<T> sum[MR][NV];
  UNROLL for (int r = 0; r < MR; ++r) UNROLL for (int v = 0; v < NV; ++v) sum[r][v] = Vec<T>{};
  _Pragma("GCC unroll 2") for (int64_t token = 0; token < tokens; ++token) {
    const T* const column = a[token] + first;
    Vec<T> right[NV];
    UNROLL for (int v = 0; v < NV; ++v) right[v] = load(b + token * ldb + v * W);
    UNROLL for (int r = 0; r < MR; ++r) {
      const T s = column[r];
      UNROLL for (int v = 0; v < NV; ++v) sum[r][v] += s * right[v];
    }
  }
  UNROLL for (int r = 0; r < MR; ++r) UNROLL for (int v = 0; v < NV; ++v) {
    T* const p = out + r * ld + v * W;
    store(p, load(p) + sum[r][v]);
  }
}

template <class T>
using Tile = void (*)(const T* const*, const T*, int64_t, T*, int64_t);
template <class T>
using Outer = void (*)(const T* const*, int64_t, const T*, int64_t, int64_t, T*, int64_t);

#define UNROLLED_BY_ROWS(kernel, NV) \
  { kernel<T, 1, NV>, kernel<T, 2, NV>, kernel<T, 3, NV>, kernel<T, 4, NV>, kernel<T, 5, NV>, kernel<T, 6, NV> }
#if UNROLLED_VECTORS == 4
#define UNROLLED_TABLE(kernel) \
  { UNROLLED_BY_ROWS(kernel, 1), UNROLLED_BY_ROWS(kernel, 2), UNROLLED_BY_ROWS(kernel, 3), UNROLLED_BY_ROWS(kernel, 4) }
#else
#define UNROLLED_TABLE(kernel) \
  { UNROLLED_BY_ROWS(kernel, 1), UNROLLED_BY_ROWS(kernel, 2) }
#endif

template <class T>
constexpr Tile<T> kTile[kVectors][kRows] = UNROLLED_TABLE(tile);
template <class T>
constexpr Outer<T> kOuter[kVectors][kRows] = UNROLLED_TABLE(outer);

// Cuts n rows into tiles of nearly equal height, at most kRows: f(first row, height).
template <class F>
inline void for_tiles(int64_t n, F&& f) {
  const int64_t tiles = ceil_div(n, kRows);
  for (int64_t i = 0, r = 0; i < tiles; ++i) {
    const int64_t height = (n - r) / (tiles - i);
    f(r, static_cast<int>(height));
    r += height;
  }
}

// out[r][0..C) = a[r] times a packed K x C matrix, for n rows.
template <class T>
void multiply(const T* const* a, int64_t n, const T* packed, int64_t K, int64_t C, int64_t group, T* out, int64_t ld) {
  for_panels<T>(C, group, [&](int64_t c, int64_t width) {
    for_tiles(n, [&](int64_t r, int height) {
      kTile<T>[width / Simd<T>::width - 1][height - 1](a + r, packed + K * c, K, out + r * ld + c, ld);
    });
  });
}

// out[j][0..C) += sum over tokens of a[token][j] * b[token][:], j in [first, first + n), C a multiple of the vector.
template <class T>
void multiply_transposed(const T* const* a, int64_t first, int64_t n, const T* b, int64_t ldb, int64_t tokens, int64_t C,
                         T* out, int64_t ld) {
  for_panels<T>(C, kPanel<T>, [&](int64_t c, int64_t width) {
    for_tiles(n, [&](int64_t r, int height) {
      const int64_t j = first + r;
      kOuter<T>[width / Simd<T>::width - 1][height - 1](a, j, b + c, ldb, tokens, out + j * ld + c, ld);
    });
  });
}

// out[row(c)][j] = sum over parts of parts[p][j][c], for j in [0, J) and columns c in [c0, c1): ends a transposed product.
template <class T, class Row>
void sum_transposed(const T* parts, int64_t count, int64_t stride, int64_t J, int64_t c0, int64_t c1, int64_t ld, T* out,
                    Row&& row) {
  constexpr int64_t kBlock = 16;
  for (int64_t j0 = 0; j0 < J; j0 += kBlock)
    for (int64_t c = c0; c < c1; ++c) {
      const int64_t to = row(c);
      if (to < 0) continue;
      for (int64_t j = j0; j < J && j < j0 + kBlock; ++j) {
        T sum = 0;
        for (int64_t p = 0; p < count; ++p) sum += parts[p * stride + j * ld + c];
        out[to * J + j] = sum;
      }
    }
}

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
