// The long short-term memory; the equations are in src/unrolled/equations/lstm.py.
#include "cells.h"

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

  static void backward(V dh, V& dc, const Point<T>& at, const V kept[4], V da[4], V*, V&, V& dc_prev) {
    const V i = kept[0], f = kept[1], g = kept[2], o = kept[3], tanh_c = vtanh(at.c);
    dc += dh * o * (1 - tanh_c * tanh_c);  // (8)
    dc_prev = dc * f;                      // (7)
    da[3] = dh * tanh_c * o * (1 - o);     // (8), (6)
    da[2] = dc * i * (1 - g * g);          // (7), (5)
    da[1] = dc * at.c_prev * f * (1 - f);  // (7), (4)
    da[0] = dc * g * i * (1 - i);          // (7), (3)
  }
};

// With peepholes and a normalised memory; the equations are in src/unrolled/equations/lstm_options.py.
template <class T>
struct LstmOptions {
  using V = Vec<T>;
  static constexpr int kGates = 4, kKept = 4, W = Simd<T>::width;
  static constexpr bool kMemory = true, kDirect = false, kReset = false;

  static void forward(const ForwardRow<T>& r) {
    const int64_t H = r.H, stride = padded<T>(H);
    const auto peep = [&](int k, int64_t unit, V c) { return r.peephole ? load(r.peephole + k * H + unit, H - unit) * c : V{}; };
    const auto a = [&](int gate, int64_t unit) { return load(r.u + gate * stride + unit) + load(r.v + gate * stride + unit); };
    V sum{}, squares{};
    for (int64_t unit = 0; unit < H; unit += W) {
      const int64_t left = H - unit;
      const V c_prev = load(r.c_prev + unit, left);
      const V i = vsigmoid(a(0, unit) + peep(0, unit, c_prev));  // (2)
      const V f = vsigmoid(a(1, unit) + peep(1, unit, c_prev));  // (3)
      const V g = vtanh(a(2, unit));                             // (4)
      const V c = f * c_prev + i * g;                            // (5)
      const V o = vsigmoid(a(3, unit) + peep(2, unit, c));       // (6)
      const V gates[4] = {i, f, g, o};
      UNROLL for (int k = 0; k < 4; ++k) store(r.kept + k * H + unit, gates[k], left);
      store(r.c + unit, c, left);
      sum += first_lanes<T>(c, left);
    }
    const T mean = total<T>(sum) / static_cast<T>(H);
    if (r.norm_c) {
      for (int64_t unit = 0; unit < H; unit += W) {
        const V centred = first_lanes<T>(load(r.c + unit, H - unit) - mean, H - unit);
        squares += centred * centred;
      }
      *r.scale_c = 1 / root(total<T>(squares) / static_cast<T>(H) + static_cast<T>(kEpsilon));
    }
    for (int64_t unit = 0; unit < H; unit += W) {
      const int64_t left = H - unit;
      V s = load(r.c + unit, left);
      if (r.norm_c) {  // (7)
        const V normal = (s - mean) * *r.scale_c;
        store(r.normal_c + unit, normal, left);
        s = scaled(r, normal, unit);
      }
      store(r.h + unit, load(r.kept + 3 * H + unit, left) * vtanh(s), left);  // (8)
    }
  }

  static void backward(const BackwardRow<T>& r) {
    const int64_t H = r.H, stride = padded<T>(H);
    const auto peep = [&](int k, int64_t unit) { return r.peephole ? load(r.peephole + k * H + unit, H - unit) : V{}; };
    const auto gate = [&](int k, int64_t unit) { return load(r.kept + k * H + unit, H - unit); };
    V sum{}, slopes{};
    for (int64_t unit = 0; unit < H; unit += W) {
      const int64_t left = H - unit;
      const V dh = load(r.dh + unit), o = gate(3, unit), c = load(r.c + unit, left);
      const V normal = r.norm_c ? load(r.normal_c + unit, left) : V{};
      const V tanh_s = vtanh(r.norm_c ? scaled(r, normal, unit) : c);
      const V da_o = dh * tanh_s * o * (1 - o);         // (8), (6)
      V ds = dh * o * (1 - tanh_s * tanh_s);            // (8)
      store(r.du + 3 * stride + unit, da_o);
      if (r.norm_c) {  // (7)
        store(r.dnorm_c + unit, load(r.dnorm_c + unit) + ds * normal);
        store(r.dbias_c + unit, load(r.dbias_c + unit) + ds);
        ds *= load(r.norm_c + unit, left);
        sum += ds;
        slopes += ds * normal;
      }
      store(r.dv + unit, ds);  // until the gates take its place
    }
    const T mean = total<T>(sum) / static_cast<T>(H), slope = total<T>(slopes) / static_cast<T>(H);
    for (int64_t unit = 0; unit < H; unit += W) {
      const int64_t left = H - unit;
      const V i = gate(0, unit), f = gate(1, unit), g = gate(2, unit), c_prev = load(r.c_prev + unit, left);
      V ds = load(r.dv + unit);
      const V da_o = load(r.du + 3 * stride + unit);
      if (r.norm_c) ds = *r.scale_c * (ds - mean - load(r.normal_c + unit, left) * slope);  // (7)
      const V dc = load(r.dc + unit) + first_lanes<T>(ds, left) + da_o * peep(2, unit);      // (7), (6)
      const V da_g = dc * i * (1 - g * g);                                                   // (5), (4)
      const V da_f = dc * c_prev * f * (1 - f);                                              // (5), (3)
      const V da_i = dc * g * i * (1 - i);                                                   // (5), (2)
      store(r.dc + unit, dc);
      store(r.dc_prev + unit, dc * f + da_i * peep(0, unit) + da_f * peep(1, unit));         // (5), (2), (3)
      const V da[4] = {da_i, da_f, da_g, da_o};
      UNROLL for (int k = 0; k < 4; ++k) store(r.du + k * stride + unit, da[k]), store(r.dv + k * stride + unit, da[k]);
      if (!r.peephole) continue;
      const V dpeephole[3] = {da_i * c_prev, da_f * c_prev, da_o * load(r.c + unit, left)};  // (2), (3), (6)
      UNROLL for (int k = 0; k < 3; ++k) {
        T* const to = r.dpeephole + k * stride + unit;
        store(to, load(to) + dpeephole[k]);
      }
    }
  }

  template <class R>
  static V scaled(const R& r, V normal, int64_t unit) {
    const int64_t left = r.H - unit;
    const V s = normal * load(r.norm_c + unit, left);
    return r.bias_c ? s + load(r.bias_c + unit, left) : s;
  }
};

}  // namespace

UNROLLED_CELL(Lstm, lstm)
UNROLLED_ROW_CELL(LstmOptions, lstm_options)

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
