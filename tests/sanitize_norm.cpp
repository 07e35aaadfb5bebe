// The kernels of the normalisations and of the rotary positions: see sanitize.cpp.
#include "sanitize.h"

namespace {

using namespace sanitize;

struct NormCase {
  int64_t N, F;
  bool centred, residual, gain, bias, given;  // given: a gradient arrives at r itself
  double p;
};

template <class T>
Outputs norm_of(const Kernels<T>& kernels, const NormCase& c, int threads) {
  const auto given = [](Buffer<T>& buffer, bool wanted) -> T* { return wanted ? +buffer : nullptr; };
  const int64_t both = c.N * c.F;
  Random<T> x(both), s(c.residual ? both : 0), gain(c.F), bias(c.F), dr(c.given ? both : 0), dy(both);
  Buffer<int64_t> key(c.N, 0), t(c.N, 0);
  for (int64_t n = 0; n < c.N; ++n) key[n] = n / 3, t[n] = n % 3;
  const bool drops = c.residual && c.p > 0;
  const unrolled::Dropping dropping{drops ? c.p : 0, 12345, 2, drops ? +key : nullptr, drops ? +t : nullptr};
  Buffer<T> r(s.size()), y(both), mean(c.centred ? c.N : 0), scale(c.N);
  kernels.norm_forward({c.N, c.F, c.centred, 1e-2, dropping, x, given(s, c.residual), given(gain, c.gain),
                        given(bias, c.bias), given(r, c.residual), y, given(mean, c.centred), scale, threads});
  Buffer<T> dx(both), ds(drops ? both : 0), dgain(c.gain ? c.F : 0), dbias(c.bias ? c.F : 0);
  kernels.norm_backward({c.N, c.F, c.centred, dropping, given(dr, c.given), dy, c.residual ? +r : +x, given(mean, c.centred),
                         scale, given(gain, c.gain), dx, given(ds, drops), given(dgain, c.gain), given(dbias, c.bias),
                         threads});
  calls += 2;
  Outputs out;
  for (Buffer<T>* b : {&r, &y, &mean, &scale, &dx, &ds, &dgain, &dbias}) out.add(*b);
  return out;
}

template <class T>
Outputs rotary_of(const Kernels<T>& kernels, int64_t N, int64_t heads, int64_t F, int64_t more, int64_t far, int threads) {
  const int64_t columns = heads * F, W = columns + more;
  Random<T> x(N * W);
  Buffer<int64_t> t(N, 0);
  for (int64_t& each : t) each = static_cast<int64_t>(generator() % static_cast<uint64_t>(2 * far)) - far;
  Buffer<double> frequency(F / 2, 0.25);
  Buffer<T> y(N * W);
  kernels.rotary({N, W, heads, columns, frequency, x, t, y, threads});
  ++calls;
  Outputs out;
  out.add(y);
  return out;
}

}  // namespace

void sanitize::norm() {
  int flags = 0;
  for (const int64_t N : {0, 1, 7, 33, 1500})  // the last is work enough for several threads
    for (const int64_t F : {1, 2, 3, 7, 8, 15, 17, 31, 64, 67, 130, 200}) {
      if (N > 1000 && F != 67 && F != 64) continue;
      for (int i = 0; i < 5; ++i) {
        ++flags;
        const NormCase c{N, F, flags % 2 == 0, flags % 3 > 0, flags % 5 > 0, flags % 7 > 2, flags % 4 > 1, flags % 6 / 5.0};
        on_every_variant("norm", [&](const auto& kernels, int threads) { return norm_of(kernels, c, threads); });
      }
      const int64_t far = flags % 2 ? 3 : 1000000, heads = 1 + flags % 3, more = flags % 4;
      on_every_variant("rotary", [&](const auto& kernels, int threads) {
        return rotary_of(kernels, N, heads, F / 2 * 2, more, far, threads);
      });
    }
}
