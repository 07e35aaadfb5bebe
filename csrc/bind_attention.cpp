// The border to Python of attention.
#include "bind.h"

namespace {

using Bytes = OptionalInput<bool, 4>;

int64_t longest_of(const int64_t* length, int64_t B) {
  int64_t n = 0;
  for (int64_t b = 0; b < B; ++b) n = length[b] > n ? length[b] : n;
  return n;
}

// What both kernels are given, in the order of their arguments.
template <class T>
struct Given {
  Input<T, 2> q;
  OptionalInput<T, 2> k, v;
  Bytes seen;
  OptionalInput<T, 4> added;
  OptionalInput<T, 1> slopes;
  Input<int64_t, 1> query_start, query_length, key_start, key_length;
  OptionalInput<int64_t, 0> seed;
  OptionalInput<int64_t, 1> key, t;
  int64_t heads, query_step, key_step;
  bool causal;
  double scale, p;
  int64_t layer;
  int threads;

  // With the longest lengths, and how many rows belong to a sequence, of queries and of keys.
  unrolled::AttentionInputs<T> checked(int64_t (&longest)[2], int64_t (&tokens)[2]) const {
    check(k || !v, "without k there is no v");
    const int64_t N = size(q, 0), A = heads, B = size(query_start, 0);
    const int64_t M = k ? size(*k, 0) : N, width = k ? size(q, 1) : size(q, 1) / 3, values = v ? size(*v, 1) : width;
    check(A >= 1 && width % A == 0 && values % A == 0, "q, k and v must have a multiple of the heads");
    check(k ? size(*k, 1) == (v ? width : 2 * width) : size(q, 1) == 3 * width, "k must be as wide as q, or twice without v");
    check(!v || size(*v, 0) == M, "v must have the rows of k");
    const int64_t F = width / A, G = values / A;
    const T* const keys = k ? k->data() : q.data() + width;
    const unrolled::AttentionSizes sizes{N, M, B, A, F, G, size(q, 1), k ? size(*k, 1) : 3 * width,
                                         v ? values : k ? 2 * width : 3 * width, causal, scale, threads};
    unrolled::AttentionInputs<T> in{sizes, rows_of(query_start, query_length, query_step, N, B, tokens[0]),
                                    rows_of(key_start, key_length, key_step, M, B, tokens[1]), q.data(), keys,
                                    v ? v->data() : keys + width, {nullptr, nullptr, {}},
                                    pointer(slopes, A, "slopes must have one number for each head"), {0, 0, layer, nullptr, nullptr}};
    check_apart(in.queries, B, N);
    longest[0] = longest_of(in.queries.length, B), longest[1] = longest_of(in.keys.length, B);
    if (seen) in.mask.seen = seen->data(), strides(*seen, in, longest);
    if (added) in.mask.added = added->data(), strides(*added, in, longest);
    check(!(seen && added), "one mask, of numbers or of truth values");
    check(p >= 0 && p <= 1, "p must lie in [0, 1]");
    check(p == 0 || (seed && key && t), "dropout must have a seed, and key and t for each row");
    if (p > 0)
      in.dropping = {p, *seed->data(), layer, pointer(key, N, "key must be (N,)"), pointer(t, N, "t must be (N,)")};
    return in;
  }

  template <class Mask>
  static void strides(const Mask& mask, unrolled::AttentionInputs<T>& in, const int64_t (&longest)[2]) {
    const int64_t wanted[4] = {in.sizes.B, in.sizes.A, longest[0], longest[1]};
    int64_t stride = 1;
    for (int axis = 3; axis >= 0; --axis) {
      const int64_t n = size(mask, static_cast<size_t>(axis));
      check(n == 1 || n == wanted[axis] || (axis > 1 && n > wanted[axis]), "mask must be (1 or B, 1 or A, 1 or Tq, 1 or Tk)");
      in.mask.stride[axis] = n == 1 ? 0 : stride;
      stride *= n;
    }
  }
};

template <class T>
void attention_forward(Input<T, 2> q, OptionalInput<T, 2> k, OptionalInput<T, 2> v, Bytes seen, OptionalInput<T, 4> added,
                       OptionalInput<T, 1> slopes, Input<int64_t, 1> query_start, Input<int64_t, 1> query_length,
                       Input<int64_t, 1> key_start, Input<int64_t, 1> key_length, OptionalInput<int64_t, 0> seed,
                       OptionalInput<int64_t, 1> key, OptionalInput<int64_t, 1> t, Array<T, 2> o, Array<T, 2> log_sum,
                       std::optional<Array<T, 4>> weights, int64_t heads, int64_t query_step, int64_t key_step, bool causal,
                       double scale, double p, int64_t layer, int threads) {
  const Given<T> given{q, k, v, seen, added, slopes, query_start, query_length, key_start, key_length, seed, key, t,
                       heads, query_step, key_step, causal, scale, p, layer, threads};
  int64_t longest[2], tokens[2];
  const auto in = given.checked(longest, tokens);
  const auto& z = in.sizes;
  check(size(o, 0) == z.N && size(o, 1) == z.A * z.G, "o must be (N, A * G)");
  check(size(log_sum, 0) == z.N && size(log_sum, 1) == z.A, "log_sum must be (N, A)");
  if (weights)
    check(size(*weights, 0) == z.B && size(*weights, 1) == z.A && size(*weights, 2) == longest[0] &&
              size(*weights, 3) == longest[1], "weights must be (B, A, Tq, Tk)");
  const nb::gil_scoped_release release;
  in_large_pages(o), in_large_pages(weights);
  if (tokens[0] < z.N) clear(o), clear(log_sum);
  if (weights) clear(*weights);
  kernels<T>().attention_forward({in, o.data(), log_sum.data(), weights ? weights->data() : nullptr, longest[0], longest[1]});
}

template <class T>
void attention_backward(Input<T, 2> do_, Input<T, 2> q, OptionalInput<T, 2> k, OptionalInput<T, 2> v, Bytes seen,
                        OptionalInput<T, 4> added, OptionalInput<T, 1> slopes, Input<int64_t, 1> query_start,
                        Input<int64_t, 1> query_length, Input<int64_t, 1> key_start, Input<int64_t, 1> key_length,
                        OptionalInput<int64_t, 0> seed, OptionalInput<int64_t, 1> key, OptionalInput<int64_t, 1> t,
                        Input<T, 2> o, Input<T, 2> log_sum, Array<T, 2> dq, std::optional<Array<T, 2>> dk,
                        std::optional<Array<T, 2>> dv, int64_t heads, int64_t query_step, int64_t key_step, bool causal,
                        double scale, double p, int64_t layer, int threads) {
  const Given<T> given{q, k, v, seen, added, slopes, query_start, query_length, key_start, key_length, seed, key, t,
                       heads, query_step, key_step, causal, scale, p, layer, threads};
  int64_t longest[2], tokens[2];
  const auto in = given.checked(longest, tokens);
  const auto& z = in.sizes;
  check_apart(in.keys, z.B, z.M);
  check(size(do_, 0) == z.N && size(do_, 1) == z.A * z.G, "do must be (N, A * G)");
  check(size(o, 0) == z.N && size(o, 1) == z.A * z.G, "o must be (N, A * G)");
  check(size(log_sum, 0) == z.N && size(log_sum, 1) == z.A, "log_sum must be (N, A)");
  check(size(dq, 0) == z.N && size(dq, 1) == z.q, "dq must have the shape of q");
  check(dk.has_value() == k.has_value() && dv.has_value() == v.has_value(), "dk and dv must be there where k and v are");
  check(!dk || (size(*dk, 0) == z.M && size(*dk, 1) == z.k), "dk must have the shape of k");
  check(!dv || (size(*dv, 0) == z.M && size(*dv, 1) == z.v), "dv must have the shape of v");
  const nb::gil_scoped_release release;
  in_large_pages(dq), in_large_pages(dk), in_large_pages(dv);
  if (tokens[0] < z.N) clear(dq);
  if (dk && tokens[1] < z.M) clear(*dk);
  if (dv && tokens[1] < z.M) clear(*dv);
  T* const dkeys = dk ? dk->data() : dq.data() + z.A * z.F;
  kernels<T>().attention_backward(
      {in, do_.data(), o.data(), log_sum.data(), dq.data(), dkeys, dv ? dv->data() : dkeys + z.A * z.F});
}

template <class T>
void define(nb::module_& m) {
  const auto n = [](const char* name) { return nb::arg(name).noconvert(); };
  m.def("attention_forward", attention_forward<T>, n("q"), n("k").none(), n("v").none(), n("seen").none(), n("added").none(),
        n("slopes").none(), n("query_start"), n("query_length"), n("key_start"), n("key_length"), n("seed").none(),
        n("key").none(), n("t").none(), n("o"), n("log_sum"), n("weights").none(), "heads"_a, "query_step"_a, "key_step"_a,
        "causal"_a, "scale"_a, "p"_a, "layer"_a, "threads"_a);
  m.def("attention_backward", attention_backward<T>, n("do"), n("q"), n("k").none(), n("v").none(), n("seen").none(),
        n("added").none(), n("slopes").none(), n("query_start"), n("query_length"), n("key_start"), n("key_length"),
        n("seed").none(), n("key").none(), n("t").none(), n("o"), n("log_sum"), n("dq"), n("dk").none(), n("dv").none(),
        "heads"_a, "query_step"_a, "key_step"_a, "causal"_a, "scale"_a, "p"_a, "layer"_a, "threads"_a);
}

}  // namespace

void define_attention(nb::module_& m) {
  define<float>(m);
  define<double>(m);
}
