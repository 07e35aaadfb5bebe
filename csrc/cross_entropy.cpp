// Softmax and cross-entropy in one; the equations are in src/unrolled/equations/cross_entropy.py.
#include "kernels.h"
#include "simd.h"
#include "unrolled/parallel.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

// Line (2) for one token: y_c = w_c * everyone, and the target has w_k * own more.
template <class T>
struct Smoothed {
  T own, everyone;
  explicit Smoothed(const CrossEntropySizes& z)
      : own(static_cast<T>(1 - z.label_smoothing)), everyone(static_cast<T>(z.label_smoothing / static_cast<double>(z.C))) {}
};

template <class T>
T log_sum_exp(const T* z, int64_t C) {
  T largest = C ? z[0] : -__builtin_inf();
  for (int64_t c = 1; c < C; ++c) largest = z[c] > largest || z[c] != z[c] ? z[c] : largest;
  if (!(largest - largest == 0)) return largest;  // infinite or NaN
  constexpr int W = Simd<T>::width;
  Vec<T> sum{};
  int64_t c = 0;
  for (; c + W <= C; c += W) sum += vexp(load(z + c) - largest);
  T total = 0;
  for (int i = 0; i < W; ++i) total += sum[i];
  const Vec<T> rest = vexp(load(z + c, C - c) - largest);
  for (int64_t i = 0; i < C - c; ++i) total += rest[i];
  return largest + static_cast<T>(__builtin_log(static_cast<double>(total)));
}

}  // namespace

template <class T>
int64_t cross_entropy_forward(const CrossEntropySizes& z, const T* logits, const int64_t* target, const T* class_weight,
                              T* loss, T* log_sum) {
  for (int64_t n = 0; n < z.N; ++n)
    if (target[n] != z.ignore_index && (target[n] < 0 || target[n] >= z.C)) return n;
  const Smoothed<T> y(z);
  const int64_t parts = useful_threads(z.threads, 20.0 * static_cast<double>(z.N * z.C));
  parallel_for(z.threads, parts, [&](int64_t part) {
    for (int64_t n = part * z.N / parts; n < (part + 1) * z.N / parts; ++n) {
      const T* const row = logits + n * z.C;
      const T s = log_sum[n] = log_sum_exp(row, z.C);  // (1)
      const int64_t k = target[n];
      if (k == z.ignore_index) {
        loss[n] = 0;
        continue;
      }
      T sum = y.own == 0 ? 0 : y.own * (class_weight ? class_weight[k] : 1) * (s - row[k]);  // (2), (3)
      if (class_weight && class_weight[k] == 0) sum = 0;
      if (y.everyone != 0)
        for (int64_t c = 0; c < z.C; ++c) {
          const T w = class_weight ? class_weight[c] : 1;
          if (w != 0) sum += y.everyone * w * (s - row[c]);
        }
      loss[n] = sum;
    }
  });
  return -1;
}

template <class T>
void cross_entropy_backward(const CrossEntropySizes& z, const T* dloss, const T* logits, const T* log_sum,
                            const int64_t* target, const T* class_weight, T* dlogits) {
  const Smoothed<T> y(z);
  T weights = static_cast<T>(z.C);
  if (class_weight) {
    weights = 0;
    for (int64_t c = 0; c < z.C; ++c) weights += class_weight[c];
  }
  const int64_t parts = useful_threads(z.threads, 20.0 * static_cast<double>(z.N * z.C));
  parallel_for(z.threads, parts, [&](int64_t part) {
    for (int64_t n = part * z.N / parts; n < (part + 1) * z.N / parts; ++n) {
      T* const d = dlogits + n * z.C;
      const int64_t k = target[n];
      if (k == z.ignore_index) {
        memset(d, 0, static_cast<size_t>(z.C) * sizeof(T));
        continue;
      }
      const T own = y.own * (class_weight ? class_weight[k] : 1);
      const T total = own + y.everyone * weights;  // |y|
      for (int64_t c = 0; c < z.C; c += Simd<T>::width) {
        const Vec<T> p = vexp(load(logits + n * z.C + c, z.C - c) - log_sum[n]);
        Vec<T> yc = Vec<T>{} + y.everyone;
        if (class_weight) yc *= load(class_weight + c, z.C - c);
        store(d + c, dloss[n] * (total * p - yc), z.C - c);  // (3), (1)
      }
      d[k] -= dloss[n] * own;
    }
  });
}

template int64_t cross_entropy_forward(const CrossEntropySizes&, const float*, const int64_t*, const float*, float*,
                                       float*);
template int64_t cross_entropy_forward(const CrossEntropySizes&, const double*, const int64_t*, const double*, double*,
                                       double*);
template void cross_entropy_backward(const CrossEntropySizes&, const float*, const float*, const float*, const int64_t*,
                                     const float*, float*);
template void cross_entropy_backward(const CrossEntropySizes&, const double*, const double*, const double*,
                                     const int64_t*, const double*, double*);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
