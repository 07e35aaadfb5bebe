// The gated recurrent unit; the equations are in src/unrolled/equations/gru.py and gru_before.py.
#include "cells.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

// Reset after the product.
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

  static void backward(V dh, V&, const Point<T>& at, const V kept[4], V du[3], V dv[3], V& dh_prev, V&) {
    const V r = kept[0], z = kept[1], n = kept[2], v_n = kept[3];
    dh_prev = dh * z;                                 // (6)
    du[2] = dh * (1 - z) * (1 - n * n);               // (6), (5)
    dv[2] = du[2] * r;                                // (5)
    du[1] = dv[1] = dh * (at.h_prev - n) * z * (1 - z);  // (6), (4)
    du[0] = dv[0] = du[2] * v_n * r * (1 - r);        // (5), (3)
  }
};

// Reset before the product: r comes in the place of v_r, and du_r follows once the product's gradient is known.
template <class T>
struct GruBefore {
  using V = Vec<T>;
  static constexpr int kGates = 3, kKept = 3;
  static constexpr bool kMemory = false, kSplit = false, kDirect = true;

  static void forward(const V u[3], const V v[3], V h_prev, V, V& h, V&, V kept[3]) {
    const V z = vsigmoid(u[1] + v[1]);  // (2)
    const V n = vtanh(u[2] + v[2]);     // (3)
    h = n + z * (h_prev - n);           // (4)
    kept[0] = v[0], kept[1] = z, kept[2] = n;
  }

  static void backward(V dh, V&, const Point<T>& at, const V kept[3], V da[3], V*, V& dh_prev, V&) {
    const V z = kept[1], n = kept[2];
    dh_prev = dh * z;                          // (4)
    da[2] = dh * (1 - z) * (1 - n * n);        // (4), (3)
    da[1] = dh * (at.h_prev - n) * z * (1 - z);  // (4), (2)
    da[0] = V{};
  }
};

template <class T>
struct GruBeforeRow : Pointwise<T, GruBefore<T>> {
  using V = Vec<T>;
  static constexpr bool kReset = true;
  static V reset(V u, V v) { return vsigmoid(u + v); }             // (1)
  static V reset_backward(V dr, V r) { return dr * r * (1 - r); }  // (1)
};

}  // namespace

UNROLLED_CELL(Gru, gru)
UNROLLED_ROW_CELL(GruBeforeRow, gru_before)

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
