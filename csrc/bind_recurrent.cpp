// The border to Python of the recurrent kernels: checks shapes, releases the lock, calls.
#include "bind.h"

namespace {

struct CellOf {
  unrolled::Cell cell;
  int64_t gates, kept;
  bool memory;
};

CellOf cell_of(const std::string& name) {
  if (name == "rnn_tanh") return {unrolled::Cell::rnn_tanh, 1, 0, false};
  if (name == "rnn_relu") return {unrolled::Cell::rnn_relu, 1, 0, false};
  if (name == "lstm") return {unrolled::Cell::lstm, 4, 4, true};
  if (name == "lstm_options") return {unrolled::Cell::lstm_options, 4, 4, true};
  if (name == "gru") return {unrolled::Cell::gru, 3, 4, false};
  if (name == "gru_before") return {unrolled::Cell::gru_before, 3, 3, false};
  throw nb::value_error(("no cell is called " + name).c_str());
}

// The options, checked against the sizes; sets how many blocks are kept for each row.
template <class T>
unrolled::RecurrentOptions<T> options_of(const CellOf& cell, unrolled::RecurrentSizes& z, const OptionalInput<T, 2>& weight_hr,
                                         const OptionalInput<T, 1>& norm_ih, const OptionalInput<T, 1>& norm_hh,
                                         const OptionalInput<T, 1>& peephole, const OptionalInput<T, 1>& norm_c,
                                         const OptionalInput<T, 1>& bias_c, const OptionalInput<T, 3>& mask,
                                         const OptionalInput<int64_t, 0>& seed, const OptionalInput<int64_t, 1>& keys,
                                         double zoneout_h, double zoneout_c, int64_t layer) {
  const int64_t DH = z.D * z.H, GH = DH * cell.gates;
  unrolled::RecurrentOptions<T> o;
  o.weight_hr = shaped(weight_hr, {z.D * z.P, z.H}, false, "weight_hr must be (D * P, H)");
  check(!weight_hr || cell.cell != unrolled::Cell::gru && cell.cell != unrolled::Cell::gru_before, "weight_hr must be None for a GRU");
  o.norm_ih = shaped(norm_ih, {GH}, norm_hh.has_value(), "norm_ih must be (D * G * H,), with norm_hh");
  o.norm_hh = shaped(norm_hh, {GH}, norm_ih.has_value(), "norm_hh must be (D * G * H,), with norm_ih");
  const bool general = cell.cell == unrolled::Cell::lstm_options;
  check(general || (!peephole && !norm_c && !bias_c), "peephole, norm_c and bias_c must be None for this cell");
  check(!norm_c || norm_ih, "norm_c must be None without norm_ih");
  check(!bias_c || norm_c, "bias_c must be None without norm_c");
  o.peephole = shaped(peephole, {3 * DH}, false, "peephole must be (D * 3 * H,)");
  o.norm_c = shaped(norm_c, {DH}, false, "norm_c must be (D * H,)");
  o.bias_c = shaped(bias_c, {DH}, false, "bias_c must be (D * H,)");
  o.mask = shaped(mask, {z.D, z.B, z.P}, false, "mask must be (D, B, P)");
  o.zoneout_h = zoneout_h, o.zoneout_c = zoneout_c;
  check(zoneout_h >= 0 && zoneout_h <= 1 && zoneout_c >= 0 && zoneout_c <= 1, "zoneout must have rates in [0, 1]");
  o.seed = seed ? seed->data() : nullptr;
  o.keys = shaped(keys, {z.B}, seed.has_value() && (zoneout_h > 0 || zoneout_c > 0), "keys must be (B,)");
  o.layer = layer;
  const bool row_cell = general || cell.cell == unrolled::Cell::gru_before;
  z.plain = !row_cell && !weight_hr && !norm_ih && !mask && zoneout_h == 0 && zoneout_c == 0;
  z.blocks = cell.kept;
  if (!z.plain) z.blocks += 1 + cell.memory + (norm_ih ? 2 * cell.gates : 0) + (norm_c ? 1 : 0);
  check(z.bptt >= 0, "bptt must be at least 0");
  return o;
}

template <class T>
void recurrent_forward(const std::string& name, Input<T, 2> x, Input<T, 3> h0, OptionalInput<T, 3> c0, Input<T, 2> weight_ih,
                       Input<T, 2> weight_hh, OptionalInput<T, 1> bias_ih, OptionalInput<T, 1> bias_hh,
                       OptionalInput<T, 2> weight_hr, OptionalInput<T, 1> norm_ih, OptionalInput<T, 1> norm_hh,
                       OptionalInput<T, 1> peephole, OptionalInput<T, 1> norm_c, OptionalInput<T, 1> bias_c,
                       OptionalInput<T, 3> mask, OptionalInput<int64_t, 0> seed, OptionalInput<int64_t, 1> keys,
                       Input<int64_t, 1> start, Input<int64_t, 1> length, Array<T, 2> y, Array<T, 3> h_last,
                       std::optional<Array<T, 3>> c_last, std::optional<Array<T, 2>> h_prev,
                       std::optional<Array<T, 2>> c_prev, std::optional<Array<T, 2>> kept, std::optional<Array<T, 2>> scales,
                       double zoneout_h, double zoneout_c, int64_t layer, int64_t bptt, int64_t step, int threads) {
  const CellOf cell = cell_of(name);
  unrolled::RecurrentForward<T> p;
  const int64_t P = size(h0, 2), H = weight_hr ? size(*weight_hr, 1) : P;
  p.sizes = {size(x, 0), size(h0, 1), size(h0, 0), size(x, 1), H, P, 0, false, bptt, threads};
  auto& z = p.sizes;
  const int64_t DH = z.D * H, DP = z.D * P, GH = DH * cell.gates;
  check(z.D == 1 || z.D == 2, "h0 must have one or two directions");
  check(size(weight_ih, 0) == GH && size(weight_ih, 1) == z.I, "weight_ih must be (D * G * H, I)");
  check(size(weight_hh, 0) == GH && size(weight_hh, 1) == P, "weight_hh must be (D * G * H, P)");
  p.options = options_of<T>(cell, z, weight_hr, norm_ih, norm_hh, peephole, norm_c, bias_c, mask, seed, keys, zoneout_h,
                            zoneout_c, layer);
  check(size(y, 0) == z.R && size(y, 1) == DP, "y must be (R, D * P)");
  check(size(h_last, 0) == z.D && size(h_last, 1) == z.B && size(h_last, 2) == P, "h_last must be (D, B, P)");
  int64_t tokens;
  p.rows = rows_of(start, length, step, z.R, z.B, tokens);
  p.x = x.data(), p.h0 = h0.data(), p.weight_ih = weight_ih.data(), p.weight_hh = weight_hh.data();
  p.bias_ih = pointer(bias_ih, GH, "bias_ih must be (D * G * H,)");
  p.bias_hh = pointer(bias_hh, GH, "bias_hh must be (D * G * H,)");
  p.y = y.data(), p.h_last = h_last.data();
  const bool saved = h_prev.has_value();
  p.c0 = shaped(c0, {z.D, z.B, H}, cell.memory, "c0 must be (D, B, H)");
  p.c_last = shaped(c_last, {z.D, z.B, H}, cell.memory, "c_last must be (D, B, H)");
  p.h_prev = shaped(h_prev, {z.R, DP}, false, "h_prev must be (R, D * P)");
  p.c_prev = shaped(c_prev, {z.R, DH}, saved && cell.memory, "c_prev must be (R, D * H)");
  p.kept = shaped(kept, {z.R, DH * z.blocks}, saved && z.blocks, "kept must be (R, D * blocks * H)");
  p.scales = shaped(scales, {z.R, z.D * unrolled::kScales}, saved && norm_ih, "scales must be (R, D * 4)");
  const nb::gil_scoped_release release;
  in_large_pages(y), in_large_pages(h_prev), in_large_pages(c_prev), in_large_pages(kept);
  if (tokens < z.R) {  // rows of no sequence are 0
    clear(y);
    for (const auto* array : {&h_prev, &c_prev, &kept, &scales})
      if (*array) clear(**array);
  }
  kernels<T>().recurrent_forward(cell.cell, p);
}

template <class T>
void recurrent_backward(const std::string& name, Input<T, 2> dy, Input<T, 3> dh_last, OptionalInput<T, 3> dc_last,
                        Input<T, 2> x, Input<T, 2> weight_ih, Input<T, 2> weight_hh, OptionalInput<T, 2> weight_hr,
                        OptionalInput<T, 1> norm_ih, OptionalInput<T, 1> norm_hh, OptionalInput<T, 1> peephole,
                        OptionalInput<T, 1> norm_c, OptionalInput<T, 1> bias_c, OptionalInput<T, 3> mask,
                        OptionalInput<int64_t, 0> seed, OptionalInput<int64_t, 1> keys, Input<int64_t, 1> start,
                        Input<int64_t, 1> length, Input<T, 2> h_prev, OptionalInput<T, 2> c_prev, OptionalInput<T, 2> kept,
                        OptionalInput<T, 2> scales, Input<T, 3> h_end, OptionalInput<T, 3> c_end,
                        std::optional<Array<T, 3>> dx, Array<T, 3> dh0, std::optional<Array<T, 3>> dc0,
                        Array<T, 2> dweight_ih, Array<T, 2> dweight_hh, Array<T, 1> dbias_ih, Array<T, 1> dbias_hh,
                        std::optional<Array<T, 2>> dweight_hr, std::optional<Array<T, 1>> dnorm_ih,
                        std::optional<Array<T, 1>> dnorm_hh, std::optional<Array<T, 1>> dpeephole,
                        std::optional<Array<T, 1>> dnorm_c, std::optional<Array<T, 1>> dbias_c,
                        std::optional<Array<T, 2>> dh, std::optional<Array<T, 2>> dc, double zoneout_h, double zoneout_c,
                        int64_t layer, int64_t bptt, int64_t step, int threads) {
  const CellOf cell = cell_of(name);
  unrolled::RecurrentBackward<T> p;
  const int64_t P = size(h_end, 2), H = weight_hr ? size(*weight_hr, 1) : P;
  p.sizes = {size(x, 0), size(h_end, 1), size(h_end, 0), size(x, 1), H, P, 0, false, bptt, threads};
  auto& z = p.sizes;
  const int64_t DH = z.D * H, DP = z.D * P, GH = DH * cell.gates;
  check(z.D == 1 || z.D == 2, "h_end must have one or two directions");
  for (const auto* a : {&dy, &h_prev}) check(size(*a, 0) == z.R && size(*a, 1) == DP, "dy and h_prev must be (R, D * P)");
  check(size(weight_ih, 0) == GH && size(weight_ih, 1) == z.I, "weight_ih must be (D * G * H, I)");
  check(size(weight_hh, 0) == GH && size(weight_hh, 1) == P, "weight_hh must be (D * G * H, P)");
  p.options = options_of<T>(cell, z, weight_hr, norm_ih, norm_hh, peephole, norm_c, bias_c, mask, seed, keys, zoneout_h,
                            zoneout_c, layer);
  check(size(dh_last, 0) == z.D && size(dh_last, 1) == z.B && size(dh_last, 2) == P, "dh_last must be (D, B, P)");
  check(size(dh0, 0) == z.D && size(dh0, 1) == z.B && size(dh0, 2) == P, "dh0 must be (D, B, P)");
  check(size(dweight_ih, 0) == GH && size(dweight_ih, 1) == z.I, "dweight_ih must be (D * G * H, I)");
  check(size(dweight_hh, 0) == GH && size(dweight_hh, 1) == P, "dweight_hh must be (D * G * H, P)");
  check(size(dbias_ih, 0) == GH && size(dbias_hh, 0) == GH, "dbias_ih and dbias_hh must be (D * G * H,)");
  int64_t tokens;
  p.rows = rows_of(start, length, step, z.R, z.B, tokens);
  p.dy = dy.data(), p.dh_last = dh_last.data(), p.x = x.data();
  p.weight_ih = weight_ih.data(), p.weight_hh = weight_hh.data(), p.h_prev = h_prev.data(), p.h_end = h_end.data();
  p.dc_last = shaped(dc_last, {z.D, z.B, H}, cell.memory, "dc_last must be (D, B, H)");
  p.c_prev = shaped(c_prev, {z.R, DH}, cell.memory, "c_prev must be (R, D * H)");
  p.c_end = shaped(c_end, {z.D, z.B, H}, cell.memory, "c_end must be (D, B, H)");
  p.kept = shaped(kept, {z.R, DH * z.blocks}, z.blocks > 0, "kept must be (R, D * blocks * H)");
  p.scales = shaped(scales, {z.R, z.D * unrolled::kScales}, norm_ih.has_value(), "scales must be (R, D * 4)");
  p.dx = shaped(dx, {z.D, z.R, z.I}, false, "dx must be (D, R, I)");
  p.dh0 = dh0.data(), p.dc0 = shaped(dc0, {z.D, z.B, H}, cell.memory, "dc0 must be (D, B, H)");
  p.dweight_ih = dweight_ih.data(), p.dweight_hh = dweight_hh.data();
  p.dbias_ih = dbias_ih.data(), p.dbias_hh = dbias_hh.data();
  p.dweight_hr = shaped(dweight_hr, {z.D * P, H}, weight_hr.has_value(), "dweight_hr must be (D * P, H)");
  p.dnorm_ih = shaped(dnorm_ih, {GH}, norm_ih.has_value(), "dnorm_ih must be (D * G * H,)");
  p.dnorm_hh = shaped(dnorm_hh, {GH}, norm_hh.has_value(), "dnorm_hh must be (D * G * H,)");
  p.dpeephole = shaped(dpeephole, {3 * DH}, peephole.has_value(), "dpeephole must be (D * 3 * H,)");
  p.dnorm_c = shaped(dnorm_c, {DH}, norm_c.has_value(), "dnorm_c must be (D * H,)");
  p.dbias_c = shaped(dbias_c, {DH}, bias_c.has_value(), "dbias_c must be (D * H,)");
  p.dh = shaped(dh, {z.R, DP}, false, "dh must be (R, D * P)");
  p.dc = shaped(dc, {z.R, DH}, false, "dc must be (R, D * H)");
  const nb::gil_scoped_release release;
  in_large_pages(dx), in_large_pages(dh), in_large_pages(dc);
  if (tokens < z.R) {
    if (dx) clear(*dx);
    for (const auto* array : {&dh, &dc})
      if (*array) clear(**array);
  }
  kernels<T>().recurrent_backward(cell.cell, p);
}

template <class T>
void define(nb::module_& m) {
  const auto n = [](const char* name) { return nb::arg(name).noconvert(); };
  const auto o = [&](const char* name) { return n(name).none(); };
  m.def("recurrent_forward", recurrent_forward<T>, "cell"_a, n("x"), n("h0"), o("c0"), n("weight_ih"), n("weight_hh"),
        o("bias_ih"), o("bias_hh"), o("weight_hr"), o("norm_ih"), o("norm_hh"), o("peephole"), o("norm_c"), o("bias_c"),
        o("mask"), o("seed"), o("keys"), n("start"), n("length"), n("y"), n("h_last"), o("c_last"), o("h_prev"),
        o("c_prev"), o("kept"), o("scales"), "zoneout_h"_a, "zoneout_c"_a, "layer"_a, "bptt"_a, "step"_a, "threads"_a);
  m.def("recurrent_backward", recurrent_backward<T>, "cell"_a, n("dy"), n("dh_last"), o("dc_last"), n("x"), n("weight_ih"),
        n("weight_hh"), o("weight_hr"), o("norm_ih"), o("norm_hh"), o("peephole"), o("norm_c"), o("bias_c"), o("mask"),
        o("seed"), o("keys"), n("start"), n("length"), n("h_prev"), o("c_prev"), o("kept"), o("scales"), n("h_end"),
        o("c_end"), o("dx"), n("dh0"), o("dc0"), n("dweight_ih"), n("dweight_hh"), n("dbias_ih"), n("dbias_hh"),
        o("dweight_hr"), o("dnorm_ih"), o("dnorm_hh"), o("dpeephole"), o("dnorm_c"), o("dbias_c"), o("dh"), o("dc"),
        "zoneout_h"_a, "zoneout_c"_a, "layer"_a, "bptt"_a, "step"_a, "threads"_a);
}

}  // namespace

void define_recurrent(nb::module_& m) {
  define<float>(m);
  define<double>(m);
}
