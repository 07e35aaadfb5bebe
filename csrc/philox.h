// Random numbers by a counter: Philox4x32-7, the same as src/unrolled/equations/dropout.py.
#pragma once

#include "simd.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace unrolled {
namespace UNROLLED_TARGET {

constexpr int kRounds = 7;
constexpr int kLanes = 16;  // counters at a time, so 64 units, sixteen to a word, as they lie in memory
constexpr int kWidth = UNROLLED_BYTES / 8;

typedef uint64_t U64 __attribute__((vector_size(UNROLLED_BYTES)));
typedef uint32_t U32 __attribute__((vector_size(UNROLLED_BYTES / 2)));

// The whole products of the lower halves of the lanes; compilers do not find this instruction by themselves.
inline U64 multiply_low(U64 a, uint64_t b) {
#if defined(__AVX512F__)
  return (U64)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(static_cast<long long>(b)));  // no lane undefined
#elif defined(__AVX2__)
  return (U64)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(static_cast<long long>(b)));
#elif defined(__SSE2__)
  return (U64)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(static_cast<long long>(b)));
#else
  return (a & 0xffffffff) * b;
#endif
}

// word[w][lane] for the counters (first + lane, t, key, layer). Of each 64-bit lane the lower half counts.
// All lanes go through a round together: each multiplication waits for the one of the round before.
inline void philox(uint32_t first, uint32_t t, uint32_t key, uint32_t layer, uint64_t seed, uint32_t* word) {
  constexpr int kVectors = kLanes / kWidth;
  U64 c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors], own{};
  for (int i = 0; i < kWidth; ++i) own[i] = static_cast<uint64_t>(i);
  UNROLL for (int v = 0; v < kVectors; ++v) {
    c0[v] = (own + (static_cast<uint64_t>(first) + static_cast<uint64_t>(v * kWidth))) & 0xffffffff;
    c1[v] = U64{} + t, c2[v] = U64{} + key, c3[v] = U64{} + layer;
  }
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  _Pragma("GCC unroll 7") for (int round = 0; round < kRounds; ++round) {
    UNROLL for (int v = 0; v < kVectors; ++v) {
      const U64 p0 = multiply_low(c0[v], 0xD2511F53), p1 = multiply_low(c2[v], 0xCD9E8D57);
      c0[v] = (p1 >> 32) ^ c1[v] ^ k0;
      c1[v] = p1;
      c2[v] = (p0 >> 32) ^ c3[v] ^ k1;
      c3[v] = p0;
    }
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  UNROLL for (int v = 0; v < kVectors; ++v) {
    const U64 c[4] = {c0[v], c1[v], c2[v], c3[v]};
    for (int w = 0; w < 4; ++w) {
      const U32 low = __builtin_convertvector(c[w], U32);
      memcpy(word + w * kLanes + v * kWidth, &low, sizeof low);
    }
  }
}

// f(first unit, count, words) for blocks of 64 units: a 32-bit number for each.
template <class F>
inline void random_units(int64_t units, int64_t t, int64_t key, int64_t layer, int64_t seed, F&& f) {
  uint32_t word[4 * kLanes];
  for (int64_t u = 0; u < units; u += 4 * kLanes) {
    philox(static_cast<uint32_t>(u / 4), static_cast<uint32_t>(t), static_cast<uint32_t>(key),
           static_cast<uint32_t>(layer), static_cast<uint64_t>(seed), word);
    f(u, units - u < 4 * kLanes ? units - u : 4 * kLanes, word);
  }
}

// A number below it has probability p; above 32 bits all are.
inline uint64_t threshold_of(double p) { return static_cast<uint64_t>(__builtin_nearbyint(p * 4294967296.0)); }

// What a dropout of probability p keeps: the units whose number is at least `least`, multiplied by `factor`.
template <class T>
struct Keeping {
  uint32_t least;
  T factor;
  explicit Keeping(double p) {
    const uint64_t threshold = threshold_of(p);
    least = static_cast<uint32_t>(threshold);
    factor = static_cast<T>(threshold >> 32 ? 0 : 1 / (1 - p));  // no 32-bit number reaches 2^32
  }
};

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
