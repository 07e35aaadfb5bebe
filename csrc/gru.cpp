// The gated recurrent unit, reset after the product; the equations are in src/unrolled/equations/gru.py.
#include "kernels.h"
#include "recurrence.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

template <class T>
struct Gru {
  using V = Vec<T>;
  static constexpr int kGates = 3, kKept = 4;
  static constexpr bool kMemory = false, kSplit = true, kDirect = true;

  static void forward(const V u[3], const V v[3], V h_prev, V, V& h, V&, V kept[4]) {
    const V r = vsigmoid(u[0] + v[0]);     // (3)
    const V z = vsigmoid(u[1] + v[1]);     // (4)
    const V n = vtanh(u[2] + r * v[2]);    // (5)
    h = n + z * (h_prev - n);              // (6)
    kept[0] = r, kept[1] = z, kept[2] = n, kept[3] = v[2];
  }

  static void backward(V dh, V, const Point<T>& at, const V kept[4], V du[3], V dv[3], V& dh_prev, V&) {
    const V r = kept[0], z = kept[1], n = kept[2], v_n = kept[3];
    dh_prev = dh * z;                                 // (6)
    du[2] = dh * (1 - z) * (1 - n * n);               // (6), (5)
    dv[2] = du[2] * r;                                // (5)
    du[1] = dv[1] = dh * (at.h_prev - n) * z * (1 - z);  // (6), (4)
    du[0] = dv[0] = du[2] * v_n * r * (1 - r);        // (5), (3)
  }
};

}  // namespace

UNROLLED_CELL(Gru, gru)

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
