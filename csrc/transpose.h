// A square of numbers turned over its diagonal in registers.
#pragma once

#include "simd.h"

namespace unrolled {
namespace UNROLLED_TARGET {

template <int bytes>
struct Whole;  // the whole number of so many bytes
template <>
struct Whole<4> {
  typedef int32_t T;
};
template <>
struct Whole<8> {
  typedef int64_t T;
};

#if defined(__clang__)
#define UNROLLED_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define UNROLLED_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Index){__VA_ARGS__})
#endif

// low = a0 b0 a1 b1 ... of the first halves, high of the second ones.
template <class T>
inline void interleave(Vec<T> a, Vec<T> b, Vec<T>& low, Vec<T>& high) {
  constexpr int W = Simd<T>::width;
  typedef typename Whole<sizeof(T)>::T Index __attribute__((vector_size(UNROLLED_BYTES), unused));
  if constexpr (W == 16) {
    low = UNROLLED_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    high = UNROLLED_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  } else if constexpr (W == 8) {
    low = UNROLLED_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    high = UNROLLED_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  } else if constexpr (W == 4) {
    low = UNROLLED_SHUFFLE(a, b, 0, 4, 1, 5);
    high = UNROLLED_SHUFFLE(a, b, 2, 6, 3, 7);
  } else {
    low = UNROLLED_SHUFFLE(a, b, 0, 2);
    high = UNROLLED_SHUFFLE(a, b, 1, 3);
  }
}

// row[i][j] becomes row[j][i]: after each of log2(W) perfect shuffles of the rows one bit of i has become one of j.
template <class T>
inline void transpose(Vec<T>* row) {
  constexpr int W = Simd<T>::width;
  UNROLL for (int done = 1; done < W; done *= 2) {
    Vec<T> next[W];
    UNROLL for (int i = 0; i < W / 2; ++i) interleave<T>(row[i], row[i + W / 2], next[2 * i], next[2 * i + 1]);
    _Pragma("GCC unroll 16") for (int i = 0; i < W; ++i) row[i] = next[i];
  }
}

// The sum of row[i] in lane i: of each pair the halves are added, and one bit of i has become one of the lane.
template <class T>
inline Vec<T> totals(Vec<T>* row) {
  constexpr int W = Simd<T>::width;
  UNROLL for (int n = W / 2; n > 0; n /= 2)
    UNROLL for (int i = 0; i < n; ++i) {
      Vec<T> low, high;
      interleave<T>(row[i], row[i + n], low, high);
      row[i] = low + high;
    }
  return row[0];
}

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
