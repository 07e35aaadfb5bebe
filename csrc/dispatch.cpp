// The CPU variants that this build holds, best first.
#include "unrolled/core.h"

namespace unrolled {

#define UNROLLED_DECLARE(target)                  \
  namespace target {                              \
  extern const Kernels<float>* const float32;     \
  extern const Kernels<double>* const float64;    \
  }

UNROLLED_DECLARE(baseline)
#if defined(UNROLLED_X86)
UNROLLED_DECLARE(avx2)
UNROLLED_DECLARE(avx512)
#endif

const Variant* variants(int* count) {
  static const Variant all[] = {
#if defined(UNROLLED_X86)
      {"avx512",
       [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma");
       },
       avx512::float32, avx512::float64},
      {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }, avx2::float32,
       avx2::float64},
#endif
      {"baseline", [] { return true; }, baseline::float32, baseline::float64},
  };
  *count = sizeof all / sizeof *all;
  return all;
}

}  // namespace unrolled
