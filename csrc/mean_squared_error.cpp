// The mean squared error; the equations are in src/unrolled/equations/mean_squared_error.py.
#include "kernels.h"
#include "simd.h"
#include "unrolled/parallel.h"
#include "unrolled/schedule.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

constexpr int64_t kChunk = 8192;  // fixed, so that the sum does not depend on the number of threads

inline int64_t chunks_of(int64_t n) { return (n + kChunk - 1) / kChunk; }

}  // namespace

template <class T>
void mean_squared_error_forward(int64_t n, const T* y, const T* target, int threads, T* loss) {
  const int64_t chunks = chunks_of(n);
  const Scratch scratch(static_cast<size_t>(chunks) * sizeof(double));
  auto* const partial = reinterpret_cast<double*>(scratch.data());
  parallel_for(useful_threads(threads, 2.0 * static_cast<double>(n)), chunks, [&](int64_t i) {
    const int64_t end = (i + 1) * kChunk < n ? (i + 1) * kChunk : n;
    double sum = 0;
    for (int64_t j = i * kChunk; j < end; ++j) {
      const double e = static_cast<double>(y[j]) - static_cast<double>(target[j]);  // (1)
      sum += e * e;
    }
    partial[i] = sum;
  });
  double sum = 0;
  for (int64_t i = 0; i < chunks; ++i) sum += partial[i];
  *loss = static_cast<T>(n ? sum / static_cast<double>(n) : 0);  // (2)
}

template <class T>
void mean_squared_error_backward(int64_t n, T dloss, const T* y, const T* target, int threads, T* dy) {
  const T scale = static_cast<T>(2.0 * static_cast<double>(dloss) / static_cast<double>(n));  // read only where n > 0
  parallel_for(useful_threads(threads, 2.0 * static_cast<double>(n)), chunks_of(n), [&](int64_t i) {
    const int64_t end = (i + 1) * kChunk < n ? (i + 1) * kChunk : n;
    for (int64_t j = i * kChunk; j < end; ++j) dy[j] = scale * (y[j] - target[j]);  // (2), (1)
  });
}

template void mean_squared_error_forward(int64_t, const float*, const float*, int, float*);
template void mean_squared_error_forward(int64_t, const double*, const double*, int, double*);
template void mean_squared_error_backward(int64_t, float, const float*, const float*, int, float*);
template void mean_squared_error_backward(int64_t, double, const double*, const double*, int, double*);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
