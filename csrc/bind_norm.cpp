// The border to Python of the normalisations and of the rotary positions.
#include "bind.h"

namespace {

// Where it drops: p = 0 comes without the arrays.
unrolled::Dropping dropping(double p, const OptionalInput<int64_t, 0>& seed, const OptionalInput<int64_t, 1>& key,
                            const OptionalInput<int64_t, 1>& t, int64_t layer, int64_t N) {
  check(p >= 0 && p <= 1, "p must be a probability");
  check((p > 0) == seed.has_value() && (p > 0) == key.has_value() && (p > 0) == t.has_value(),
        "seed, key and t must be there where p is above 0, else None");
  if (p == 0) return {0, 0, layer, nullptr, nullptr};
  return {p, *seed->data(), layer, pointer(key, N, "key must be (N,)"), pointer(t, N, "t must be (N,)")};
}

template <class A>
void check_rows(const A& array, int64_t N, int64_t F, const char* what) {
  check(size(array, 0) == N && size(array, 1) == F, what);
}
template <class A>
void check_rows(const std::optional<A>& array, int64_t N, int64_t F, const char* what) {
  if (array) check_rows(*array, N, F, what);
}
template <class A>
auto rows_of(const std::optional<A>& array) -> decltype(array->data()) {
  return array ? array->data() : nullptr;
}

template <class T>
void norm_forward(Input<T, 2> x, OptionalInput<T, 2> s, OptionalInput<T, 1> gain, OptionalInput<T, 1> bias,
                  OptionalInput<int64_t, 0> seed, OptionalInput<int64_t, 1> key, OptionalInput<int64_t, 1> t,
                  std::optional<Array<T, 2>> r, Array<T, 2> y, std::optional<Array<T, 1>> mean, Array<T, 1> scale,
                  double epsilon, int64_t layer, double p, int threads) {
  const int64_t N = size(x, 0), F = size(x, 1);
  check(s.has_value() == r.has_value(), "s must have r, and r must have s");
  check_rows(s, N, F, "s must be (N, F)");
  check_rows(r, N, F, "r must be (N, F)");
  check_rows(y, N, F, "y must be (N, F)");
  check(s || p == 0, "p must be 0 without s");
  check(size(scale, 0) == N, "scale must be (N,)");
  const unrolled::NormForward<T> call{N,
                                      F,
                                      mean.has_value(),
                                      epsilon,
                                      dropping(p, seed, key, t, layer, N),
                                      x.data(),
                                      rows_of(s),
                                      pointer(gain, F, "gain must be (F,)"),
                                      pointer(bias, F, "bias must be (F,)"),
                                      rows_of(r),
                                      y.data(),
                                      pointer(mean, N, "mean must be (N,)"),
                                      scale.data(),
                                      threads};
  const nb::gil_scoped_release release;
  in_large_pages(r);
  in_large_pages(y);
  kernels<T>().norm_forward(call);
}

template <class T>
void norm_backward(OptionalInput<T, 2> dr, Input<T, 2> dy, Input<T, 2> r, OptionalInput<T, 1> mean, Input<T, 1> scale,
                   OptionalInput<T, 1> gain, OptionalInput<int64_t, 0> seed, OptionalInput<int64_t, 1> key,
                   OptionalInput<int64_t, 1> t, Array<T, 2> dx, std::optional<Array<T, 2>> ds,
                   std::optional<Array<T, 1>> dgain, std::optional<Array<T, 1>> dbias, int64_t layer, double p, int threads) {
  const int64_t N = size(r, 0), F = size(r, 1);
  check_rows(dr, N, F, "dr must be (N, F)");
  check_rows(dy, N, F, "dy must be (N, F)");
  check_rows(dx, N, F, "dx must be (N, F)");
  check_rows(ds, N, F, "ds must be (N, F)");
  check(ds.has_value() == (p > 0), "ds must be there where p is above 0, else None");
  check(size(scale, 0) == N, "scale must be (N,)");
  const unrolled::NormBackward<T> call{N,
                                       F,
                                       mean.has_value(),
                                       dropping(p, seed, key, t, layer, N),
                                       rows_of(dr),
                                       dy.data(),
                                       r.data(),
                                       pointer(mean, N, "mean must be (N,)"),
                                       scale.data(),
                                       pointer(gain, F, "gain must be (F,)"),
                                       dx.data(),
                                       rows_of(ds),
                                       pointer(dgain, F, "dgain must be (F,)"),
                                       pointer(dbias, F, "dbias must be (F,)"),
                                       threads};
  const nb::gil_scoped_release release;
  in_large_pages(dx);
  in_large_pages(ds);
  kernels<T>().norm_backward(call);
}

template <class T>
void rotary(Input<T, 2> x, Input<int64_t, 1> t, Input<double, 1> frequency, Array<T, 2> y, int64_t heads, int64_t columns,
            int threads) {
  const int64_t N = size(x, 0), W = size(x, 1);
  check(size(t, 0) == N, "t must be (N,)");
  check_rows(y, N, W, "y must have the shape of x");
  check(columns >= 0 && columns <= W, "columns must be at most those of x");
  check(heads > 0 && columns % (2 * heads) == 0, "columns must be heads of an even size");
  check(size(frequency, 0) == columns / heads / 2, "frequency must be one for each pair of a head");
  const nb::gil_scoped_release release;
  in_large_pages(y);
  kernels<T>().rotary({N, W, heads, columns, frequency.data(), x.data(), t.data(), y.data(), threads});
}

template <class T>
void define(nb::module_& m) {
  const auto n = [](const char* name) { return nb::arg(name).noconvert(); };
  m.def("norm_forward", norm_forward<T>, n("x"), n("s").none(), n("gain").none(), n("bias").none(), n("seed").none(),
        n("key").none(), n("t").none(), n("r").none(), n("y"), n("mean").none(), n("scale"), "epsilon"_a, "layer"_a,
        "p"_a, "threads"_a);
  m.def("norm_backward", norm_backward<T>, n("dr").none(), n("dy"), n("r"), n("mean").none(), n("scale"),
        n("gain").none(), n("seed").none(), n("key").none(), n("t").none(), n("dx"), n("ds").none(),
        n("dgain").none(), n("dbias").none(), "layer"_a, "p"_a, "threads"_a);
  m.def("rotary", rotary<T>, n("x"), n("t"), n("frequency"), n("y"), "heads"_a, "columns"_a, "threads"_a);
}

}  // namespace

void define_norm(nb::module_& m) {
  define<float>(m);
  define<double>(m);
}
