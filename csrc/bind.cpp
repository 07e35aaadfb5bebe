// The border to Python: checks shapes, releases the lock, calls the kernel of the chosen variant.
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <vector>

#include "bind.h"

const unrolled::Variant* chosen = nullptr;

namespace {

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
  define_recurrent(m);
  define_attention(m);
  define_additive_attention(m);
  define_norm(m);
  define_feed_forward(m);
  define_linear_cross_entropy(m);
  define<float>(m);
  define<double>(m);
}
