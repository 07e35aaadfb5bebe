// The border to Python of linear_cross_entropy.
#include "bind.h"

namespace {

template <class T>
void linear_cross_entropy(Input<T, 2> x, Input<T, 2> weight, OptionalInput<T, 1> bias, Input<int64_t, 1> target,
                          OptionalInput<T, 1> class_weight, Array<T, 0> loss, std::optional<Array<T, 2>> dx,
                          std::optional<Array<T, 2>> dweight, std::optional<Array<T, 1>> dbias, int64_t ignore_index,
                          double label_smoothing, bool mean, int threads) {
  unrolled::LinearCrossEntropy<T> p{};
  p.N = size(x, 0), p.D = size(x, 1), p.V = size(weight, 0), p.ignore_index = ignore_index;
  p.label_smoothing = label_smoothing, p.mean = mean, p.threads = threads;
  check(size(weight, 1) == p.D, "weight must be (V, D)");
  check(size(target, 0) == p.N, "target must be (N,)");
  check(dweight || !dbias, "dbias must be None without dweight");
  p.x = x.data(), p.weight = weight.data(), p.target = target.data(), p.loss = loss.data();
  p.bias = shaped(bias, {p.V}, false, "bias must be (V,)");
  p.class_weight = shaped(class_weight, {p.V}, false, "class_weight must be (V,)");
  p.dx = shaped(dx, {p.N, p.D}, false, "dx must be (N, D)");
  p.dweight = shaped(dweight, {p.V, p.D}, false, "dweight must be (V, D)");
  p.dbias = shaped(dbias, {p.V}, false, "dbias must be (V,)");
  int64_t bad;
  {
    const nb::gil_scoped_release release;
    in_large_pages(dx), in_large_pages(dweight);
    bad = kernels<T>().linear_cross_entropy(p);
  }
  report(bad, target.data(), p.V, "target");
}

template <class T>
void define(nb::module_& m) {
  const auto n = [](const char* name) { return nb::arg(name).noconvert(); };
  m.def("linear_cross_entropy", linear_cross_entropy<T>, n("x"), n("weight"), n("bias").none(), n("target"),
        n("class_weight").none(), n("loss"), n("dx").none(), n("dweight").none(), n("dbias").none(), "ignore_index"_a,
        "label_smoothing"_a, "mean"_a, "threads"_a);
}

}  // namespace

void define_linear_cross_entropy(nb::module_& m) {
  define<float>(m);
  define<double>(m);
}
