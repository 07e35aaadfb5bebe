// The output projection with its loss, and additive attention.
#include "sanitize.h"

namespace {

using namespace sanitize;

struct LossCase {
  int64_t N, D, V;
  bool bias, weights, mean, need_dx, need_dweight, ignored;
  double smoothing;
};

template <class T>
Outputs linear_cross_entropy(const Kernels<T>& kernels, const LossCase& c, int threads) {
  Random<T> x(c.N * c.D), weight(c.V * c.D, 1 / std::sqrt(c.D)), bias(c.V), class_weight(c.V);
  for (T& w : class_weight) w = std::abs(w);
  Buffer<int64_t> target(c.N, 0);
  for (int64_t& k : target) k = static_cast<int64_t>(generator() % static_cast<uint64_t>(c.V));
  for (int64_t n = 0; n < c.N; ++n)
    if (c.ignored || n % 3 == 1) target[n] = -100;
  Buffer<T> loss(1), dx(c.need_dx ? c.N * c.D : 0), dweight(c.need_dweight ? c.V * c.D : 0),
      dbias(c.need_dweight && c.bias ? c.V : 0);
  const unrolled::LinearCrossEntropy<T> p{c.N, c.D, c.V, -100, c.smoothing, c.mean, threads, x, weight,
                                          c.bias ? +bias : nullptr, target, c.weights ? +class_weight : nullptr, loss,
                                          c.need_dx ? +dx : nullptr, c.need_dweight ? +dweight : nullptr,
                                          dbias.size() ? +dbias : nullptr};
  demand(kernels.linear_cross_entropy(p) == -1, "a class was refused");
  ++calls;
  Outputs out;
  out.add(loss), out.add(dx), out.add(dweight), out.add(dbias);
  for (const int64_t wrong : {c.V, int64_t{-1}, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    if (c.N == 0) break;
    target[c.N / 2] = wrong;
    demand(kernels.linear_cross_entropy(p) == c.N / 2, "no class, and not found");
    ++calls;
  }
  return out;
}

using Steps = std::vector<std::pair<int64_t, int64_t>>;  // queries and keys of each sequence

struct ReadCase {
  int64_t H, D;
  Steps steps;
  bool padded, mask, weights;
};

// Where the sequences lie, padded with one row more than the longest or without a gap.
struct Places {
  Buffer<int64_t> start, length;
  int64_t rows = 0, longest = 0;
  Places(const Steps& steps, int64_t Steps::value_type::* which, bool padded)
      : start(static_cast<int64_t>(steps.size()), 0), length(static_cast<int64_t>(steps.size()), 0) {
    for (const auto& pair : steps) longest = std::max(longest, pair.*which);
    for (int64_t b = 0; b < length.size(); ++b) {
      length[b] = steps[static_cast<size_t>(b)].*which;
      start[b] = rows;
      rows += padded ? longest + 1 : length[b];
    }
  }
  unrolled::Rows where() { return {start, length, 1}; }
};

template <class T>
Outputs additive_attention(const Kernels<T>& kernels, const ReadCase& c, int threads) {
  Places queries(c.steps, &Steps::value_type::first, c.padded), keys(c.steps, &Steps::value_type::second, c.padded);
  const int64_t N = queries.rows, M = keys.rows, H = c.H, D = c.D, B = static_cast<int64_t>(c.steps.size());
  Random<T> q(N * H), k(M * H), value(M * D), v(H, 1 / std::sqrt(H)), mask(c.mask ? queries.longest * keys.longest : 0),
      d_o(N * D);
  for (T& m : mask) m = m < -1 ? -std::numeric_limits<T>::infinity() : m;
  const T untouched = c.padded ? T(0) : std::numeric_limits<T>::quiet_NaN();
  Buffer<T> o(N * D, untouched), log_sum(N, untouched), weights(c.weights ? B * queries.longest * keys.longest : 0, 0),
      dq(N * H, untouched), dk(M * H, untouched), dvalue(M * D, untouched), dv(H);
  const unrolled::AdditiveAttentionSizes sizes{N, M, B, H, D, threads};
  const unrolled::AdditiveMask<T> added{c.mask ? +mask : nullptr, 0, keys.longest, 1};
  kernels.additive_attention_forward({sizes, queries.where(), keys.where(), q, k, value, v, added, o, log_sum,
                                      queries.longest, keys.longest, c.weights ? +weights : nullptr});
  kernels.additive_attention_backward({sizes, queries.where(), keys.where(), d_o, q, k, value, v, added, o, log_sum, dq, dk,
                                       dvalue, dv});
  calls += 2;
  Outputs out;
  for (Buffer<T>* b : {&o, &log_sum, &weights, &dq, &dk, &dvalue, &dv}) out.add(*b);
  return out;
}

}  // namespace

void sanitize::output() {
  const std::vector<int64_t> sizes = {1, 2, 3, 7, 8, 15, 17, 33, 64, 67};
  int flags = 0;
  const auto losses = [&](int64_t N, int64_t D, int64_t V) {
    ++flags;
    const LossCase c{N, D, V, flags % 2 == 0, flags % 3 == 0, flags % 5 > 0, flags % 4 > 0, flags % 7 > 1, flags % 11 == 0,
                     flags % 3 / 2.0};
    on_every_variant("linear_cross_entropy", [&](const auto& kernels, int threads) {
      return linear_cross_entropy(kernels, c, threads);
    });
  };
  for (const int64_t N : {0, 1, 7, 70})
    for (const int64_t D : sizes)
      for (int i = 0; i < 3; ++i) losses(N, D, sizes[static_cast<size_t>(++flags) % sizes.size()]);
  for (int i = 0; i < 3; ++i) losses(1100, 19, 301), losses(150, 3, 66000);

  const std::vector<Steps> steps = {{}, {{0, 0}}, {{1, 1}}, {{3, 5}, {2, 0}, {0, 4}, {1, 33}}, {{40, 17}, {1, 2}}};
  const auto reads = [&](int64_t H, int64_t D, const Steps& each) {
    ++flags;
    const ReadCase c{H, D, each, flags % 2 == 0, flags % 3 == 0, flags % 5 < 3};
    on_every_variant("additive_attention", [&](const auto& kernels, int threads) {
      return additive_attention(kernels, c, threads);
    });
  };
  for (const int64_t H : sizes)
    for (const auto& each : steps) reads(H, sizes[static_cast<size_t>(++flags) % sizes.size()], each);
  for (int i = 0; i < 6; ++i) {
    reads(35, 19, {{90, 301}});
    reads(16, 33, {{7, 120}, {0, 5}, {61, 3}, {2, 0}, {7, 120}, {0, 5}, {61, 3}, {2, 0}, {1, 700}});
  }
}
