// The linear map; the equations are in src/unrolled/equations/linear.py.
#include "gemm.h"
#include "kernels.h"
#include "unrolled/parallel.h"
#include "unrolled/schedule.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

constexpr int64_t kBlock = 96;  // rows at a time: a multiple of the tile, small enough for the cache

// y[n][0..C) = rows of x times the packed K x C matrix, plus bias.
template <class T>
void map_rows(const T* x, int64_t n, const T* packed, int64_t K, int64_t C, const T* bias, T* y, T* scratch) {
  const int64_t ld = leading<T>(C);
  const T* row[kBlock];
  for (int64_t i = 0; i < n; ++i) row[i] = x + i * K;
  multiply(row, n, packed, K, padded<T>(C), kPanel<T>, scratch, ld);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < C; c += Simd<T>::width) {
      const Vec<T> sum = load(scratch + i * ld + c);
      store(y + i * C + c, bias ? sum + load(bias + c, C - c) : sum, C - c);
    }
}

}  // namespace

template <class T>
void linear_forward(const LinearSizes& z, const T* x, const T* weight, const T* bias, T* y) {
  const int threads =
      useful_threads(z.threads, static_cast<double>(z.N) * static_cast<double>(z.I) * static_cast<double>(z.O));
  const int64_t weights = padded<T>(z.O) * z.I, block = kBlock * leading<T>(z.O), tasks = ceil_div(z.N, kBlock);
  const Scratch scratch(static_cast<size_t>(weights + block * tasks) * sizeof(T));
  T* const packed = reinterpret_cast<T*>(scratch.data());
  pack_columns(z.I, padded<T>(z.O), kPanel<T>, packed,
               [&](int64_t c) { return c < z.O ? weight + c * z.I : nullptr; });
  parallel_for(threads, tasks, [&](int64_t i) {
    const int64_t first = i * kBlock, n = z.N - first < kBlock ? z.N - first : kBlock;
    map_rows(x + first * z.I, n, packed, z.I, z.O, bias, y + first * z.O, packed + weights + i * block);
  });
}

template <class T>
void linear_backward(const LinearSizes& z, const T* dy, const T* x, const T* weight, T* dx, T* dweight, T* dbias) {
  const int threads =
      useful_threads(z.threads, 2.0 * static_cast<double>(z.N) * static_cast<double>(z.I) * static_cast<double>(z.O));
  const int64_t tasks = threads, ld = leading<T>(z.O), ld_x = leading<T>(z.I);
  const int64_t weights = padded<T>(z.I) * z.O, part = (z.I + 1) * ld + kBlock * (ld + ld_x);
  const Scratch scratch(static_cast<size_t>(weights + part * tasks) * sizeof(T));
  T* const packed = reinterpret_cast<T*>(scratch.data());
  if (dx) pack_rows(z.O, z.I, packed, [&](int64_t k) { return weight + k * z.I; });
  parallel_for(threads, tasks, [&](int64_t task) {
    T *const dweight_t = packed + weights + task * part, *const sum = dweight_t + z.I * ld;
    T *const padded_dy = sum + ld, *const block = padded_dy + kBlock * ld;
    memset(dweight_t, 0, static_cast<size_t>((z.I + 1) * ld) * sizeof(T));
    const int64_t end = (task + 1) * z.N / tasks;
    for (int64_t first = task * z.N / tasks; first < end; first += kBlock) {
      const int64_t n = end - first < kBlock ? end - first : kBlock;
      const T* row[kBlock];
      for (int64_t i = 0; i < n; ++i) {
        row[i] = x + (first + i) * z.I;
        for (int64_t c = 0; c < z.O; c += Simd<T>::width) {
          const Vec<T> v = load(dy + (first + i) * z.O + c, z.O - c);
          store(padded_dy + i * ld + c, v);
          store(sum + c, load(sum + c) + v);
        }
      }
      multiply_transposed(row, 0, z.I, padded_dy, ld, n, padded<T>(z.O), dweight_t, ld);
      if (dx) map_rows<T>(dy + first * z.O, n, packed, z.O, z.I, nullptr, dx + first * z.I, block);
    }
  });
  constexpr int64_t kColumns = 64;
  const auto same = [](int64_t c) { return c; };
  parallel_for(threads, ceil_div(z.O, kColumns), [&](int64_t i) {
    const int64_t c0 = i * kColumns, c1 = c0 + kColumns < z.O ? c0 + kColumns : z.O;
    sum_transposed(packed + weights, tasks, part, z.I, c0, c1, ld, dweight, same);
    sum_transposed(packed + weights + z.I * ld, tasks, part, 1, c0, c1, ld, dbias, same);
  });
}

template void linear_forward(const LinearSizes&, const float*, const float*, const float*, float*);
template void linear_forward(const LinearSizes&, const double*, const double*, const double*, double*);
template void linear_backward(const LinearSizes&, const float*, const float*, const float*, float*, float*, float*);
template void linear_backward(const LinearSizes&, const double*, const double*, const double*, double*, double*, double*);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
