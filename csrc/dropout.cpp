// Dropout by a counter; the equation is in src/unrolled/equations/dropout.py.
#include "kernels.h"
#include "philox.h"
#include "unrolled/parallel.h"

namespace unrolled {
namespace UNROLLED_TARGET {

template <class T>
void dropout_forward(const DropoutSizes& z, const T* x, const int64_t* key, const int64_t* t, T* y) {
  const Keeping<T> keeping(z.p);
  const int64_t parts = useful_threads(z.threads, 30.0 * static_cast<double>(z.N * z.F));
  parallel_for(z.threads, parts, [&](int64_t part) {
    const uint32_t least = keeping.least;  // of this thread's own: no store can change it, so the loop becomes vectors
    const T factor = keeping.factor;
    for (int64_t n = part * z.N / parts; n < (part + 1) * z.N / parts; ++n)
      random_units(z.F, t[n], key[n], z.layer, z.seed, [&](int64_t first, int64_t count, const uint32_t* word) {
        const T* const from = x + n * z.F + first;
        T* const to = y + n * z.F + first;
        for (int64_t f = 0; f < count; ++f) to[f] = from[f] * (word[f] >= least ? factor : 0);
      });
  });
}

template void dropout_forward(const DropoutSizes&, const float*, const int64_t*, const int64_t*, float*);
template void dropout_forward(const DropoutSizes&, const double*, const int64_t*, const int64_t*, double*);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
