// The long short-term memory; the equations are in src/unrolled/equations/lstm.py.
#include "kernels.h"
#include "recurrence.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

template <class T>
struct Lstm {
  using V = Vec<T>;
  static constexpr int kGates = 4, kKept = 4;
  static constexpr bool kMemory = true, kSplit = false, kDirect = false;

  static void forward(const V u[4], const V v[4], V, V c_prev, V& h, V& c, V kept[4]) {
    const V i = vsigmoid(u[0] + v[0]);  // (3)
    const V f = vsigmoid(u[1] + v[1]);  // (4)
    const V g = vtanh(u[2] + v[2]);     // (5)
    const V o = vsigmoid(u[3] + v[3]);  // (6)
    c = f * c_prev + i * g;             // (7)
    h = o * vtanh(c);                   // (8)
    kept[0] = i, kept[1] = f, kept[2] = g, kept[3] = o;
  }

  static void backward(V dh, V dc, const Point<T>& at, const V kept[4], V da[4], V*, V&, V& dc_prev) {
    const V i = kept[0], f = kept[1], g = kept[2], o = kept[3], tanh_c = vtanh(at.c);
    dc += dh * o * (1 - tanh_c * tanh_c);  // (8)
    dc_prev = dc * f;                      // (7)
    da[3] = dh * tanh_c * o * (1 - o);     // (8), (6)
    da[2] = dc * i * (1 - g * g);          // (7), (5)
    da[1] = dc * at.c_prev * f * (1 - f);  // (7), (4)
    da[0] = dc * g * i * (1 - i);          // (7), (3)
  }
};

}  // namespace

UNROLLED_CELL(Lstm, lstm)

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
