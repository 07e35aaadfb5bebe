// Scaled dot-product attention: see sanitize.h.
#include <algorithm>

#include "sanitize.h"

namespace {

using namespace sanitize;

struct AttentionCase {
  std::vector<int64_t> queries, keys;
  int64_t A, F, G;
  int parts;  // arrays that q, k and v lie in
  bool causal, seen, added, slopes, weights, spaced;
  double p;
};

// Where sequences lie: end to end, or every other row of memory.
struct Lying {
  Buffer<int64_t> start, length;
  int64_t step, R = 0, longest = 0;
  Lying(const std::vector<int64_t>& lengths, bool spaced)
      : start(static_cast<int64_t>(lengths.size()), 0), length(start.size(), 0), step(spaced ? 2 : 1) {
    for (int64_t b = 0; b < start.size(); ++b) {
      start[b] = R, length[b] = lengths[static_cast<size_t>(b)];
      R += length[b] * step, longest = std::max<int64_t>(longest, length[b]);
    }
  }
  unrolled::Rows rows() { return {start, length, step}; }
};

template <class T>
Outputs attention_of(const Kernels<T>& kernels, const AttentionCase& c, int threads) {
  const bool one = c.parts == 1;
  Lying queries(c.queries, c.spaced), other(c.keys, c.spaced);
  Lying& keys = one ? queries : other;
  const int64_t B = queries.start.size(), N = queries.R, M = keys.R, AF = c.A * c.F, AG = c.A * c.G;
  const int64_t ld_q = one ? 3 * AF : AF, ld_k = one ? 3 * AF : c.parts == 2 ? 2 * AF : AF, ld_v = c.parts < 3 ? ld_k : AG;
  Random<T> q(N * ld_q), k(one ? 0 : M * ld_k), v(c.parts == 3 ? M * AG : 0), do_(N * AG), slopes(c.slopes ? c.A : 0, 0.1);
  const int64_t scores = c.A * queries.longest * keys.longest;
  Random<T> added(c.added ? scores : 0);
  Buffer<bool> seen(c.seen ? scores : 0, true);
  for (bool& x : seen) x = generator() % 3 > 0;
  Buffer<int64_t> key(N, 0), t(N, 0);
  for (int64_t n = 0; n < N; ++n) key[n] = 3 * n, t[n] = n + 1;
  const unrolled::AttentionSizes sizes{N, M, B, c.A, c.F, c.G, ld_q, ld_k, ld_v, c.causal, 0.5, threads};
  const T* const k_at = one ? q + AF : +k;
  const unrolled::AttentionInputs<T> in{
      sizes, queries.rows(), keys.rows(), q, k_at, c.parts == 3 ? +v : k_at + AF,
      {c.seen ? +seen : nullptr, c.added ? +added : nullptr,
       {0, queries.longest * keys.longest, keys.longest, 1}},
      c.slopes ? +slopes : nullptr, {c.p, 12345, 2, c.p > 0 ? +key : nullptr, c.p > 0 ? +t : nullptr}};
  const T untouched = c.spaced ? T(0) : std::numeric_limits<T>::quiet_NaN();  // rows of no sequence are the caller's
  Buffer<T> o(N * AG, untouched), log_sum(N * c.A, untouched), weights(c.weights ? B * scores : 0, 0);
  Buffer<T> dq(q.size(), untouched), dk(k.size(), untouched), dv(v.size(), untouched);
  kernels.attention_forward({in, o, log_sum, c.weights ? +weights : nullptr, queries.longest, keys.longest});
  T* const dk_at = one ? dq + AF : +dk;
  kernels.attention_backward({in, do_, o, log_sum, dq, dk_at, c.parts == 3 ? +dv : dk_at + AF});
  calls += 2;
  Outputs out;
  out.add(o), out.add(log_sum), out.add(weights), out.add(dq), out.add(dk), out.add(dv);
  return out;
}

}  // namespace

void sanitize::attention() {
  const std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> lengths = {
      {{}, {}}, {{0, 3}, {2, 0}}, {{1}, {1}}, {{5, 2, 7}, {3, 9, 7}}, {{49, 13}, {65, 200}}, {{97}, {300}}, {{1, 4}, {300, 17}}};
  int flags = 0;
  for (const auto& [queries, keys] : lengths)
    for (const int64_t F : {1, 3, 16, 17, 64, 67})
      for (const int parts : {1, 2, 3}) {
        const int i = ++flags;
        const AttentionCase c{queries,    parts == 1 ? queries : keys, 1 + i % 2,  F,          parts == 3 ? F + i % 2 : F,
                              parts,      i % 2 == 0,                  i % 5 == 1, i % 5 == 2, i % 3 == 1,
                              i % 4 == 1, i % 7 == 2,                  i % 4 * 0.1};
        on_every_variant("attention", [&](const auto& kernels, int threads) { return attention_of(kernels, c, threads); });
      }
  const AttentionCase cut{{790}, {600}, 1, 5, 5, 3, true, false, false, false, false, false, 0.1};  // one head, several threads
  on_every_variant("attention", [&](const auto& kernels, int threads) { return attention_of(kernels, cut, threads); });
}
