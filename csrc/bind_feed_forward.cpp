// The border to Python of feed_forward and activation.
#include "bind.h"

namespace {

unrolled::Activation activation_of(const std::string& name) {
  using unrolled::Activation;
  if (name == "relu") return Activation::relu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "silu") return Activation::silu;
  throw nb::value_error(("no activation is called " + name).c_str());
}

unrolled::Dropping dropping_of(const OptionalInput<int64_t, 0>& seed, const OptionalInput<int64_t, 1>& key,
                               const OptionalInput<int64_t, 1>& t, double p, int64_t layer, int64_t rows) {
  if (!seed) {
    check(!key && !t && p == 0, "key and t must be None, and p 0, without a seed");
    return {0, 0, 0, nullptr, nullptr};
  }
  check(p >= 0 && p <= 1, "p must be in [0, 1]");
  check(key && t, "key and t must be (N,)");
  return {p, *seed->data(), layer, pointer(key, rows, "key must be (N,)"), pointer(t, rows, "t must be (N,)")};
}

template <class A>
void check_shape(const A& array, int64_t rows, int64_t columns, const char* what) {
  check(size(array, 0) == rows && size(array, 1) == columns, what);
}

template <class A>
auto matrix(const std::optional<A>& array, int64_t rows, int64_t columns, const char* what) -> decltype(array->data()) {
  if (!array) return nullptr;
  check_shape(*array, rows, columns, what);
  return array->data();
}

template <class T>
void feed_forward_forward(const std::string& activation, Input<T, 2> x, Input<T, 2> weight1, OptionalInput<T, 1> bias1,
                          Input<T, 2> weight2, OptionalInput<T, 1> bias2, OptionalInput<T, 2> weight_gate,
                          OptionalInput<T, 1> bias_gate, OptionalInput<int64_t, 0> seed, OptionalInput<int64_t, 1> key,
                          OptionalInput<int64_t, 1> t, Array<T, 2> y, std::optional<Array<T, 2>> a,
                          std::optional<Array<T, 2>> gate, double p, int64_t layer, int threads) {
  const int64_t N = size(x, 0), D = size(x, 1), F = size(weight1, 0);
  check_shape(weight1, F, D, "weight1 must be (F, D)");
  check_shape(weight2, D, F, "weight2 must be (D, F)");
  check_shape(y, N, D, "y must be (N, D)");
  check(weight_gate || !bias_gate, "bias_gate must be None without weight_gate");
  check(gate.has_value() == (a && weight_gate), "gate must be there with weight_gate and a, and only then");
  const unrolled::FeedForwardForward<T> call{{N, D, F, activation_of(activation), threads},
                                             dropping_of(seed, key, t, p, layer, N),
                                             x.data(),
                                             weight1.data(),
                                             pointer(bias1, F, "bias1 must be (F,)"),
                                             weight2.data(),
                                             pointer(bias2, D, "bias2 must be (D,)"),
                                             matrix(weight_gate, F, D, "weight_gate must be (F, D)"),
                                             pointer(bias_gate, F, "bias_gate must be (F,)"),
                                             y.data(),
                                             matrix(a, N, F, "a must be (N, F)"),
                                             matrix(gate, N, F, "gate must be (N, F)")};
  const nb::gil_scoped_release release;
  in_large_pages(y), in_large_pages(a), in_large_pages(gate);
  kernels<T>().feed_forward_forward(call);
}

template <class T>
void feed_forward_backward(const std::string& activation, Input<T, 2> dy, Input<T, 2> x, Input<T, 2> a, OptionalInput<T, 2> gate,
                           Input<T, 2> weight1, Input<T, 2> weight2, OptionalInput<T, 2> weight_gate,
                           OptionalInput<int64_t, 0> seed, OptionalInput<int64_t, 1> key, OptionalInput<int64_t, 1> t,
                           std::optional<Array<T, 2>> dx, Array<T, 2> dweight1, Array<T, 1> dbias1, Array<T, 2> dweight2,
                           Array<T, 1> dbias2, std::optional<Array<T, 2>> dweight_gate, std::optional<Array<T, 1>> dbias_gate,
                           double p, int64_t layer, int threads) {
  const int64_t N = size(x, 0), D = size(x, 1), F = size(weight1, 0);
  check_shape(dy, N, D, "dy must be (N, D)");
  check_shape(a, N, F, "a must be (N, F)");
  check_shape(weight1, F, D, "weight1 must be (F, D)");
  check_shape(weight2, D, F, "weight2 must be (D, F)");
  check_shape(dweight1, F, D, "dweight1 must be (F, D)");
  check_shape(dweight2, D, F, "dweight2 must be (D, F)");
  check(size(dbias1, 0) == F && size(dbias2, 0) == D, "dbias1 must be (F,) and dbias2 (D,)");
  const bool gated = weight_gate.has_value();
  check(gated == gate.has_value() && gated == dweight_gate.has_value() && gated == dbias_gate.has_value(),
        "gate, dweight_gate and dbias_gate must be there with weight_gate, and only then");
  const unrolled::FeedForwardBackward<T> call{{N, D, F, activation_of(activation), threads},
                                              dropping_of(seed, key, t, p, layer, N),
                                              dy.data(),
                                              x.data(),
                                              a.data(),
                                              matrix(gate, N, F, "gate must be (N, F)"),
                                              weight1.data(),
                                              weight2.data(),
                                              matrix(weight_gate, F, D, "weight_gate must be (F, D)"),
                                              matrix(dx, N, D, "dx must be (N, D)"),
                                              dweight1.data(),
                                              dbias1.data(),
                                              dweight2.data(),
                                              dbias2.data(),
                                              matrix(dweight_gate, F, D, "dweight_gate must be (F, D)"),
                                              pointer(dbias_gate, F, "dbias_gate must be (F,)")};
  const nb::gil_scoped_release release;
  in_large_pages(dx);
  kernels<T>().feed_forward_backward(call);
}

template <class T>
using Numbers = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

template <class T>
void activation_forward(const std::string& kind, Numbers<const T> x, Numbers<T> y, int threads) {
  check(y.size() == x.size(), "y must be as large as x");
  const auto activation = activation_of(kind);
  const nb::gil_scoped_release release;
  in_large_pages(y);
  kernels<T>().activation_forward(activation, static_cast<int64_t>(x.size()), x.data(), threads, y.data());
}

template <class T>
void activation_backward(const std::string& kind, Numbers<const T> dy, Numbers<const T> x, Numbers<T> dx, int threads) {
  check(dy.size() == x.size() && dx.size() == x.size(), "dy and dx must be as large as x");
  const auto activation = activation_of(kind);
  const nb::gil_scoped_release release;
  in_large_pages(dx);
  kernels<T>().activation_backward(activation, static_cast<int64_t>(x.size()), dy.data(), x.data(), threads, dx.data());
}

template <class T>
void define(nb::module_& m) {
  const auto n = [](const char* name) { return nb::arg(name).noconvert(); };
  m.def("feed_forward_forward", feed_forward_forward<T>, "activation"_a, n("x"), n("weight1"), n("bias1").none(), n("weight2"),
        n("bias2").none(), n("weight_gate").none(), n("bias_gate").none(), n("seed").none(), n("key").none(), n("t").none(),
        n("y"), n("a").none(), n("gate").none(), "p"_a, "layer"_a, "threads"_a);
  m.def("feed_forward_backward", feed_forward_backward<T>, "activation"_a, n("dy"), n("x"), n("a"), n("gate").none(),
        n("weight1"), n("weight2"), n("weight_gate").none(), n("seed").none(), n("key").none(), n("t").none(), n("dx").none(),
        n("dweight1"), n("dbias1"), n("dweight2"), n("dbias2"), n("dweight_gate").none(), n("dbias_gate").none(), "p"_a,
        "layer"_a, "threads"_a);
  m.def("activation_forward", activation_forward<T>, "kind"_a, n("x"), n("y"), "threads"_a);
  m.def("activation_backward", activation_backward<T>, "kind"_a, n("dy"), n("x"), n("dx"), "threads"_a);
}

}  // namespace

void define_feed_forward(nb::module_& m) {
  define<float>(m);
  define<double>(m);
}
