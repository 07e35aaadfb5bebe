// The border to Python: checks shapes, releases the lock, calls the kernel of the chosen variant.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "unrolled/core.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using Input = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using OptionalInput = std::optional<Input<T, N>>;

const unrolled::Variant* chosen = nullptr;

std::vector<const unrolled::Variant*> supported() {
  int count;
  const unrolled::Variant* all = unrolled::variants(&count);
  std::vector<const unrolled::Variant*> found;
  for (int i = 0; i < count; ++i)
    if (all[i].supported()) found.push_back(&all[i]);
  return found;
}

void set_variant(const std::string& name) {
  std::string names;
  for (const auto* variant : supported()) {
    if (name == variant->name) {
      chosen = variant;
      return;
    }
    names += std::string(names.empty() ? "" : ", ") + variant->name;
  }
  throw nb::value_error(("no CPU variant \"" + name + "\" here; this machine has " + names).c_str());
}

template <class T>
const unrolled::Kernels<T>& kernels();
template <>
const unrolled::Kernels<float>& kernels() {
  return *chosen->float32;
}
template <>
const unrolled::Kernels<double>& kernels() {
  return *chosen->float64;
}

void check(bool ok, const char* what) {
  if (!ok) throw nb::value_error(what);
}

template <class A>
int64_t size(const A& array, size_t axis) {
  return static_cast<int64_t>(array.shape(axis));
}

template <class A>
auto pointer(const std::optional<A>& array, int64_t expected, const char* what) -> decltype(array->data()) {
  if (!array) return nullptr;
  check(static_cast<int64_t>(array->size()) == expected, what);
  return array->data();
}

// A row outside memory would be written to: the last check before pointers. `tokens`: how many rows belong to a sequence.
unrolled::Rows rows_of(const Input<int64_t, 1>& start, const Input<int64_t, 1>& length, int64_t step, int64_t R, int64_t B,
                       int64_t& tokens) {
  tokens = 0;
  check(size(start, 0) == B && size(length, 0) == B, "start and length must have one number for each sequence");
  for (int64_t b = 0; b < B; ++b) {
    const int64_t n = length.data()[b], first = start.data()[b];
    check(n >= 0 && n <= R, "a length lies outside [0, rows]");
    const int64_t last = first + (n - 1) * step;
    check(n == 0 || (first >= 0 && first < R && last >= 0 && last < R), "a sequence leaves the rows of x");
    tokens += n;
  }
  return {start.data(), length.data(), step};
}

// Large outputs are mostly memory that was never touched. The kernel hands it out about four times as fast in pages of 2 MB,
// where it was told to.
template <class A>
void in_large_pages(const A& array) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(array.data()), first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + array.nbytes()) / kPage * kPage;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)array;
#endif
}
template <class A>
void in_large_pages(const std::optional<A>& array) {
  if (array) in_large_pages(*array);
}

template <class A>
void clear(const A& array) {
  std::memset(array.data(), 0, array.nbytes());
}

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

// The pointer of an array of the given shape; null for None, which `required` refuses.
template <class A>
auto shaped(const std::optional<A>& array, std::initializer_list<int64_t> shape, bool required, const char* what)
    -> decltype(array->data()) {
  if (!array) {
    check(!required, what);
    return nullptr;
  }
  size_t axis = 0;
  for (const int64_t n : shape) check(size(*array, axis++) == n, what);
  return array->data();
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
void linear_forward(Input<T, 2> x, Input<T, 2> weight, OptionalInput<T, 1> bias, Array<T, 2> y, int threads) {
  const unrolled::LinearSizes z{size(x, 0), size(x, 1), size(weight, 0), threads};
  check(size(weight, 1) == z.I, "x and weight must have one number of features");
  check(size(y, 0) == z.N && size(y, 1) == z.O, "y must be (N, O)");
  const T* const b = pointer(bias, z.O, "bias must be (O,)");
  const nb::gil_scoped_release release;
  in_large_pages(y);
  kernels<T>().linear_forward(z, x.data(), weight.data(), b, y.data());
}

template <class T>
void linear_backward(Input<T, 2> dy, Input<T, 2> x, Input<T, 2> weight, nb::ndarray<T, nb::c_contig, nb::device::cpu> dx,
                     Array<T, 2> dweight, Array<T, 1> dbias, int threads) {
  const unrolled::LinearSizes z{size(x, 0), size(x, 1), size(weight, 0), threads};
  check(size(weight, 1) == z.I && size(dy, 0) == z.N && size(dy, 1) == z.O, "dy must be (N, O), x (N, I), weight (O, I)");
  check(size(dweight, 0) == z.O && size(dweight, 1) == z.I && size(dbias, 0) == z.O, "dweight must be (O, I), dbias (O,)");
  const bool need_dx = dx.ndim() == 2;
  check(!need_dx || (size(dx, 0) == z.N && size(dx, 1) == z.I), "dx must be (N, I)");
  const nb::gil_scoped_release release;
  if (need_dx) in_large_pages(dx);
  kernels<T>().linear_backward(z, dy.data(), x.data(), weight.data(), need_dx ? dx.data() : nullptr, dweight.data(),
                               dbias.data());
}

void report(int64_t bad, const int64_t* index, int64_t limit, const char* what) {
  if (bad < 0) return;
  const std::string text = std::string(what) + " " + std::to_string(index[bad]) + " at place " + std::to_string(bad) +
                           " lies outside [0, " + std::to_string(limit) + ")";
  throw nb::index_error(text.c_str());
}

template <class T>
void embedding_forward(Input<int64_t, 1> token, Input<T, 2> weight, Array<T, 2> y, int threads) {
  const int64_t N = size(token, 0), V = size(weight, 0), E = size(weight, 1);
  check(size(y, 0) == N && size(y, 1) == E, "y must be (N, E)");
  int64_t bad;
  {
    const nb::gil_scoped_release release;
    in_large_pages(y);
    bad = kernels<T>().embedding_forward(N, V, E, token.data(), weight.data(), threads, y.data());
  }
  report(bad, token.data(), V, "token");
}

template <class T>
void embedding_backward(Input<T, 2> dy, Input<int64_t, 1> token, Array<T, 2> dweight, int64_t padding, int threads) {
  const int64_t N = size(token, 0), V = size(dweight, 0), E = size(dweight, 1);
  check(size(dy, 0) == N && size(dy, 1) == E, "dy must be (N, E)");
  int64_t bad;
  {
    const nb::gil_scoped_release release;
    bad = kernels<T>().embedding_backward(N, V, E, dy.data(), token.data(), padding, threads, dweight.data());
  }
  report(bad, token.data(), V, "token");
}

template <class T>
void dropout_forward(Input<T, 2> x, Input<int64_t, 0> seed, Input<int64_t, 1> key, Input<int64_t, 1> t, Array<T, 2> y,
                     int64_t layer, double p, int threads) {
  const unrolled::DropoutSizes z{size(x, 0), size(x, 1), *seed.data(), layer, p, threads};
  check(size(key, 0) == z.N && size(t, 0) == z.N, "key and t must have one number for each row of x");
  check(size(y, 0) == z.N && size(y, 1) == z.F, "y must have the shape of x");
  const nb::gil_scoped_release release;
  in_large_pages(y);
  kernels<T>().dropout_forward(z, x.data(), key.data(), t.data(), y.data());
}

template <class T>
void mean_squared_error_forward(Input<T, 1> y, Input<T, 1> target, Array<T, 0> loss, int threads) {
  check(size(y, 0) == size(target, 0), "y and target must have one size");
  const nb::gil_scoped_release release;
  kernels<T>().mean_squared_error_forward(size(y, 0), y.data(), target.data(), threads, loss.data());
}

template <class T>
void mean_squared_error_backward(Input<T, 0> dloss, Input<T, 1> y, Input<T, 1> target, Array<T, 1> dy, int threads) {
  check(size(y, 0) == size(target, 0) && size(y, 0) == size(dy, 0), "y, target and dy must have one size");
  const nb::gil_scoped_release release;
  kernels<T>().mean_squared_error_backward(size(y, 0), *dloss.data(), y.data(), target.data(), threads, dy.data());
}

template <class T>
void cross_entropy_forward(Input<T, 2> logits, Input<int64_t, 1> target, OptionalInput<T, 1> class_weight, Array<T, 1> loss,
                           Array<T, 1> log_sum, int64_t ignore_index, double label_smoothing, int threads) {
  const unrolled::CrossEntropySizes z{size(logits, 0), size(logits, 1), ignore_index, label_smoothing, threads};
  check(size(target, 0) == z.N && size(loss, 0) == z.N && size(log_sum, 0) == z.N, "target must be (N,)");
  const T* const w = pointer(class_weight, z.C, "class_weight must be (C,)");
  int64_t bad;
  {
    const nb::gil_scoped_release release;
    bad = kernels<T>().cross_entropy_forward(z, logits.data(), target.data(), w, loss.data(), log_sum.data());
  }
  report(bad, target.data(), z.C, "target");
}

template <class T>
void cross_entropy_backward(Input<T, 1> dloss, Input<T, 2> logits, Input<T, 1> log_sum, Input<int64_t, 1> target,
                            OptionalInput<T, 1> class_weight, Array<T, 2> dlogits, int64_t ignore_index,
                            double label_smoothing, int threads) {
  const unrolled::CrossEntropySizes z{size(logits, 0), size(logits, 1), ignore_index, label_smoothing, threads};
  check(size(target, 0) == z.N && size(dloss, 0) == z.N && size(log_sum, 0) == z.N, "target must be (N,)");
  check(size(dlogits, 0) == z.N && size(dlogits, 1) == z.C, "dlogits must be (N, C)");
  for (int64_t n = 0; n < z.N; ++n)
    check(target.data()[n] == ignore_index || (target.data()[n] >= 0 && target.data()[n] < z.C), "a target is no class");
  const T* const w = pointer(class_weight, z.C, "class_weight must be (C,)");
  const nb::gil_scoped_release release;
  in_large_pages(dlogits);
  kernels<T>().cross_entropy_backward(z, dloss.data(), logits.data(), log_sum.data(), target.data(), w, dlogits.data());
}

template <class T>
void tanh_of(Input<T, 1> x, Array<T, 1> y) {
  check(size(x, 0) == size(y, 0), "x and y must have one size");
  kernels<T>().tanh(size(x, 0), x.data(), y.data());
}

template <class T>
void exp_of(Input<T, 1> x, Array<T, 1> y) {
  check(size(x, 0) == size(y, 0), "x and y must have one size");
  kernels<T>().exp(size(x, 0), x.data(), y.data());
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
  m.def("linear_forward", linear_forward<T>, n("x"), n("weight"), n("bias").none(), n("y"), "threads"_a);
  m.def("linear_backward", linear_backward<T>, n("dy"), n("x"), n("weight"), n("dx"), n("dweight"), n("dbias"),
        "threads"_a);
  m.def("embedding_forward", embedding_forward<T>, n("token"), n("weight"), n("y"), "threads"_a);
  m.def("embedding_backward", embedding_backward<T>, n("dy"), n("token"), n("dweight"), "padding"_a, "threads"_a);
  m.def("dropout_forward", dropout_forward<T>, n("x"), n("seed"), n("key"), n("t"), n("y"), "layer"_a, "p"_a,
        "threads"_a);
  m.def("mean_squared_error_forward", mean_squared_error_forward<T>, n("y"), n("target"), n("loss"), "threads"_a);
  m.def("mean_squared_error_backward", mean_squared_error_backward<T>, n("dloss"), n("y"), n("target"), n("dy"),
        "threads"_a);
  m.def("cross_entropy_forward", cross_entropy_forward<T>, n("logits"), n("target"), n("class_weight").none(), n("loss"),
        n("log_sum"), "ignore_index"_a, "label_smoothing"_a, "threads"_a);
  m.def("cross_entropy_backward", cross_entropy_backward<T>, n("dloss"), n("logits"), n("log_sum"), n("target"),
        n("class_weight").none(), n("dlogits"), "ignore_index"_a, "label_smoothing"_a, "threads"_a);
  m.def("tanh", tanh_of<T>, n("x"), n("y"));
  m.def("exp", exp_of<T>, n("x"), n("y"));
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The kernels of csrc/include/unrolled/core.h for the CPU.";
  const char* const forced = std::getenv("UNROLLED_CPU");
  if (forced && *forced)
    set_variant(forced);
  else
    chosen = supported().front();
  m.def("variant", [] { return chosen->name; }, "The CPU variant in use.");
  m.def("variants", [] {
    std::vector<std::string> names;
    for (const auto* variant : supported()) names.emplace_back(variant->name);
    return names;
  }, "The CPU variants this machine has, best first.");
  m.def("set_variant", set_variant, "name"_a, "Use another CPU variant, for tests.");
  define<float>(m);
  define<double>(m);
}
