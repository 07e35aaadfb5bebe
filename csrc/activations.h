// The activations on vectors, each with its derivative; the equations are in src/unrolled/equations/activations.py.
#pragma once

#include "simd.h"

namespace unrolled {
namespace UNROLLED_TARGET {

// Phi(x) of the standard normal distribution, and its density exp(-x^2 / 2) / sqrt(2 pi). Phi(-z) = exp(-z^2 / 2) q(z) for
// z >= 0; (1 + z) q(z) is a polynomial of (z - 4) / (z + 4) to 2e-9. So Phi is as exact in the lower tail as at 0.
inline F normal_distribution(F x, F& density) {
  const F absolute = (F)((I32)x & 0x7fffffff), z = absolute < 13 ? absolute : F{} + 13;
  const F high = (F)((I32)z & ~0xfff);  // its square is exact, so that the exponent is
  const F e = vexp(-0.5f * high * high), low = -0.5f * (z - high) * (z + high);
  const F gauss = absolute < 13 ? e + e * expm1_core(low) : F{};
  const F t = (z - 4) / (z + 4);
  F q = t * -7.06556675e-05f - 5.79509688e-05f;
  q = q * t + 6.94705988e-04f;
  q = q * t - 3.04423680e-04f;
  q = q * t - 5.00550447e-03f;
  q = q * t + 1.79400817e-02f;
  q = q * t - 3.21970843e-02f;
  q = q * t + 2.86000168e-02f;
  q = q * t + 1.39995869e-02f;
  q = q * t - 9.67034698e-02f;
  q = q * t + 4.72053200e-01f;
  const F tail = gauss * (q / (1 + z));
  density = gauss * 0.398942280f;
  return x != x ? x : x < 0 ? tail : 1 - tail;
}

inline D normal_distribution(D x, D& density) {
  D y;
  for (int i = 0; i < Simd<double>::width; ++i) {
    y[i] = 0.5 * __builtin_erfc(x[i] * -0.70710678118654752440);
    density[i] = 0.39894228040143267794 * __builtin_exp(-0.5 * x[i] * x[i]);
  }
  return y;
}

// sigma(x), and 1 - sigma(x) as exact.
inline F sigmoid(F x, F& rest) {
  const F e = vexp((F)((I32)x | (I32{} + INT32_MIN))), large = 1 / (1 + e), small = e / (1 + e);
  rest = x < 0 ? large : small;
  return x < 0 ? small : large;
}

inline D sigmoid(D x, D& rest) {
  rest = vsigmoid(-x);
  return vsigmoid(x);
}

struct Relu {
  template <class V>
  static V value(V x) {
    return x < 0 ? V{} : x;  // NaN stays
  }
  template <class V>
  static V value(V x, V& derivative) {
    derivative = x > 0 ? V{} + 1 : V{};
    return value(x);
  }
};

struct Gelu {
  template <class V>
  static V value(V x) {
    V density;
    return x * normal_distribution(x, density);
  }
  template <class V>
  static V value(V x, V& derivative) {
    V density;
    const V phi = normal_distribution(x, density);
    derivative = phi + x * density;
    return x * phi;
  }
};

// (1 + tanh(u)) / 2 is sigma(2 u).
struct GeluTanh {
  template <class T>
  static constexpr T kSlope = static_cast<T>(1.59576912160573071176);  // sqrt(8 / pi)
  template <class T>
  static constexpr T kCube = static_cast<T>(0.07135481627260025);  // 0.044715 times that
  template <class V>
  static V value(V x) {
    using T = decltype(x[0] + 0);
    return x * vsigmoid(x * (kSlope<T> + kCube<T> * x * x));
  }
  template <class V>
  static V value(V x, V& derivative) {
    using T = decltype(x[0] + 0);
    V rest;
    const V s = sigmoid(x * (kSlope<T> + kCube<T> * x * x), rest);
    derivative = s + x * s * rest * (kSlope<T> + 3 * kCube<T> * x * x);
    return x * s;
  }
};

struct Silu {
  template <class V>
  static V value(V x) {
    return x * vsigmoid(x);
  }
  template <class V>
  static V value(V x, V& derivative) {
    V rest;
    const V s = sigmoid(x, rest);
    derivative = s + x * s * rest;
    return x * s;
  }
};

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
