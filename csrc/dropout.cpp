// Dropout by a counter: Philox4x32-7, the same numbers as src/unrolled/equations/dropout.py.
#include "kernels.h"
#include "simd.h"
#include "unrolled/parallel.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

constexpr int kRounds = 7;
constexpr int kLanes = 16;  // counters at a time: a loop the compiler turns into vectors

// word[w][lane] for the counters (block + lane, t, key, layer): four units to a counter.
void philox(uint32_t block, uint32_t t, uint32_t key, uint32_t layer, uint64_t seed, uint32_t word[4][kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    word[0][i] = block + static_cast<uint32_t>(i);
    word[1][i] = t;
    word[2][i] = key;
    word[3][i] = layer;
  }
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t p0 = uint64_t{0xD2511F53} * word[0][i], p1 = uint64_t{0xCD9E8D57} * word[2][i];
      word[0][i] = static_cast<uint32_t>(p1 >> 32) ^ word[1][i] ^ k0;
      word[1][i] = static_cast<uint32_t>(p1);
      word[2][i] = static_cast<uint32_t>(p0 >> 32) ^ word[3][i] ^ k1;
      word[3][i] = static_cast<uint32_t>(p0);
    }
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
}

}  // namespace

template <class T>
void dropout_forward(const DropoutSizes& z, const T* x, const int64_t* key, const int64_t* t, T* y) {
  const auto threshold = static_cast<uint64_t>(__builtin_nearbyint(z.p * 4294967296.0));
  const T scale = static_cast<T>(1 / (z.p < 1 ? 1 - z.p : 1));
  const int64_t parts = useful_threads(z.threads, 30.0 * static_cast<double>(z.N * z.F));
  parallel_for(z.threads, parts, [&](int64_t part) {
    uint32_t word[4][kLanes];
    for (int64_t n = part * z.N / parts; n < (part + 1) * z.N / parts; ++n)
      for (int64_t f0 = 0; f0 < z.F; f0 += 4 * kLanes) {
        philox(static_cast<uint32_t>(f0 / 4), static_cast<uint32_t>(t[n]), static_cast<uint32_t>(key[n]),
               static_cast<uint32_t>(z.layer), static_cast<uint64_t>(z.seed), word);
        const int64_t end = z.F - f0 < 4 * kLanes ? z.F - f0 : 4 * kLanes;
        for (int64_t f = 0; f < end; ++f) {
          const T m = word[f % 4][f / 4] >= threshold ? scale : 0;
          y[n * z.F + f0 + f] = x[n * z.F + f0 + f] * m;
        }
      }
  });
}

template void dropout_forward(const DropoutSizes&, const float*, const int64_t*, const int64_t*, float*);
template void dropout_forward(const DropoutSizes&, const double*, const int64_t*, const int64_t*, double*);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
