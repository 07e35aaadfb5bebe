// Rotary positions; the equations are in src/unrolled/equations/positions.py.
#include "kernels.h"
#include "simd.h"
#include "unrolled/parallel.h"
#include "unrolled/schedule.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

// (x1, x0, x3, x2, ...)
inline F neighbours(F x) {
  typedef uint64_t Pair __attribute__((vector_size(UNROLLED_BYTES)));
  const Pair v = (Pair)x;
  return (F)((v << 32) | (v >> 32));
}

inline D neighbours(D x) {
  D y;
  for (int i = 0; i < Simd<double>::width; i += 2) {
    y[i] = x[i + 1];
    y[i + 1] = x[i];
  }
  return y;
}

// Of one position: cos, cos of each pair, then -sin, sin, so that y = x * cos + neighbours(x) * sin.
template <class T>
inline void waves(const double* frequency, int64_t F, int64_t t, T* cos) {
  T* const sin = cos + F;
  for (int64_t i = 0; i < F / 2; ++i) {
    const double a = static_cast<double>(t) * frequency[i];  // (4)
    cos[2 * i] = cos[2 * i + 1] = static_cast<T>(__builtin_cos(a));
    sin[2 * i + 1] = static_cast<T>(__builtin_sin(a));
    sin[2 * i] = -sin[2 * i + 1];
  }
}

template <class T>
inline void turn(const Rotary<T>& p, int64_t n, int64_t F, const T* cos) {
  const T* const x = p.x + n * p.W;
  T* const y = p.y + n * p.W;
  for (int64_t c = 0; c < p.columns; c += F)
    for (int64_t f = 0; f < F; f += Simd<T>::width) {
      const int64_t k = F - f;
      const Vec<T> v = load(x + c + f, k);
      store(y + c + f, v * load(cos + f, k) + neighbours(v) * load(cos + F + f, k), k);  // (5), (6)
    }
  memcpy(y + p.columns, x + p.columns, static_cast<size_t>(p.W - p.columns) * sizeof(T));
}

// The positions from the lowest to the highest, where those are not more than there are rows; else 0.
inline int64_t span(const int64_t* t, int64_t N, int64_t* lowest) {
  int64_t low = N ? t[0] : 0, high = low;
  for (int64_t n = 1; n < N; ++n) {
    low = t[n] < low ? t[n] : low;
    high = t[n] > high ? t[n] : high;
  }
  *lowest = low;
  const uint64_t difference = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  return difference < static_cast<uint64_t>(N) ? static_cast<int64_t>(difference) + 1 : 0;
}

}  // namespace

template <class T>
void rotary(const Rotary<T>& p) {
  const int64_t F = p.columns / p.heads;
  int64_t low;
  const int64_t positions = span(p.t, p.N, &low);
  const int64_t parts = useful_threads(p.threads, 5.0 * static_cast<double>(p.N * p.W));
  const Scratch scratch(static_cast<size_t>(2 * F * (positions ? positions : parts)) * sizeof(T));
  T* const table = reinterpret_cast<T*>(scratch.data());
  const int64_t tables = useful_threads(p.threads, 50.0 * static_cast<double>(positions * F));
  if (positions)  // many rows stand at few positions
    parallel_for(p.threads, tables, [&](int64_t part) {
      for (int64_t i = part * positions / tables; i < (part + 1) * positions / tables; ++i)
        waves(p.frequency, F, low + i, table + 2 * F * i);
    });
  parallel_for(p.threads, parts, [&](int64_t part) {
    for (int64_t n = part * p.N / parts; n < (part + 1) * p.N / parts; ++n) {
      T* const own = table + 2 * F * (positions ? p.t[n] - low : part);
      if (!positions) waves(p.frequency, F, p.t[n], own);
      turn(p, n, F, own);
    }
  });
}

template void rotary(const Rotary<float>&);
template void rotary(const Rotary<double>&);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
