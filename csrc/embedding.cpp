// The embedding table; the equations are in src/unrolled/equations/embedding.py.
#include "kernels.h"
#include "simd.h"
#include "unrolled/parallel.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

int64_t first_outside(int64_t N, const int64_t* token, int64_t V) {
  for (int64_t n = 0; n < N; ++n)
    if (token[n] < 0 || token[n] >= V) return n;
  return -1;
}

}  // namespace

template <class T>
int64_t embedding_forward(int64_t N, int64_t V, int64_t E, const int64_t* token, const T* weight, int threads, T* y) {
  const int64_t bad = first_outside(N, token, V);
  if (bad >= 0) return bad;
  const int64_t parts = useful_threads(threads, 4.0 * static_cast<double>(N * E));
  parallel_for(threads, parts, [&](int64_t i) {
    for (int64_t n = i * N / parts; n < (i + 1) * N / parts; ++n)
      memcpy(y + n * E, weight + token[n] * E, static_cast<size_t>(E) * sizeof(T));
  });
  return -1;
}

// Each thread owns a range of the table and reads every token: no two write one row, and the order of a sum is fixed.
template <class T>
int64_t embedding_backward(int64_t N, int64_t V, int64_t E, const T* dy, const int64_t* token, int64_t padding,
                           int threads, T* dweight) {
  const int64_t bad = first_outside(N, token, V);
  if (bad >= 0) return bad;
  const int64_t parts = useful_threads(threads, 4.0 * static_cast<double>(N * E + V * E));
  parallel_for(threads, parts, [&](int64_t i) {
    const int64_t first = i * V / parts, end = (i + 1) * V / parts;
    memset(dweight + first * E, 0, static_cast<size_t>((end - first) * E) * sizeof(T));
    for (int64_t n = 0; n < N; ++n) {
      if (token[n] < first || token[n] >= end || token[n] == padding) continue;
      T* const row = dweight + token[n] * E;
      for (int64_t e = 0; e < E; e += Simd<T>::width)
        store(row + e, load(row + e, E - e) + load(dy + n * E + e, E - e), E - e);
    }
  });
  return -1;
}

template int64_t embedding_forward(int64_t, int64_t, int64_t, const int64_t*, const float*, int, float*);
template int64_t embedding_forward(int64_t, int64_t, int64_t, const int64_t*, const double*, int, double*);
template int64_t embedding_backward(int64_t, int64_t, int64_t, const float*, const int64_t*, int64_t, int, float*);
template int64_t embedding_backward(int64_t, int64_t, int64_t, const double*, const int64_t*, int64_t, int, double*);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
