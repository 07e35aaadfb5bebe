// The border to Python of additive_attention.
#include "bind.h"

namespace {

using Numbers = Input<int64_t, 1>;

int64_t longest(const unrolled::Rows& rows, int64_t B) {
  int64_t most = 0;
  for (int64_t b = 0; b < B; ++b) most = rows.length[b] > most ? rows.length[b] : most;
  return most;
}

template <class T>
unrolled::AdditiveMask<T> mask_of(const OptionalInput<T, 3>& mask, int64_t B, int64_t Q, int64_t K) {
  if (!mask) return {};
  const int64_t b = size(*mask, 0), q = size(*mask, 1), k = size(*mask, 2);
  check((b == 1 || b == B) && (q == 1 || q >= Q) && (k == 1 || k >= K), "mask must be (B, Tq, Tk), each that or 1");
  return {mask->data(), b == 1 ? 0 : q * k, q == 1 ? 0 : k, k == 1 ? 0 : 1};
}

// What forward and backward are given alike. Returns whether some rows of queries, or of keys, belong to no sequence.
template <class T, class P>
std::pair<bool, bool> fill(P& p, const Input<T, 2>& q, const Input<T, 2>& k, const Input<T, 2>& value, const Input<T, 1>& v,
                           const OptionalInput<T, 3>& mask, const Numbers& query_start, const Numbers& query_length,
                           const Numbers& key_start, const Numbers& key_length, int64_t query_step, int64_t key_step,
                           int threads) {
  p.sizes = {size(q, 0), size(k, 0), size(query_start, 0), size(q, 1), size(value, 1), threads};
  const auto& z = p.sizes;
  check(size(k, 1) == z.H && size(v, 0) == z.H, "k must be (M, H), v (H,)");
  check(size(value, 0) == z.M, "value must be (M, D)");
  int64_t queries, keys;
  p.queries = rows_of(query_start, query_length, query_step, z.N, z.B, queries);
  p.keys = rows_of(key_start, key_length, key_step, z.M, z.B, keys);
  check_apart(p.queries, z.B, z.N);
  p.q = q.data(), p.k = k.data(), p.value = value.data(), p.v = v.data();
  p.mask = mask_of(mask, z.B, longest(p.queries, z.B), longest(p.keys, z.B));
  return {queries < z.N, keys < z.M};
}

template <class T>
void forward(Input<T, 2> q, Input<T, 2> k, Input<T, 2> value, Input<T, 1> v, OptionalInput<T, 3> mask, Numbers query_start,
             Numbers query_length, Numbers key_start, Numbers key_length, Array<T, 2> o, Array<T, 1> log_sum,
             std::optional<Array<T, 3>> weights, int64_t query_step, int64_t key_step, int threads) {
  unrolled::AdditiveAttentionForward<T> p{};
  const bool holes = fill(p, q, k, value, v, mask, query_start, query_length, key_start, key_length, query_step, key_step,
                          threads).first;
  check(size(o, 0) == p.sizes.N && size(o, 1) == p.sizes.D, "o must be (N, D)");
  check(size(log_sum, 0) == p.sizes.N, "log_sum must be (N,)");
  p.o = o.data(), p.log_sum = log_sum.data();
  p.Q = longest(p.queries, p.sizes.B), p.K = longest(p.keys, p.sizes.B);
  p.weights = shaped(weights, {p.sizes.B, p.Q, p.K}, false, "weights must be (B, Tq, Tk)");
  const nb::gil_scoped_release release;
  in_large_pages(o), in_large_pages(weights);
  if (holes) clear(o), clear(log_sum);
  if (weights) clear(*weights);
  kernels<T>().additive_attention_forward(p);
}

template <class T>
void backward(Input<T, 2> d_o, Input<T, 2> q, Input<T, 2> k, Input<T, 2> value, Input<T, 1> v, OptionalInput<T, 3> mask,
              Numbers query_start, Numbers query_length, Numbers key_start, Numbers key_length, Input<T, 2> o,
              Input<T, 1> log_sum, Array<T, 2> dq, Array<T, 2> dk, Array<T, 2> dvalue, Array<T, 1> dv, int64_t query_step,
              int64_t key_step, int threads) {
  unrolled::AdditiveAttentionBackward<T> p{};
  const auto [queries, keys] =
      fill(p, q, k, value, v, mask, query_start, query_length, key_start, key_length, query_step, key_step, threads);
  const auto& z = p.sizes;
  check_apart(p.keys, z.B, z.M);
  check(size(d_o, 0) == z.N && size(d_o, 1) == z.D && size(o, 0) == z.N && size(o, 1) == z.D, "do and o must be (N, D)");
  check(size(log_sum, 0) == z.N, "log_sum must be (N,)");
  check(size(dq, 0) == z.N && size(dq, 1) == z.H && size(dk, 0) == z.M && size(dk, 1) == z.H, "dq must be (N, H), dk (M, H)");
  check(size(dvalue, 0) == z.M && size(dvalue, 1) == z.D && size(dv, 0) == z.H, "dvalue must be (M, D), dv (H,)");
  p.d_o = d_o.data(), p.o = o.data(), p.log_sum = log_sum.data();
  p.dq = dq.data(), p.dk = dk.data(), p.dvalue = dvalue.data(), p.dv = dv.data();
  const nb::gil_scoped_release release;
  in_large_pages(dq), in_large_pages(dk), in_large_pages(dvalue);
  if (queries) clear(dq);
  if (keys) clear(dk), clear(dvalue);
  kernels<T>().additive_attention_backward(p);
}

template <class T>
void define(nb::module_& m) {
  const auto n = [](const char* name) { return nb::arg(name).noconvert(); };
  m.def("additive_attention_forward", forward<T>, n("q"), n("k"), n("value"), n("v"), n("mask").none(), n("query_start"),
        n("query_length"), n("key_start"), n("key_length"), n("o"), n("log_sum"), n("weights").none(), "query_step"_a,
        "key_step"_a, "threads"_a);
  m.def("additive_attention_backward", backward<T>, n("d_o"), n("q"), n("k"), n("value"), n("v"), n("mask").none(),
        n("query_start"), n("query_length"), n("key_start"), n("key_length"), n("o"), n("log_sum"), n("dq"), n("dk"),
        n("dvalue"), n("dv"), "query_step"_a, "key_step"_a, "threads"_a);
}

}  // namespace

void define_additive_attention(nb::module_& m) {
  define<float>(m);
  define<double>(m);
}
