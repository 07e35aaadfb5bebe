// The plain recurrent network; the equations are in src/unrolled/equations/rnn.py.
#include "cells.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

template <class T, bool kRelu>
struct Rnn {
  using V = Vec<T>;
  static constexpr int kGates = 1, kKept = 0;
  static constexpr bool kMemory = false, kSplit = false, kDirect = false;

  static void forward(const V u[1], const V v[1], V, V, V& h, V&, V*) {
    const V a = u[0] + v[0];
    h = kRelu ? (a > 0 ? a : (a != a ? a : V{})) : vtanh(a);  // (3)
  }

  static void backward(V dh, V&, const Point<T>& at, const V*, V du[1], V*, V&, V&) {
    du[0] = kRelu ? (at.h > 0 ? dh : V{}) : dh * (1 - at.h * at.h);  // (3)
  }
};

template <class T>
using RnnTanh = Rnn<T, false>;
template <class T>
using RnnRelu = Rnn<T, true>;

}  // namespace

UNROLLED_CELL(RnnTanh, rnn_tanh)
UNROLLED_CELL(RnnRelu, rnn_relu)

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
