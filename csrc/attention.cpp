// Scaled dot-product attention, block by block; the equations are in src/unrolled/equations/attention.py.
#include "few_queries.h"
#include "kernels.h"
#include "unrolled/parallel.h"
#include "unrolled/schedule.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

constexpr int64_t kChunk = 16 * kQueries;  // queries that share a packing of the keys in the forward

// ---- forward

template <class T>
struct ForwardScratch {
  T *keys, *values, *queries, *scores, *read, *sum, *highest, *total;
  int64_t ld_f, ld_g, ld_s;
  ForwardScratch(const AttentionSizes& z, const Extent& e, Carver<T> c)
      : ld_f(leading<T>(z.F)), ld_g(leading<T>(z.G)), ld_s(leading<T>(smaller(e.Tk, kKeys))) {
    const int64_t block = smaller(e.Tk, kKeys), chunk = smaller(e.Tq, kChunk), rows = smaller(e.Tq, kQueries);
    keys = c.take(z.F * padded<T>(block)), values = c.take(block * padded<T>(z.G));
    queries = c.take(rows * ld_f), scores = c.take(rows * ld_s), read = c.take(rows * ld_g);
    sum = c.take(chunk * ld_g), highest = c.take(chunk), total = c.take(chunk);
    end = c.next;
  }
  T* end;
};

template <class T>
void zero(T* row, int64_t from, int64_t to) {
  if (to > from) memset(row + from, 0, static_cast<size_t>(to - from) * sizeof(T));
}

template <class T>
void forward_piece(const AttentionForward<T>& p, const Head<T>& head, int64_t first, int64_t last, const ForwardScratch<T>& w) {
  const AttentionSizes& z = p.in.sizes;
  const int64_t G = padded<T>(z.G), count = last - first;
  memset(w.total, 0, static_cast<size_t>(count) * sizeof(T));
  memset(w.sum, 0, static_cast<size_t>(count * w.ld_g) * sizeof(T));
  for (int64_t i = 0; i < count; ++i) w.highest[i] = -static_cast<T>(__builtin_inf());
  const T* row[kQueries];
  const int64_t all = head.visible(last - 1);
  for (int64_t k0 = 0; k0 < all; k0 += kKeys) {
    const int64_t kn = smaller(kKeys, all - k0), columns = padded<T>(kn);
    pack_columns(z.F, columns, kPanel<T>, w.keys, [&](int64_t j) { return j < kn ? head.k(k0 + j) : nullptr; });
    pack_rows(kn, z.G, w.values, [&](int64_t j) { return head.v(k0 + j); });
    for (int64_t i0 = first; i0 < last; i0 += kQueries) {
      const int64_t n = smaller(kQueries, last - i0);
      const auto seen = [&](int64_t i) { return larger(0, smaller(kn, head.visible(i0 + i) - k0)); };
      const int64_t most = seen(n - 1);
      if (most == 0) continue;
      gather(w.queries, w.ld_f, n, z.F, [&](int64_t i) { return head.q(i0 + i); });
      for (int64_t i = 0; i < n; ++i) row[i] = w.queries + i * w.ld_f;
      products(row, n, w.keys, z.F, columns, w.scores, w.ld_s, seen);
      T former[kQueries];
      for (int64_t i = 0; i < n; ++i) {
        T* const s = w.scores + i * w.ld_s;
        former[i] = soften(head, s, i0 + i, k0, seen(i), w.highest[i0 - first + i], w.total[i0 - first + i]);
        zero(s, padded<T>(seen(i)), most);
        row[i] = s;
      }
      T* const sum = w.sum + (i0 - first) * w.ld_g;
      T* const read = k0 ? w.read : sum;
      read_rows(row, n, w.values, kn, G, read, w.ld_g, seen);  // (5)
      for (int64_t i = 0; k0 && i < n; ++i)
        for (int64_t c = i * w.ld_g; c < i * w.ld_g + G; c += Simd<T>::width)
          store(sum + c, load(sum + c) * former[i] + load(w.read + c));
    }
  }
  for (int64_t i = 0; i < count; ++i) finish(p, head, first + i, w.sum + i * w.ld_g, w.highest[i], w.total[i]);
}

// Line (4) for a piece of the queries, now that their sums are known.
template <class T>
void weights_of(const AttentionForward<T>& p, const Head<T>& head, int64_t first, int64_t last, const ForwardScratch<T>& w) {
  const AttentionSizes& z = p.in.sizes;
  const T* row[kQueries];
  const int64_t all = head.visible(last - 1);
  for (int64_t k0 = 0; k0 < all; k0 += kKeys) {
    const int64_t kn = smaller(kKeys, all - k0), columns = padded<T>(kn);
    pack_columns(z.F, columns, kPanel<T>, w.keys, [&](int64_t j) { return j < kn ? head.k(k0 + j) : nullptr; });
    for (int64_t i0 = first; i0 < last; i0 += kQueries) {
      const int64_t n = smaller(kQueries, last - i0);
      const auto seen = [&](int64_t i) { return larger(0, smaller(kn, head.visible(i0 + i) - k0)); };
      gather(w.queries, w.ld_f, n, z.F, [&](int64_t i) { return head.q(i0 + i); });
      for (int64_t i = 0; i < n; ++i) row[i] = w.queries + i * w.ld_f;
      products(row, n, w.keys, z.F, columns, w.scores, w.ld_s, seen);
      for (int64_t i = 0; i < n; ++i) {
        T* const s = w.scores + i * w.ld_s;
        T* const out = p.weights + ((head.b * z.A + head.a) * p.longest_query + i0 + i) * p.longest_key + k0;
        const int64_t m = seen(i);
        T factor = head.factor;
        if (head.biased) head.bias(s, i0 + i, k0, m), factor = 1;
        const T base = kUnit<T> * p.log_sum[head.query_row(i0 + i) * z.A + head.a];
        for (int64_t j = 0; j < m; j += Simd<T>::width) store(s + j, power(load(s + j) * factor - base) * head.keeping.factor);
        if (p.in.dropping.p > 0) head.drop(s, i0 + i, k0, m);
        for (int64_t j = 0; j < m; ++j) out[j] = s[j];
      }
    }
  }
}

}  // namespace

template <class T>
void attention_forward(const AttentionForward<T>& p) {
  const AttentionSizes& z = p.in.sizes;
  const Extent extent(p.in);
  const double operations = extent.work * static_cast<double>(z.A * (z.F + z.G + 20));
  const int threads = useful_threads(z.threads, operations);
  const bool few = extent.Tq <= kFew;
  if (few) forward_of_few(p, threads);
  if (few && !p.weights) return;
  int64_t n = 0;
  for (int64_t b = 0; b < z.B; ++b) n += z.A * ceil_div(p.in.queries.length[b], kChunk);
  const Scratch list(static_cast<size_t>(n) * sizeof(Piece));
  Piece* const pieces = reinterpret_cast<Piece*>(list.data());
  n = 0;
  for (int64_t b = 0; b < z.B; ++b)
    for (int64_t a = 0; a < z.A; ++a)
      for (int64_t i = 0; i < p.in.queries.length[b]; i += kChunk) {
        const int64_t last = smaller(i + kChunk, p.in.queries.length[b]);
        pieces[n++] = {b, a, i, last, 0, Extent::scores(p.in, b, i, last, 0, p.in.keys.length[b])};
      }
  heaviest_first(pieces, n);
  const int workers = static_cast<int>(smaller(threads, n));
  const int64_t share = ForwardScratch<T>(z, extent, Carver<T>{nullptr}).end - static_cast<T*>(nullptr);
  const Scratch scratch(static_cast<size_t>(share * workers) * sizeof(T));
  share_out(workers, n, [&](int64_t worker, int64_t i) {
    const Piece& piece = pieces[i];
    const ForwardScratch<T> own(z, extent, Carver<T>{reinterpret_cast<T*>(scratch.data()) + worker * share});
    const Head<T> head(p.in, piece.sequence, piece.head);
    if (!few) forward_piece(p, head, piece.first, piece.last, own);
    if (p.weights) weights_of(p, head, piece.first, piece.last, own);
  });
}

// ---- backward

namespace {

template <class T>
struct BackwardScratch {
  T *keys, *values, *rows_of_keys, *queries, *outputs, *scores, *dscores, *read, *dkeys, *dvalues, *common, *log_sum;
  int64_t ld_f, ld_g, ld_s;
  BackwardScratch(const AttentionSizes& z, const Extent& e, Carver<T> c)
      : ld_f(leading<T>(z.F)), ld_g(leading<T>(z.G)), ld_s(leading<T>(smaller(e.Tk, kKeys))) {
    const int64_t block = smaller(e.Tk, kKeys), rows = smaller(e.Tq, kQueries);
    keys = c.take(z.F * padded<T>(block)), values = c.take(z.G * padded<T>(block));
    rows_of_keys = c.take(block * padded<T>(z.F));
    queries = c.take(rows * ld_f), outputs = c.take(rows * ld_g), read = c.take(rows * ld_f);
    scores = c.take(rows * ld_s), dscores = c.take(rows * ld_s);
    dkeys = c.take(block * ld_f), dvalues = c.take(block * ld_g);
    common = c.take(e.Tq), log_sum = c.take(e.Tq);
    end = c.next;
  }
  T* end;
};

// The row of query i and n keys: s, products of q and k, becomes w without its scale; ds, products of do and v, becomes ds.
template <class T>
void harden(const Head<T>& head, T* s, T* ds, int64_t i, int64_t k0, int64_t n, T log_sum, T common) {
  constexpr int W = Simd<T>::width;
  T factor = head.factor;
  if (head.biased) head.bias(s, i, k0, n), factor = 1;
  for (int64_t j = n; j < padded<T>(n); ++j) s[j] = -static_cast<T>(__builtin_inf());
  const T base = kUnit<T> * log_sum;
  if (head.in.dropping.p > 0) {
    head.drop(ds, i, k0, n);
    for (int64_t j = 0; j < n; j += W) {
      const Vec<T> p = power(load(s + j) * factor - base);  // (3)
      store(s + j, p);
      store(ds + j, p * (load(ds + j) * head.keeping.factor - common));  // (4), (3), (2)
    }
    head.drop(s, i, k0, n);  // (4)
    return;
  }
  for (int64_t j = 0; j < n; j += W) {
    const Vec<T> p = power(load(s + j) * factor - base);  // (3)
    store(s + j, p);
    store(ds + j, p * (load(ds + j) - common));  // (3), (2)
  }
}

// out[j] += the sum over queries of s[query][j] times its row of b, for the keys [0, most) of a block from k0 on.
template <class T>
void add_rows(const Head<T>& head, const T* const* s, int64_t i0, int64_t n, int64_t k0, int64_t most, const T* b, int64_t ld,
              int64_t C, T* out) {
  for_panels<T>(C, kPanel<T>, [&](int64_t c, int64_t width) {
    for_tiles(most, [&](int64_t j, int height) {
      const int64_t skip = larger(0, head.first_query(k0 + j) - i0);
      kOuter<T>[width / Simd<T>::width - 1][height - 1](s + skip, j, b + skip * ld + c, ld, n - skip, out + j * ld + c, ld);
    });
  });
}

template <class T>
void add_row(T* sum, const T* row, int64_t n, T factor) {
  for (int64_t c = 0; c < n; c += Simd<T>::width) store(sum + c, load(sum + c, n - c) + factor * load(row + c, n - c), n - c);
}

// The keys [first, last) of a head. dq of its queries, rows `step` apart: what these keys pass on.
template <class T>
void backward_piece(const AttentionBackward<T>& p, const Head<T>& head, int64_t first, int64_t last, const BackwardScratch<T>& w,
                    T* dq, int64_t step) {
  const AttentionSizes& z = p.in.sizes;
  const int64_t F = padded<T>(z.F), G = padded<T>(z.G);
  const T factor = static_cast<T>(z.scale);
  const auto output = [&](const T* x, int64_t i) { return x + (head.query_row(i) * z.A + head.a) * z.G; };
  for (int64_t i = 0; i < head.Tq; ++i) {
    Vec<T> sum{};
    for (int64_t c = 0; c < z.G; c += Simd<T>::width)
      sum += load(output(p.do_, i) + c, z.G - c) * load(output(p.o, i) + c, z.G - c);
    w.common[i] = total<T>(sum);
    w.log_sum[i] = p.log_sum[head.query_row(i) * z.A + head.a];
    zero(dq + i * step, 0, z.F);
  }
  const T *row[kQueries], *drow[kQueries];
  for (int64_t k0 = first; k0 < last; k0 += kKeys) {
    const int64_t kn = smaller(kKeys, last - k0), columns = padded<T>(kn);
    pack_columns(z.F, columns, kPanel<T>, w.keys, [&](int64_t j) { return j < kn ? head.k(k0 + j) : nullptr; });
    pack_columns(z.G, columns, kPanel<T>, w.values, [&](int64_t j) { return j < kn ? head.v(k0 + j) : nullptr; });
    pack_rows(kn, z.F, w.rows_of_keys, [&](int64_t j) { return head.k(k0 + j); });
    memset(w.dkeys, 0, static_cast<size_t>(kn * w.ld_f) * sizeof(T));
    memset(w.dvalues, 0, static_cast<size_t>(kn * w.ld_g) * sizeof(T));
    for (int64_t i0 = head.first_query(k0); i0 < head.Tq; i0 += kQueries) {
      const int64_t n = smaller(kQueries, head.Tq - i0);
      const auto seen = [&](int64_t i) { return larger(0, smaller(kn, head.visible(i0 + i) - k0)); };
      const int64_t most = seen(n - 1);
      gather(w.queries, w.ld_f, n, z.F, [&](int64_t i) { return head.q(i0 + i); });
      gather(w.outputs, w.ld_g, n, z.G, [&](int64_t i) { return output(p.do_, i0 + i); });
      for (int64_t i = 0; i < n; ++i) row[i] = w.queries + i * w.ld_f, drow[i] = w.outputs + i * w.ld_g;
      products(row, n, w.keys, z.F, columns, w.scores, w.ld_s, seen);
      products(drow, n, w.values, z.G, columns, w.dscores, w.ld_s, seen);  // (5)
      for (int64_t i = 0; i < n; ++i) {
        T *const s = w.scores + i * w.ld_s, *const ds = w.dscores + i * w.ld_s;
        harden(head, s, ds, i0 + i, k0, seen(i), w.log_sum[i0 + i], w.common[i0 + i]);
        zero(s, padded<T>(seen(i)), most), zero(ds, padded<T>(seen(i)), most);
        row[i] = s, drow[i] = ds;
      }
      add_rows(head, row, i0, n, k0, most, w.outputs, w.ld_g, G, w.dvalues);   // (5)
      add_rows(head, drow, i0, n, k0, most, w.queries, w.ld_f, F, w.dkeys);  // (1)
      read_rows(drow, n, w.rows_of_keys, kn, F, w.read, w.ld_f, seen);       // (1)
      for (int64_t i = 0; i < n; ++i)
        add_row(dq + (i0 + i) * step, w.read + i * w.ld_f, z.F, factor);
    }
    for (int64_t j = 0; j < kn; ++j) {
      T* const dk = p.dk + head.key_row(k0 + j) * z.k + head.a * z.F;
      T* const dv = p.dv + head.key_row(k0 + j) * z.v + head.a * z.G;
      for (int64_t c = 0; c < z.F; c += Simd<T>::width) store(dk + c, factor * load(w.dkeys + j * w.ld_f + c), z.F - c);
      for (int64_t c = 0; c < z.G; c += Simd<T>::width)
        store(dv + c, head.keeping.factor * load(w.dvalues + j * w.ld_g + c), z.G - c);
    }
  }
}

}  // namespace

template <class T>
void attention_backward(const AttentionBackward<T>& p) {
  const AttentionSizes& z = p.in.sizes;
  const Extent extent(p.in);
  const int64_t ld = leading<T>(z.F);
  const double operations = extent.work * static_cast<double>(z.A * (3 * z.F + 2 * z.G + 20));
  const int threads = useful_threads(z.threads, operations);
  // where a head is too much of the whole for one thread, its keys are cut, and each part but the first has a dq of its own
  const auto parts_of = [&](int64_t b) {
    const double own = Extent::scores(p.in, b, 0, p.in.queries.length[b], 0, p.in.keys.length[b]);
    const double wanted = 2 * threads * own / (extent.work * static_cast<double>(z.A));
    return threads == 1 ? 1 : larger(1, smaller(ceil_div(p.in.keys.length[b], kKeys), static_cast<int64_t>(wanted + 0.999)));
  };
  int64_t n = 0, numbers = 0;
  for (int64_t b = 0; b < z.B; ++b) n += z.A * parts_of(b), numbers += z.A * (parts_of(b) - 1) * p.in.queries.length[b] * ld;
  const Scratch list(static_cast<size_t>(n) * sizeof(Piece)), parts(static_cast<size_t>(numbers) * sizeof(T));
  Piece* const pieces = reinterpret_cast<Piece*>(list.data());
  T* const partial = reinterpret_cast<T*>(parts.data());
  n = numbers = 0;
  for (int64_t b = 0; b < z.B; ++b)
    for (int64_t a = 0; a < z.A; ++a)
      for (int64_t part = 0, count = parts_of(b), blocks = ceil_div(p.in.keys.length[b], kKeys); part < count; ++part) {
        const int64_t first = part * blocks / count * kKeys;
        const int64_t last = smaller((part + 1) * blocks / count * kKeys, p.in.keys.length[b]);
        const double work = Extent::scores(p.in, b, 0, p.in.queries.length[b], first, last);
        pieces[n++] = {b, a, first, last, part ? numbers : -1, work};
        if (part) numbers += p.in.queries.length[b] * ld;
      }
  heaviest_first(pieces, n);
  const int workers = static_cast<int>(smaller(threads, n));
  const int64_t share = BackwardScratch<T>(z, extent, Carver<T>{nullptr}).end - static_cast<T*>(nullptr);
  const Scratch scratch(static_cast<size_t>(share * workers) * sizeof(T));
  share_out(workers, n, [&](int64_t worker, int64_t i) {
    const Piece& piece = pieces[i];
    const BackwardScratch<T> own(z, extent, Carver<T>{reinterpret_cast<T*>(scratch.data()) + worker * share});
    const Head<T> head(p.in, piece.sequence, piece.head);
    T* const dq = p.dq + head.query_row(0) * z.q + head.a * z.F;
    if (piece.part < 0)
      backward_piece(p, head, piece.first, piece.last, own, dq, p.in.queries.step * z.q);
    else
      backward_piece(p, head, piece.first, piece.last, own, partial + piece.part, ld);
  });
  if (numbers == 0) return;
  parallel_for(threads, z.B * z.A, [&](int64_t place) {
    const Head<T> head(p.in, place / z.A, place % z.A);
    int64_t from = 0;
    for (int64_t b = 0; b < head.b; ++b) from += z.A * (parts_of(b) - 1) * p.in.queries.length[b] * ld;
    const int64_t more = parts_of(head.b) - 1;
    for (int64_t part = 0; part < more; ++part)
      for (int64_t i = 0; i < head.Tq; ++i)
        add_row(p.dq + head.query_row(i) * z.q + head.a * z.F, partial + from + ((head.a * more + part) * head.Tq + i) * ld, z.F,
                T(1));
  });
}

template void attention_forward(const AttentionForward<float>&);
template void attention_forward(const AttentionForward<double>&);
template void attention_backward(const AttentionBackward<float>&);
template void attention_backward(const AttentionBackward<double>&);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
