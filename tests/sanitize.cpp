// Every kernel of every CPU variant over odd shapes, on buffers that end where their array ends; built with sanitizers by
// sanitize.sh. Also demands that every output is assigned and that the variants agree.
#include "sanitize.h"

namespace {

using namespace sanitize;

struct RecurrentCase {
  unrolled::Cell cell;
  int64_t I, H, P, D, step, bptt;
  bool bias, keep, need_dx, norm, mask, zoneout, seeded;
  std::vector<int64_t> start, length;
  int64_t R;
};

template <class T>
Outputs recurrent(const Kernels<T>& kernels, const RecurrentCase& c, int threads) {
  using unrolled::Cell;
  const bool memory = c.cell == Cell::lstm || c.cell == Cell::lstm_options, own = c.cell == Cell::lstm_options;
  const bool gru = c.cell == Cell::gru || c.cell == Cell::gru_before;
  const int64_t G = memory ? 4 : gru ? 3 : 1, P = gru ? c.H : c.P;
  const bool project = P != c.H, plain = !own && c.cell != Cell::gru_before && !project && !c.norm && !c.mask && !c.zoneout;
  int64_t blocks = G == 1 ? 0 : c.cell == Cell::gru_before ? 3 : 4;
  if (!plain) blocks += 1 + memory + (c.norm ? 2 * G + own : 0);
  const int64_t B = static_cast<int64_t>(c.length.size()), D = c.D, DH = D * c.H, DP = D * P, GH = DH * G;
  const int64_t BP = DP * B, BH = DH * B;
  Random<T> x(c.R * c.I), h0(BP), c0(memory ? BH : 0), weight_ih(GH * c.I, 0.3), weight_hh(GH * P, 0.3 / std::sqrt(c.H)),
      bias_ih(GH), bias_hh(GH), dy(c.R * DP), dh_last(BP), dc_last(memory ? BH : 0);
  Random<T> weight_hr(project ? DP * c.H : 0, 0.3), norm_ih(c.norm ? GH : 0), norm_hh(c.norm ? GH : 0),
      peephole(own ? 3 * DH : 0), norm_c(own && c.norm ? DH : 0), bias_c(own && c.norm && c.bias ? DH : 0),
      mask(c.mask ? BP : 0);
  Buffer<int64_t> start(B, 0), length(B, 0), keys(B, 0), seed(1, 12345);
  for (int64_t b = 0; b < B; ++b) start[b] = c.start[b], length[b] = c.length[b], keys[b] = 7 * b;
  const auto given = [](Buffer<T>& buffer, bool wanted) -> T* { return wanted ? +buffer : nullptr; };
  const unrolled::RecurrentOptions<T> options{given(weight_hr, project), given(norm_ih, c.norm), given(norm_hh, c.norm),
                                              given(peephole, own), given(norm_c, own && c.norm),
                                              given(bias_c, own && c.norm && c.bias), given(mask, c.mask),
                                              c.zoneout ? 0.3 : 0, c.zoneout && memory ? 0.6 : 0,
                                              c.zoneout && c.seeded ? +seed : nullptr, keys, 2};
  const int64_t rows_kept = c.keep ? c.R : 0;
  int64_t tokens = 0;
  for (const int64_t n : c.length) tokens += n;
  const T untouched = tokens < c.R ? T(0) : std::numeric_limits<T>::quiet_NaN();  // rows of no sequence are the caller's
  Buffer<T> y(c.R * DP, untouched), h_last(BP), c_last(memory ? BH : 0), h_prev(rows_kept * DP, untouched),
      c_prev(memory ? rows_kept * DH : 0, untouched), kept(rows_kept * DH * blocks, untouched),
      scales(c.norm ? rows_kept * D * unrolled::kScales : 0, untouched);
  const unrolled::RecurrentSizes sizes{c.R, B, D, c.I, c.H, P, blocks, plain, c.bptt, threads};
  const unrolled::Rows rows{start, length, c.step};
  T* const kept_or_null = given(kept, c.keep && blocks);
  kernels.recurrent_forward(
      c.cell, {sizes, rows, x, h0, given(c0, memory), weight_ih, weight_hh, given(bias_ih, c.bias), given(bias_hh, c.bias),
               options, y, h_last, given(c_last, memory), given(h_prev, c.keep), given(c_prev, c.keep && memory),
               kept_or_null, given(scales, c.keep && c.norm)});
  ++calls;
  Outputs out;
  out.add(y), out.add(h_last), out.add(c_last);
  if (!c.keep) return out;
  out.add(h_prev), out.add(c_prev), out.add(kept), out.add(scales);
  const bool per_step = c.bptt > 0;
  Buffer<T> dx(c.need_dx ? D * c.R * c.I : 0, untouched), dh0(BP), dc0(memory ? BH : 0), dweight_ih(GH * c.I), dweight_hh(GH * P),
      dbias_ih(GH), dbias_hh(GH), dweight_hr(weight_hr.size()), dnorm_ih(norm_ih.size()), dnorm_hh(norm_hh.size()),
      dpeephole(peephole.size()), dnorm_c(norm_c.size()), dbias_c(bias_c.size()), dh(per_step ? c.R * DP : 0, untouched),
      dc(per_step && memory ? c.R * DH : 0, untouched);
  kernels.recurrent_backward(
      c.cell, {sizes, rows, dy, dh_last, given(dc_last, memory), x, weight_ih, weight_hh, options, h_prev,
               given(c_prev, memory), kept_or_null, given(scales, c.norm), h_last, given(c_last, memory),
               given(dx, c.need_dx), dh0, given(dc0, memory), dweight_ih, dweight_hh, dbias_ih, dbias_hh,
               given(dweight_hr, project), given(dnorm_ih, c.norm), given(dnorm_hh, c.norm), given(dpeephole, own),
               given(dnorm_c, own && c.norm), given(dbias_c, own && c.norm && c.bias), given(dh, per_step),
               given(dc, per_step && memory)});
  ++calls;
  for (Buffer<T>* b : {&dx, &dh0, &dc0, &dweight_ih, &dweight_hh, &dbias_ih, &dbias_hh, &dweight_hr, &dnorm_ih, &dnorm_hh,
                       &dpeephole, &dnorm_c, &dbias_c, &dh, &dc})
    out.add(*b);
  return out;
}

template <class T>
Outputs linear(const Kernels<T>& kernels, int64_t N, int64_t I, int64_t O, bool bias, bool need_dx, int threads) {
  Random<T> x(N * I), weight(O * I), b(O), dy(N * O);
  Buffer<T> y(N * O), dx(need_dx ? N * I : 0), dweight(O * I), dbias(O);
  const unrolled::LinearSizes sizes{N, I, O, threads};
  kernels.linear_forward(sizes, x, weight, bias ? +b : nullptr, y);
  kernels.linear_backward(sizes, dy, x, weight, need_dx ? +dx : nullptr, dweight, dbias);
  calls += 2;
  Outputs out;
  out.add(y), out.add(dx), out.add(dweight), out.add(dbias);
  return out;
}

template <class T>
Outputs embedding(const Kernels<T>& kernels, int64_t N, int64_t V, int64_t E, int64_t padding, int threads) {
  Random<T> weight(V * E), dy(N * E);
  Buffer<int64_t> token(N, 0);
  for (int64_t& k : token) k = static_cast<int64_t>(generator() % static_cast<uint64_t>(V));
  Buffer<T> y(N * E), dweight(V * E);
  demand(kernels.embedding_forward(N, V, E, token, weight, threads, y) == -1, "a token of the table was refused");
  demand(kernels.embedding_backward(N, V, E, dy, token, padding, threads, dweight) == -1, "a token was refused");
  calls += 2;
  Outputs out;
  out.add(y), out.add(dweight);
  for (const int64_t wrong : {V, int64_t{-1}, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    if (N == 0) break;
    token[N / 2] = wrong;
    demand(kernels.embedding_forward(N, V, E, token, weight, threads, y) == N / 2, "a token outside was not found");
    demand(kernels.embedding_backward(N, V, E, dy, token, padding, threads, dweight) == N / 2, "a token outside was not found");
    calls += 2;
  }
  return out;
}

template <class T>
Outputs dropout(const Kernels<T>& kernels, int64_t N, int64_t F, double p, int threads) {
  Random<T> x(N * F);
  Buffer<int64_t> key(N, 0), t(N, 0);
  for (int64_t n = 0; n < N; ++n) key[n] = static_cast<int64_t>(generator()), t[n] = static_cast<int64_t>(generator());
  Buffer<T> y(N * F);
  kernels.dropout_forward({N, F, static_cast<int64_t>(generator()), 3, p, threads}, x, key, t, y);
  ++calls;
  Outputs out;
  out.add(y);
  return out;
}

template <class T>
Outputs mean_squared_error(const Kernels<T>& kernels, int64_t n, int threads) {
  Random<T> y(n), target(n);
  Buffer<T> loss(1), dy(n);
  kernels.mean_squared_error_forward(n, y, target, threads, loss);
  kernels.mean_squared_error_backward(n, T(0.7), y, target, threads, dy);
  calls += 2;
  Outputs out;
  out.add(loss), out.add(dy);
  return out;
}

template <class T>
Outputs cross_entropy(const Kernels<T>& kernels, int64_t N, int64_t C, int64_t ignore, bool weights, double smoothing,
                      int threads) {
  Random<T> logits(N * C, 3), weight(C, 0.1), dloss(N);
  for (T& w : weight) w = std::abs(w);
  Buffer<int64_t> target(N, 0);
  for (int64_t& k : target) k = static_cast<int64_t>(generator() % static_cast<uint64_t>(C));
  for (int64_t n = 0; n < N; n += 3) target[n] = ignore;
  Buffer<T> loss(N), log_sum(N), dlogits(N * C);
  const unrolled::CrossEntropySizes sizes{N, C, ignore, smoothing, threads};
  const T* const w = weights ? +weight : nullptr;
  demand(kernels.cross_entropy_forward(sizes, logits, target, w, loss, log_sum) == -1, "a class was refused");
  kernels.cross_entropy_backward(sizes, dloss, logits, log_sum, target, w, dlogits);
  calls += 2;
  Outputs out;
  out.add(loss), out.add(log_sum), out.add(dlogits);
  for (const int64_t wrong : {C, int64_t{-1}, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    if (N == 0) break;
    target[N / 2] = wrong;
    demand(kernels.cross_entropy_forward(sizes, logits, target, w, loss, log_sum) == N / 2, "no class, and not found");
    ++calls;
  }
  return out;
}

template <class T>
Outputs functions(const Kernels<T>& kernels, int64_t n) {
  Random<T> x(n, 3);
  const T edges[] = {0, -0.0, 1e-30, -1e-30, 88.8, -104, 710, -746, 1e30, -1e30};
  for (int64_t i = 0; i < n && i < 10; ++i) x[i] = edges[i];
  Buffer<T> tanh(n), exp(n);
  kernels.tanh(n, x, tanh), kernels.exp(n, x, exp);
  calls += 2;
  Outputs out;
  out.add(tanh);
  for (const T e : exp) demand(!std::isnan(e), "exp gave a NaN");
  return out;
}

// Bits of `flags` choose the options; those from 64 on need phases.
RecurrentCase recurrent_case(int64_t I, int64_t H, int64_t D, const std::vector<int64_t>& length, int layout, int flags) {
  const auto bit = [&](int k) { return (flags >> k & 1) != 0; };
  RecurrentCase c{{}, I, H, bit(6) ? (H + 1) / 2 : H, D, 1, bit(4) ? 1 + flags % 3 : 0, bit(1), !bit(2), !bit(3), bit(7),
                  bit(8), bit(9), !bit(5), {}, length, 0};
  const auto B = static_cast<int64_t>(length.size());
  int64_t longest = 0, tokens = 0;
  for (const int64_t n : length) longest = std::max(longest, n);
  for (int64_t b = 0; b < B; ++b) {
    c.start.push_back(layout == 0 ? tokens : layout == 1 ? b : b * longest);
    tokens += length[b];
  }
  c.R = layout == 0 ? tokens : B * longest;
  c.step = layout == 1 ? B : 1;
  return c;
}

// relu is left out where rounding may take a unit over its kink.
void on_every_cell(RecurrentCase c) {
  using unrolled::Cell;
  for (const auto& [cell, name] : {std::pair{Cell::rnn_tanh, "rnn_tanh"}, {Cell::rnn_relu, "rnn_relu"}, {Cell::lstm, "lstm"},
                                   {Cell::lstm_options, "lstm_options"}, {Cell::gru, "gru"}, {Cell::gru_before, "gru_before"}}) {
    if (cell == Cell::rnn_relu && (c.H >= 20 || c.norm)) continue;
    c.cell = cell;
    on_every_variant(name, [&](const auto& kernels, int threads) { return recurrent(kernels, c, threads); });
  }
}

}  // namespace

int main() {
  const std::vector<int64_t> sizes = {1, 2, 3, 5, 8, 15, 17, 31, 33, 64, 67, 130};
  const std::vector<std::vector<int64_t>> lengths = {
      {}, {0}, {7}, {3, 1, 0, 5}, {2, 2, 2, 2, 2, 2, 2}, {1, 5, 4, 4, 0, 1, 7, 2, 2, 6, 6, 3, 1}};
  int flags = 0;
  for (const int64_t H : sizes)
    for (const auto& length : lengths)
      for (const int64_t D : {1, 2}) {
        const int64_t I = sizes[static_cast<size_t>(++flags) % sizes.size()];
        on_every_cell(recurrent_case(I, H, D, length, flags % 3, flags % 64));
        on_every_cell(recurrent_case(I, H, D, length, flags % 3, (flags * 37) % 1024));
      }
  for (const int options : {2, 2 + 64 + 128 + 256 + 512}) {
    on_every_cell(recurrent_case(9, 40, 2, std::vector<int64_t>(300, 4), 1, options));  // more rows than one block
    on_every_cell(recurrent_case(3, 70, 1, {611, 2, 300}, 2, options));
  }
  on_every_cell(recurrent_case(131, 260, 1, {3, 0, 1, 2}, 1, 2));  // weights so large that threads share each step
  for (const int64_t N : {0, 1, 7, 37, 2500})  // the last is work enough for several threads
    for (const int64_t a : sizes) {
      if (N > 1000 && a != 67) continue;
      const int64_t b = sizes[static_cast<size_t>(++flags) % sizes.size()];
      on_every_variant("linear", [&](const auto& kernels, int threads) {
        return linear(kernels, N, a, b, flags % 2 == 0, flags % 3 > 0, threads);
      });
      on_every_variant("embedding", [&](const auto& kernels, int threads) {
        return embedding(kernels, N, b, a, flags % 3 ? -1 : b - 1, threads);
      });
      on_every_variant("dropout", [&](const auto& kernels, int threads) {
        return dropout(kernels, N, a, flags % 5 / 4.0, threads);
      });
      on_every_variant("mean_squared_error", [&](const auto& kernels, int threads) {
        return mean_squared_error(kernels, N * a, threads);
      });
      on_every_variant("cross_entropy", [&](const auto& kernels, int threads) {
        return cross_entropy(kernels, N, a, flags % 2 ? 0 : -100, flags % 3 == 0, flags % 4 / 4.0, threads);
      });
      on_every_variant("tanh and exp", [&](const auto& kernels, int) { return functions(kernels, a); });
    }
  sanitize::attention(), sanitize::norm(), sanitize::feed_forward(), sanitize::output();
  std::printf("%lld kernel calls, nothing found\n", static_cast<long long>(calls));
}
