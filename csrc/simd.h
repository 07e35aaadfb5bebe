// Vectors of the target's width, by the compiler's vector types: one source for every instruction set.
// Kernel files include no header of the C++ library: its inline functions would be compiled for this target and linked for all.
#pragma once

#include <stdint.h>
#include <string.h>

#define UNROLL _Pragma("GCC unroll 8")

namespace unrolled {
namespace UNROLLED_TARGET {

template <class T>
struct Simd {
  static constexpr int width = UNROLLED_BYTES / sizeof(T);
  typedef T V __attribute__((vector_size(UNROLLED_BYTES)));
};

template <class T>
using Vec = typename Simd<T>::V;

template <class T>
inline Vec<T> load(const T* p) {
  Vec<T> v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
inline void store(T* p, Vec<T> v) {
  memcpy(p, &v, sizeof v);
}

// The first n lanes; the others read as 0 and are not written.
template <class T>
inline Vec<T> load(const T* p, int64_t n) {
  if (n >= Simd<T>::width) return load(p);
  Vec<T> v{};
  memcpy(&v, p, static_cast<size_t>(n) * sizeof(T));
  return v;
}

template <class T>
inline void store(T* p, Vec<T> v, int64_t n) {
  if (n >= Simd<T>::width) return store(p, v);
  memcpy(p, &v, static_cast<size_t>(n) * sizeof(T));
}

// Asks for n numbers from p on, which may lie outside every array.
template <class T>
inline void prefetch(const T* p, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(p + i);
}

// The first n lanes of v, 0 in the others.
template <class T>
inline Vec<T> first_lanes(Vec<T> v, int64_t n) {
  if (n >= Simd<T>::width) return v;
  for (int i = static_cast<int>(n); i < Simd<T>::width; ++i) v[i] = 0;
  return v;
}

// The lanes of v put together by an operation whose order does not matter, half with half.
template <class T, int bytes, class V, class Operation>
inline T reduced(V v, Operation operation) {
  if constexpr (bytes > 16) {
    typedef T Half __attribute__((vector_size(bytes / 2)));
    Half low, high;
    memcpy(&low, &v, sizeof low);
    memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
    return reduced<T, bytes / 2>(operation(low, high), operation);
  } else if constexpr (sizeof(T) == 4) {
    return operation(operation(v[0], v[2]), operation(v[1], v[3]));
  } else {
    return operation(v[0], v[1]);
  }
}

template <class T>
inline T total(Vec<T> v) {
  return reduced<T, UNROLLED_BYTES>(v, [](auto a, auto b) { return a + b; });
}

template <class T>
inline T largest(Vec<T> v) {
  return reduced<T, UNROLLED_BYTES>(v, [](auto a, auto b) { return a > b ? a : b; });
}

inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }

typedef Vec<float> F;
typedef int32_t I32 __attribute__((vector_size(UNROLLED_BYTES)));

// exp(r) - 1 on |r| <= log(2) / 2 by Taylor's series: the first term left out is below half a unit in the last place.
inline F expm1_core(F r) {
  F q = r * (1.0f / 5040) + (1.0f / 720);
  q = q * r + (1.0f / 120);
  q = q * r + (1.0f / 24);
  q = q * r + (1.0f / 6);
  q = q * r + 0.5f;
  return q * r * r + r;
}

constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;

inline F power_of_two(I32 n) { return (F)((n + 127) << 23); }

// tanh(x) = em / (em + 2), em = exp(2|x|) - 1: accurate near 0, where 1 - 2 / (exp(2x) + 1) is not. NaN stays NaN.
inline F vtanh(F x) {
  const I32 sign = (I32)x & (I32{} + INT32_MIN);
  const F z = 2 * (F)((I32)x & 0x7fffffff);
  const F small = z < 20 ? z : F{} + 20;  // NaN gives 20: the conversion below is defined
  const F kept = z > 20 ? F{} + 20 : z;   // NaN stays
  const I32 n = __builtin_convertvector(small * kLog2e + 0.5f, I32);
  const F whole = __builtin_convertvector(n, F);
  const F r = kept - whole * kLn2High - whole * kLn2Low;
  const F scale = power_of_two(n);
  const F em = scale * expm1_core(r) + (scale - 1);
  return (F)((I32)(em / (em + 2)) | sign);
}

// exp(x) for x <= 0 and a little above; below -87 it is 0, NaN stays NaN.
inline F vexp(F x) {
  const F small = x > -88 ? (x < 88 ? x : F{} + 88) : F{} - 88;
  const F kept = x > 88 ? F{} + 88 : (x < -88 ? F{} - 88 : x);
  const F scaled = small * kLog2e;
  const I32 n = __builtin_convertvector(scaled + (scaled < 0 ? F{} - 0.5f : F{} + 0.5f), I32);
  const F whole = __builtin_convertvector(n, F);
  const F r = kept - whole * kLn2High - whole * kLn2Low;
  const F scale = power_of_two(n);
  const F y = scale * expm1_core(r) + scale;
  return x < -87 ? F{} : (x > 88 ? F{} + __builtin_inff() : y);
}

// 1 / (1 + exp(-x)) = exp(-|x|) or 1, over 1 + exp(-|x|): no overflow at either end.
inline F vsigmoid(F x) {
  const F e = vexp((F)((I32)x | (I32{} + INT32_MIN)));
  return (x < 0 ? e : F{} + 1) / (1 + e);
}

typedef Vec<double> D;

inline D vtanh(D x) {
  for (int i = 0; i < Simd<double>::width; ++i) x[i] = __builtin_tanh(x[i]);
  return x;
}

inline D vexp(D x) {
  for (int i = 0; i < Simd<double>::width; ++i) x[i] = __builtin_exp(x[i]);
  return x;
}

inline D vsigmoid(D x) {
  for (int i = 0; i < Simd<double>::width; ++i) {
    const double e = __builtin_exp(x[i] < 0 ? x[i] : -x[i]);
    x[i] = (x[i] < 0 ? e : 1) / (1 + e);
  }
  return x;
}

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
