// Additive attention; the equations are in src/unrolled/equations/additive_attention.py.
//
// Some keys of a query at a time: in the forward with a running maximum, in the backward from the logarithm of the sum. tanh is
// computed again there; it is never kept for more than these keys.
#include "gemm.h"
#include "kernels.h"
#include "unrolled/parallel.h"
#include "unrolled/schedule.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

constexpr int64_t kKeys = 16;    // at a time: a whole number of vectors of every kind
constexpr int64_t kGroups = 4;   // for each thread

int64_t row_of(const Rows& rows, int64_t b, int64_t t) { return rows.start[b] + t * rows.step; }

struct Place {
  int64_t sequence, step;
};

// Cuts the steps of all sequences into groups of nearly equal work: a step costs as much as there are steps of the other kind.
// Group g goes from place[g] to place[g + 1].
void cut(int64_t B, const int64_t* steps, const int64_t* others, int64_t groups, Place* place) {
  int64_t total = 0, before = 0, b = 0;
  for (int64_t i = 0; i < B; ++i) total += steps[i] * others[i];
  place[0] = {0, 0};
  for (int64_t g = 1; g < groups; ++g) {
    const int64_t target = total / groups * g;
    for (; b < B && before + steps[b] * others[b] <= target; ++b) before += steps[b] * others[b];
    place[g] = {b, b < B ? (target - before) / others[b] : 0};
  }
  place[groups] = {B, 0};
}

// f(sequence, first step, end) for what a group has of each sequence; of one without steps too, once.
template <class F>
void for_sequences(const Place* place, const int64_t* steps, int64_t B, F&& f) {
  for (int64_t b = place[0].sequence; b < B && b <= place[1].sequence; ++b) {
    const int64_t first = b == place[0].sequence ? place[0].step : 0;
    const int64_t end = b == place[1].sequence ? place[1].step : steps[b];
    if (first < end || (b < place[1].sequence && !steps[b])) f(b, first, end);
  }
}

int64_t groups_of(const AdditiveAttentionSizes& z, const Rows& queries, const Rows& keys, double cost) {
  double pairs = 0;
  for (int64_t b = 0; b < z.B; ++b) pairs += static_cast<double>(queries.length[b]) * static_cast<double>(keys.length[b]);
  const int threads = useful_threads(z.threads, cost * pairs * static_cast<double>(z.H + z.D));
  return threads > 1 ? threads * kGroups : 1;
}

template <class T>
T number(const AdditiveMask<T>& mask, int64_t b, int64_t i, int64_t j) {
  return mask.data ? mask.data[b * mask.sequence + i * mask.query + j * mask.key] : 0;
}

// Lines (1) and (2) but for the mask, of one query and one key; keeps a where it is wanted.
template <class T>
T score(const T* q, const T* k, const T* v, int64_t H, T* keep) {
  Vec<T> sum{};
  for (int64_t h = 0; h < H; h += Simd<T>::width) {
    const Vec<T> a = vtanh(load(q + h, H - h) + load(k + h, H - h));
    if (keep) store(keep + h, a);
    sum += load(v + h, H - h) * a;
  }
  return total<T>(sum);
}

template <class T>
T exp_of(T x) {
  return vexp(Vec<T>{} + x)[0];
}

template <class T>
void exp_of(T* x, int64_t n, T minus) {
  for (int64_t i = 0; i < n; i += Simd<T>::width) store(x + i, vexp(load(x + i, n - i) - minus), n - i);
}

template <class T>
void scale(T* x, int64_t n, T factor) {
  for (int64_t i = 0; i < n; i += Simd<T>::width) store(x + i, load(x + i, n - i) * factor, n - i);
}

// One query: reads its keys once.
template <class T>
void attend(const AdditiveAttentionForward<T>& p, int64_t b, int64_t i) {
  const int64_t H = p.sizes.H, D = p.sizes.D, n = p.keys.length[b], at = row_of(p.queries, b, i);
  T *const o = p.o + at * D, *const weights = p.weights ? p.weights + (b * p.Q + i) * p.K : nullptr;
  memset(o, 0, static_cast<size_t>(D) * sizeof(T));
  T largest = static_cast<T>(-__builtin_inf()), sum = 0;
  for (int64_t first = 0; first < n; first += kKeys) {
    const int64_t count = n - first < kKeys ? n - first : kKeys;
    T e[kKeys], before = largest;
    for (int64_t j = 0; j < count; ++j) {
      const T* const k = p.k + row_of(p.keys, b, first + j) * H;
      e[j] = score<T>(p.q + at * H, k, p.v, H, nullptr) + number(p.mask, b, i, first + j);  // (1), (2)
      largest = e[j] > largest ? e[j] : largest;
    }
    if (weights) memcpy(weights + first, e, static_cast<size_t>(count) * sizeof(T));
    const T base = largest < 0 && largest * 2 == largest ? 0 : largest;  // -inf: nothing to attend to so far
    const T kept = exp_of(before - base);
    exp_of(e, count, base);
    sum *= kept;
    for (int64_t j = 0; j < count; ++j) sum += e[j];
    for (int64_t d = 0; d < D; d += Simd<T>::width) {
      Vec<T> mean = kept * load(o + d, D - d);
      for (int64_t j = 0; j < count; ++j) mean += e[j] * load(p.value + row_of(p.keys, b, first + j) * D + d, D - d);
      store(o + d, mean, D - d);
    }
  }
  const T log_sum = sum == 0 ? 0 : largest + static_cast<T>(__builtin_log(static_cast<double>(sum)));  // (3)
  p.log_sum[at] = log_sum;
  if (sum != 0) scale(o, D, 1 / sum);  // (5)
  if (weights) exp_of(weights, n, log_sum);  // (4)
}

// What one group of keys adds up: its dv, and dq where another group owns the sequence.
template <class T>
struct Sums {
  T *a, *dv, *dq;  // [kKeys, padded H], [padded H], [longest, H]
};

// A query and `count` keys.
template <class T>
void pass_back(const AdditiveAttentionBackward<T>& p, int64_t b, int64_t i, int64_t first, int64_t count, const Sums<T>& sums,
               T* dq) {
  const int64_t H = p.sizes.H, D = p.sizes.D, at = row_of(p.queries, b, i), ld = padded<T>(H);
  const T *const d_o = p.d_o + at * D, *const o = p.o + at * D;
  int64_t row[kKeys];
  T prob[kKeys], de[kKeys];
  for (int64_t j = 0; j < count; ++j) {
    row[j] = row_of(p.keys, b, first + j);
    prob[j] = score(p.q + at * H, p.k + row[j] * H, p.v, H, sums.a + j * ld) + number(p.mask, b, i, first + j);
  }
  exp_of(prob, count, p.log_sum[at]);  // (4)
  for (int64_t j = 0; j < count; ++j) {
    Vec<T> slope{};  // do . (value - o): the row identity
    for (int64_t d = 0; d < D; d += Simd<T>::width) {
      const Vec<T> g = load(d_o + d, D - d);
      T *const dvalue = p.dvalue + row[j] * D + d;
      slope += g * (load(p.value + row[j] * D + d, D - d) - load(o + d, D - d));
      store(dvalue, load(dvalue, D - d) + prob[j] * g, D - d);  // (5)
    }
    de[j] = prob[j] * total<T>(slope);  // (4), (3)
  }
  for (int64_t h = 0; h < H; h += Simd<T>::width) {
    const Vec<T> v = load(p.v + h, H - h);
    Vec<T> ds{}, dv = load(sums.dv + h);
    for (int64_t j = 0; j < count; ++j) {
      const Vec<T> a = load(sums.a + j * ld + h), slope = de[j] * (1 - a * a);
      T* const dk = p.dk + row[j] * H + h;
      dv += de[j] * a;  // (2)
      ds += slope;
      store(dk, load(dk, H - h) + v * slope, H - h);  // (1)
    }
    store(sums.dv + h, dv);
    store(dq + h, load(dq + h, H - h) + v * ds, H - h);  // (1)
  }
}

// The keys [first, end) of a sequence. dq of the sequence belongs to the group that has its first key.
template <class T>
void pass_back_keys(const AdditiveAttentionBackward<T>& p, int64_t b, int64_t first, int64_t end, const Sums<T>& sums) {
  const int64_t H = p.sizes.H, D = p.sizes.D, n = p.queries.length[b];
  const auto dq = [&](int64_t i) { return first ? sums.dq + i * H : p.dq + row_of(p.queries, b, i) * H; };
  for (int64_t i = 0; i < n; ++i) memset(dq(i), 0, static_cast<size_t>(H) * sizeof(T));
  for (int64_t j = first; j < end; ++j) {
    memset(p.dk + row_of(p.keys, b, j) * H, 0, static_cast<size_t>(H) * sizeof(T));
    memset(p.dvalue + row_of(p.keys, b, j) * D, 0, static_cast<size_t>(D) * sizeof(T));
  }
  for (int64_t j = first; j < end; j += kKeys)
    for (int64_t i = 0; i < n; ++i) pass_back(p, b, i, j, end - j < kKeys ? end - j : kKeys, sums, dq(i));
}

template <class T>
void add(T* to, const T* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

}  // namespace

template <class T>
void additive_attention_forward(const AdditiveAttentionForward<T>& p) {
  const AdditiveAttentionSizes& z = p.sizes;
  const int64_t groups = groups_of(z, p.queries, p.keys, 10);
  const Scratch places(static_cast<size_t>(groups + 1) * sizeof(Place));
  Place* const place = reinterpret_cast<Place*>(places.data());
  cut(z.B, p.queries.length, p.keys.length, groups, place);
  parallel_for(z.threads, groups, [&](int64_t g) {
    for_sequences(place + g, p.queries.length, z.B, [&](int64_t b, int64_t first, int64_t end) {
      for (int64_t i = first; i < end; ++i) attend(p, b, i);
    });
  });
}

template <class T>
void additive_attention_backward(const AdditiveAttentionBackward<T>& p) {
  const AdditiveAttentionSizes& z = p.sizes;
  int64_t longest = 0;
  for (int64_t b = 0; b < z.B; ++b) longest = p.queries.length[b] > longest ? p.queries.length[b] : longest;
  const int64_t groups = groups_of(z, p.queries, p.keys, 20), ld = padded<T>(z.H);
  const int64_t part = (kKeys + 1) * ld + (groups > 1 ? longest * z.H : 0);
  const Scratch places(static_cast<size_t>(groups + 1) * sizeof(Place)), scratch(static_cast<size_t>(groups * part) * sizeof(T));
  Place* const place = reinterpret_cast<Place*>(places.data());
  cut(z.B, p.keys.length, p.queries.length, groups, place);
  const auto sums = [&](int64_t g) {
    T* const a = reinterpret_cast<T*>(scratch.data()) + g * part;
    return Sums<T>{a, a + kKeys * ld, a + (kKeys + 1) * ld};
  };
  parallel_for(z.threads, groups, [&](int64_t g) {
    const Sums<T> own = sums(g);
    memset(own.dv, 0, static_cast<size_t>(ld) * sizeof(T));
    for_sequences(place + g, p.keys.length, z.B,
                  [&](int64_t b, int64_t first, int64_t end) { pass_back_keys(p, b, first, end, own); });
  });
  memset(p.dv, 0, static_cast<size_t>(z.H) * sizeof(T));
  for (int64_t g = 0; g < groups; ++g) {
    const Sums<T> own = sums(g);
    const int64_t b = place[g].sequence;
    add(p.dv, own.dv, z.H);
    if (b < z.B && place[g].step && (place[g + 1].sequence > b || place[g + 1].step > place[g].step))
      for (int64_t i = 0; i < p.queries.length[b]; ++i) add(p.dq + row_of(p.queries, b, i) * z.H, own.dq + i * z.H, z.H);
  }
}

template void additive_attention_forward(const AdditiveAttentionForward<float>&);
template void additive_attention_forward(const AdditiveAttentionForward<double>&);
template void additive_attention_backward(const AdditiveAttentionBackward<float>&);
template void additive_attention_backward(const AdditiveAttentionBackward<double>&);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
