#include "sanitize.h"

namespace sanitize {
namespace {

using unrolled::Activation;
constexpr Activation kActivations[] = {Activation::relu, Activation::gelu, Activation::gelu_tanh, Activation::silu};

struct Case {
  int64_t N, D, F;
  Activation activation;
  bool gated, bias, keep, need_dx;
  double p;
};

template <class T>
Outputs layer(const Kernels<T>& kernels, const Case& c, int threads) {
  const int64_t gate_size = c.gated ? c.F * c.D : 0, gate_units = c.gated ? c.F : 0;
  Random<T> x(c.N * c.D), weight1(c.F * c.D, 0.3), bias1(c.F), weight2(c.D * c.F, 0.3), bias2(c.D), weight_gate(gate_size, 0.3),
      bias_gate(gate_units), dy(c.N * c.D);
  // relu: far from its kink, on which side rounding may fall
  if (c.activation == Activation::relu)
    for (auto* values : {&x, &weight1, &bias1, &weight_gate, &bias_gate})
      for (T& v : *values) v = std::round(v * 64) / 64;
  Buffer<int64_t> key(c.p > 0 ? c.N : 0, 0), t(c.p > 0 ? c.N : 0, 0);
  for (int64_t& k : key) k = static_cast<int64_t>(generator());
  for (int64_t& step : t) step = static_cast<int64_t>(generator());
  const unrolled::FeedForwardSizes sizes{c.N, c.D, c.F, c.activation, threads};
  const unrolled::Dropping dropping =
      c.p > 0 ? unrolled::Dropping{c.p, 12345, 3, +key, +t} : unrolled::Dropping{0, 0, 0, nullptr, nullptr};
  Buffer<T> y(c.N * c.D), a(c.keep ? c.N * c.F : 0), gate(c.keep && c.gated ? c.N * c.F : 0);
  kernels.feed_forward_forward({sizes, dropping, x, weight1, c.bias ? +bias1 : nullptr, weight2, c.bias ? +bias2 : nullptr,
                                c.gated ? +weight_gate : nullptr, c.gated && c.bias ? +bias_gate : nullptr, y,
                                c.keep ? +a : nullptr, c.keep && c.gated ? +gate : nullptr});
  ++calls;
  Outputs out;
  out.add(y), out.add(a), out.add(gate);
  if (!c.keep) return out;
  Buffer<T> dx(c.need_dx ? c.N * c.D : 0), dweight1(c.F * c.D), dbias1(c.F), dweight2(c.D * c.F), dbias2(c.D),
      dweight_gate(gate_size), dbias_gate(gate_units);
  kernels.feed_forward_backward({sizes, dropping, dy, x, a, c.gated ? +gate : nullptr, weight1, weight2,
                                 c.gated ? +weight_gate : nullptr, c.need_dx ? +dx : nullptr, dweight1, dbias1, dweight2, dbias2,
                                 c.gated ? +dweight_gate : nullptr, c.gated ? +dbias_gate : nullptr});
  ++calls;
  for (Buffer<T>* b : {&dx, &dweight1, &dbias1, &dweight2, &dbias2, &dweight_gate, &dbias_gate}) out.add(*b);
  return out;
}

template <class T>
Outputs activation(const Kernels<T>& kernels, Activation kind, int64_t n, int threads) {
  Random<T> x(n, 3), dy(n);
  const T edges[] = {0, 1e-30, -1e-30, 12.9, -13.1, 40, -90, 1e6, -1e6};
  for (int64_t i = 0; i < n && i < 9; ++i) x[i] = edges[i];
  Buffer<T> y(n), dx(n);
  kernels.activation_forward(kind, n, x, threads, y);
  kernels.activation_backward(kind, n, dy, x, threads, dx);
  calls += 2;
  Outputs out;
  out.add(y), out.add(dx);
  return out;
}

}  // namespace

void feed_forward() {
  const std::vector<int64_t> sizes = {1, 2, 3, 5, 8, 15, 17, 31, 33, 64, 67, 130};
  int flags = 0;
  for (const int64_t N : {0, 1, 7, 37, 1100})  // the last is more than two blocks of tokens
    for (const int64_t F : sizes) {
      if (N > 1000 && F != 67 && F != 3) continue;
      const int64_t D = sizes[static_cast<size_t>(++flags) % sizes.size()];
      const auto bit = [&](int k) { return (flags * 37 >> k & 1) != 0; };
      const Case c{N, D, F, kActivations[flags % 4], bit(0), bit(1), !bit(2) || bit(3), bit(4), flags % 3 / 2.0};
      on_every_variant("feed_forward", [&](const auto& kernels, int threads) { return layer(kernels, c, threads); });
      on_every_variant("activation", [&](const auto& kernels, int threads) {
        return activation(kernels, kActivations[flags % 4], N * F, threads);
      });
    }
  for (const bool gated : {false, true})  // more units than are computed at a time
    for (const int64_t N : {19, 53})  // few rows go another way
      on_every_variant("feed_forward", [&](const auto& kernels, int threads) {
        return layer(kernels, {N, 21, 1030, Activation::gelu, gated, true, true, true, 0.2}, threads);
      });
}

}  // namespace sanitize
