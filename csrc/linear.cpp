// The linear map; the equations are in src/unrolled/equations/linear.py.
#include "kernels.h"
#include "products.h"
#include "unrolled/schedule.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

inline double work(const LinearSizes& z) {
  return static_cast<double>(z.N) * static_cast<double>(z.I) * static_cast<double>(z.O);
}

}  // namespace

template <class T>
void linear_forward(const LinearSizes& z, const T* x, const T* weight, const T* bias, T* y) {
  const int threads = useful_threads(z.threads, work(z));
  if (z.N <= kFewRows)
    return parallel_for(threads, threads, [&](int64_t i) {
      const int64_t first = i * z.O / threads, count = (i + 1) * z.O / threads - first;
      map_few_rows(x, z.I, z.N, weight + first * z.I, z.I, count, bias ? bias + first : nullptr, y + first, z.O);
    });
  const Scratch scratch(static_cast<size_t>(Packed<T>::size(z.I, z.O)) * sizeof(T));
  const Packed<T> packed = pack_transposed(threads, weight, z.I, z.O, reinterpret_cast<T*>(scratch.data()));
  for_row_tasks(threads, z.N, [&](int64_t first, int64_t n) {
    map_rows(x + first * z.I, z.I, n, packed, 0, z.O, bias, false, y + first * z.O, z.O);
  });
}

template <class T>
void linear_backward(const LinearSizes& z, const T* dy, const T* x, const T* weight, T* dx, T* dweight, T* dbias) {
  const int threads = useful_threads(z.threads, 2.0 * work(z));
  const int64_t capacity = z.N < kTokens ? z.N : kTokens, ld = leading<T>(z.O);
  const int64_t weights = dx ? Packed<T>::size(z.O, z.I) : 0;
  const Scratch scratch(static_cast<size_t>(weights + capacity * (ld + padded<T>(z.I))) * sizeof(T));
  T *const base = reinterpret_cast<T*>(scratch.data()), *const rows = base + weights, *const panels = rows + capacity * ld;
  const Packed<T> packed = dx ? pack_plain(threads, weight, z.O, z.I, base) : Packed<T>{};
  const Parts<T> parts(z.O, z.I, threads);
  int64_t first = 0;
  do {
    const int64_t tokens = z.N - first < kTokens ? z.N - first : kTokens;
    for_row_tasks(threads, tokens, [&](int64_t begin, int64_t n) {
      const T* const from = dy + (first + begin) * z.O;
      if (dx) map_rows<T>(from, z.O, n, packed, 0, z.I, nullptr, false, dx + (first + begin) * z.I, z.I);
      for (int64_t t = begin; t < begin + n; ++t) {
        memcpy(rows + t * ld, dy + (first + t) * z.O, static_cast<size_t>(z.O) * sizeof(T));
        put_in_panels(x + (first + t) * z.I, panels, capacity, z.I, t);
      }
    });
    parallel_for(threads, parts.count(), [&](int64_t i) {
      const Part part = parts[i];
      outer_product(part, rows, ld, panels, capacity, tokens, z.I, first > 0, dweight);
      if (part.i0 == 0) sum_tokens(rows, ld, tokens, part.o0, part.o1, first > 0, dbias);
    });
    first += kTokens;
  } while (first < z.N);
}

template void linear_forward(const LinearSizes&, const float*, const float*, const float*, float*);
template void linear_forward(const LinearSizes&, const double*, const double*, const double*, double*);
template void linear_backward(const LinearSizes&, const float*, const float*, const float*, float*, float*, float*);
template void linear_backward(const LinearSizes&, const double*, const double*, const double*, double*, double*, double*);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
