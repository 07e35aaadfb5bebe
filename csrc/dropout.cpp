// Dropout by a counter: Philox4x32-7, the same numbers as src/unrolled/equations/dropout.py.
#include "kernels.h"
#include "simd.h"
#include "unrolled/parallel.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

constexpr int kRounds = 7;
constexpr int kLanes = 16;  // counters at a time, so 64 units, sixteen to a word, as they lie in memory
constexpr int kWidth = UNROLLED_BYTES / 8;

typedef uint64_t U64 __attribute__((vector_size(UNROLLED_BYTES)));
typedef uint32_t U32 __attribute__((vector_size(UNROLLED_BYTES / 2)));

// The whole products of the lower halves of the lanes; compilers do not find this instruction by themselves.
inline U64 multiply_low(U64 a, uint64_t b) {
#if defined(__AVX512F__)
  return (U64)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(static_cast<long long>(b)));
#elif defined(__AVX2__)
  return (U64)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(static_cast<long long>(b)));
#elif defined(__SSE2__)
  return (U64)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(static_cast<long long>(b)));
#else
  return (a & 0xffffffff) * b;
#endif
}

// word[w][lane] for the counters (first + lane, t, key, layer). Of each 64-bit lane the lower half counts.
inline void philox(uint32_t first, uint32_t t, uint32_t key, uint32_t layer, uint64_t seed, uint32_t* word) {
  for (int lane = 0; lane < kLanes; lane += kWidth) {
    U64 c0, c1 = U64{} + t, c2 = U64{} + key, c3 = U64{} + layer;
    for (int i = 0; i < kWidth; ++i) c0[i] = first + static_cast<uint32_t>(lane + i);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    _Pragma("GCC unroll 7") for (int round = 0; round < kRounds; ++round) {
      const U64 p0 = multiply_low(c0, 0xD2511F53), p1 = multiply_low(c2, 0xCD9E8D57);
      c0 = (p1 >> 32) ^ c1 ^ k0;
      c1 = p1;
      c2 = (p0 >> 32) ^ c3 ^ k1;
      c3 = p0;
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    const U64 c[4] = {c0, c1, c2, c3};
    for (int w = 0; w < 4; ++w) {
      const U32 low = __builtin_convertvector(c[w], U32);
      memcpy(word + w * kLanes + lane, &low, sizeof low);
    }
  }
}

}  // namespace

template <class T>
void dropout_forward(const DropoutSizes& z, const T* x, const int64_t* key, const int64_t* t, T* y) {
  const double threshold = __builtin_nearbyint(z.p * 4294967296.0);
  const bool none = threshold >= 4294967296.0;  // no 32-bit number reaches it
  const auto limit = static_cast<uint32_t>(none ? 0 : threshold);
  const T scale = static_cast<T>(none ? 0 : 1 / (1 - z.p));
  const int64_t parts = useful_threads(z.threads, 30.0 * static_cast<double>(z.N * z.F));
  parallel_for(z.threads, parts, [&](int64_t part) {
    uint32_t word[4 * kLanes];
    for (int64_t n = part * z.N / parts; n < (part + 1) * z.N / parts; ++n)
      for (int64_t f0 = 0; f0 < z.F; f0 += 4 * kLanes) {
        philox(static_cast<uint32_t>(f0 / 4), static_cast<uint32_t>(t[n]), static_cast<uint32_t>(key[n]),
               static_cast<uint32_t>(z.layer), static_cast<uint64_t>(z.seed), word);
        const int64_t end = z.F - f0 < 4 * kLanes ? z.F - f0 : 4 * kLanes;
        const T* const from = x + n * z.F + f0;
        T* const to = y + n * z.F + f0;
        for (int64_t f = 0; f < end; ++f) to[f] = from[f] * (word[f] >= limit ? scale : 0);
      }
  });
}

template void dropout_forward(const DropoutSizes&, const float*, const int64_t*, const int64_t*, float*);
template void dropout_forward(const DropoutSizes&, const double*, const int64_t*, const int64_t*, double*);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
