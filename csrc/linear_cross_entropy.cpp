// The output projection with its loss; the equations are in src/unrolled/equations/linear_cross_entropy.py.
//
// Some tokens at a time, and of these the logits transposed: a row for each class. So the weights are read where they lie,
// x is packed, which is small, and softmax goes down the rows, a vector of tokens at once. Threads split the classes: in
// the first phase each finds the logits of its own with their largest and the sum of exp, in the second, block by block in
// its cache, p - y and all that follows from it.
#include "gemm.h"
#include "kernels.h"
#include "unrolled/parallel.h"
#include "unrolled/schedule.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

constexpr int64_t kBlock = 128;        // classes at a time
constexpr int64_t kDepth = 128;        // tokens of a sum of dW
constexpr int64_t kTokens = 512;       // tokens of a chunk, at most
constexpr int64_t kLogits = 4 << 20;   // numbers of a chunk, where it is not smaller than kPanel tokens

// A chunk of tokens, and what the phases hand on. Rows of tokens are ld numbers long.
template <class T>
struct Chunk {
  const LinearCrossEntropy<T>& p;
  int64_t parts, ld, ld_x;
  T own, everyone;            // of the target and of each class in y, without their weights
  const int64_t* token;       // [n] those of the chunk
  int64_t n;
  bool first, keep;           // keep: the logits of all classes, else of a block for each part
  T *columns, *rows;          // x, packed as the right side of W x^T and of dz x
  T *logits, *weights, *dx;   // [V or parts * kBlock, ld], and for each part a packed block of W, and its dx [n, ld_x]
  T *base;                    // [V / kBlock or parts, ld]: what was taken from the logits of a block before exp
  T *largest, *sum, *flat;    // [parts, ld]: the sums of exp(z - largest) and of w z
  T *score, *factor, *share;  // [ld]: z of the target, what multiplies exp(z - largest), the target's share in dz

  int64_t begin(int64_t part) const { return part * p.V / parts; }
  T* block(int64_t part, int64_t v) const { return logits + (keep ? v : part * kBlock) * ld; }
  T* base_of(int64_t part, int64_t v) const { return base + (keep ? v / kBlock + part : part) * ld; }
  T weight_of(int64_t v) const { return p.class_weight ? p.class_weight[v] : 1; }
};

// f(first class, classes) for the blocks of a part.
template <class T, class F>
void for_blocks(const Chunk<T>& c, int64_t part, F&& f) {
  const int64_t end = c.begin(part + 1);
  for (int64_t v = c.begin(part); v < end; v += kBlock) f(v, end - v < kBlock ? end - v : kBlock);
}

template <class T>
void pack(const Chunk<T>& c, int threads) {
  const int64_t D = c.p.D, along = ceil_div(c.n, kPanel<T>), across = c.keep ? ceil_div(D, kPanel<T>) : 0;
  parallel_for(threads, along + across, [&](int64_t i) {
    const int64_t first = (i < along ? i : i - along) * kPanel<T>, left = (i < along ? c.n : D) - first;
    const int64_t width = left < kPanel<T> ? left : kPanel<T>;
    const auto x = [&](int64_t t) { return c.p.x + c.token[t] * D; };
    if (i < along)
      pack_columns(D, padded<T>(width), kPanel<T>, c.columns + D * first,
                   [&](int64_t t) { return t < width ? x(first + t) : nullptr; });
    else
      pack_rows(c.n, width, c.rows + c.n * first, [&](int64_t t) { return x(t) + first; });
  });
}

// Lines (1) and (2) of a vector of tokens for the classes of a block: takes the block into the sums and leaves exp(z - base).
template <class T>
void take(const Chunk<T>& c, int64_t part, int64_t v, int64_t count, T* z, int64_t t) {
  const int64_t at = part * c.ld + t;
  Vec<T> before = load(c.largest + at), largest = before, sum{}, flat = load(c.flat + at);
  for (int64_t i = 0; i < count; ++i) {
    Vec<T> score = load(z + i * c.ld);
    if (c.p.bias) store(z + i * c.ld, score += c.p.bias[v + i]);
    largest = score > largest ? score : largest;
    if (const T w = c.everyone == 0 ? 0 : c.weight_of(v + i); w != 0) flat += w * score;  // 0 times infinity is 0
  }
  for (int64_t i = 0; i < count; ++i) {
    const Vec<T> e = vexp(load(z + i * c.ld) - largest);
    store(z + i * c.ld, e);
    sum += e;
  }
  store(c.largest + at, largest);
  store(c.base_of(part, v) + t, largest);
  store(c.sum + at, load(c.sum + at) * vexp(before - largest) + sum);
  store(c.flat + at, flat);
}

// The first phase.
template <class T>
void find_logits(const Chunk<T>& c, int64_t part) {
  for (int64_t t = 0; t < c.ld; ++t) {
    c.largest[part * c.ld + t] = sizeof(T) == 4 ? static_cast<T>(-__FLT_MAX__) : static_cast<T>(-__DBL_MAX__);
    c.sum[part * c.ld + t] = c.flat[part * c.ld + t] = 0;
  }
  for_blocks(c, part, [&](int64_t v, int64_t count) {
    T* const z = c.block(part, v);
    const T* row[kBlock];
    for (int64_t i = 0; i < count; ++i) row[i] = c.p.weight + (v + i) * c.p.D;
    for_panels<T>(padded<T>(c.n), kPanel<T>, [&](int64_t t, int64_t width) {
      multiply(row, count, c.columns + c.p.D * t, c.p.D, width, kPanel<T>, z + t, c.ld);
      for (int64_t j = t; j < t + width && j < c.n; ++j) {
        const int64_t i = c.p.target[c.token[j]] - v;
        if (i >= 0 && i < count) c.score[j] = z[i * c.ld + j] + (c.p.bias ? c.p.bias[v + i] : 0);
      }
      for (int64_t i = t; i < t + width; i += Simd<T>::width) take(c, part, v, count, z + i, i);
    });
  });
}

// Between the phases, from what the parts found: the losses of the chunk, lines (2) to (4), and the factors of p and y.
template <class T>
double add_losses(const Chunk<T>& c, double weights, double share) {
  double loss = 0;
  for (int64_t t = 0; t < c.n; ++t) {
    T largest = c.largest[t];
    for (int64_t part = 1; part < c.parts; ++part)
      largest = c.largest[part * c.ld + t] > largest ? c.largest[part * c.ld + t] : largest;
    double sum = 0, flat = 0;
    for (int64_t part = 0; part < c.parts; ++part) {
      const int64_t at = part * c.ld + t;
      sum += static_cast<double>(c.sum[at]) * __builtin_exp(static_cast<double>(c.largest[at] - largest));
      flat += static_cast<double>(c.flat[at]);
    }
    const double log_sum = static_cast<double>(largest) + __builtin_log(sum);
    const double own = static_cast<double>(c.own * c.weight_of(c.p.target[c.token[t]]));
    const double everyone = static_cast<double>(c.everyone);
    if (own != 0) loss += own * (log_sum - static_cast<double>(c.score[t]));
    if (everyone != 0) loss += everyone * (weights * log_sum - flat);
    c.largest[t] = largest;
    c.factor[t] = static_cast<T>(share * (own + everyone * weights) / sum);
    c.share[t] = static_cast<T>(share * own);
  }
  return share * loss;
}

// p - y in the place of exp(z - base) of a block, and its sum over the tokens.
template <class T>
void form(const Chunk<T>& c, T share, int64_t part, int64_t v, int64_t count, T* z) {
  T* const factor = c.base_of(part, v);  // the base of the block is not needed any more
  for (int64_t t = 0; t < c.n; t += Simd<T>::width)
    store(factor + t, load(c.factor + t) * vexp(load(factor + t) - load(c.largest + t)));
  for (int64_t i = 0; i < count; ++i) {
    T* const row = z + i * c.ld;
    const T y = share * c.everyone * c.weight_of(v + i);
    for (int64_t t = 0; t < c.n; t += Simd<T>::width) store(row + t, load(factor + t) * load(row + t) - y);
  }
  for (int64_t t = 0; t < c.n; ++t) {
    const int64_t i = c.p.target[c.token[t]] - v;
    if (i >= 0 && i < count) z[i * c.ld + t] -= c.share[t];
  }
  if (!c.p.dbias) return;
  for (int64_t i = 0; i < count; ++i) {
    Vec<T> sum{};
    for (int64_t t = 0; t < c.n; t += Simd<T>::width) sum += first_lanes<T>(load(z + i * c.ld + t), c.n - t);
    c.p.dbias[v + i] = total<T>(sum) + (c.first ? 0 : c.p.dbias[v + i]);
  }
}

// dW of a block's classes: dz x. Sums of some tokens each are summed again: that rounds less than one long sum.
template <class T>
void add_dweight(const Chunk<T>& c, const T* const* dz, int64_t v, int64_t count) {
  constexpr int W = Simd<T>::width;
  T some[kRows * kPanel<T>], sum[kRows * kPanel<T>];
  for_panels<T>(padded<T>(c.p.D), kPanel<T>, [&](int64_t d, int64_t width) {
    for_tiles(count, [&](int64_t r, int height) {
      for (int64_t t = 0; t < c.n; t += kDepth) {
        const T* row[kRows];
        for (int64_t i = 0; i < height; ++i) row[i] = dz[r + i] + t;
        const int64_t depth = c.n - t < kDepth ? c.n - t : kDepth;
        kTile<T>[width / W - 1][height - 1](row, c.rows + c.n * d + t * width, depth, t ? some : sum, width);
        for (int64_t j = 0; t && j < height * width; j += W) store(sum + j, load(sum + j) + load(some + j));
      }
      for (int64_t i = 0; i < height; ++i)
        for (int64_t j = 0; j < width; j += W) {
          T* const to = c.p.dweight + (v + r + i) * c.p.D + d + j;
          const int64_t left = c.p.D - d - j;
          const Vec<T> all = load(sum + i * width + j);
          store(to, c.first ? all : all + load(to, left), left);
        }
    });
  });
}

// What a block's classes add to dx: W^T dz.
template <class T>
void add_dx(const Chunk<T>& c, int64_t part, const T* const* dz, int64_t v, int64_t count) {
  T *const packed = c.weights + part * kBlock * padded<T>(c.p.D), *const dx = c.dx + part * c.n * c.ld_x;
  pack_rows(count, c.p.D, packed, [&](int64_t i) { return c.p.weight + (v + i) * c.p.D; });
  for_panels<T>(padded<T>(c.p.D), kPanel<T>, [&](int64_t d, int64_t width) {
    for_tiles(c.n, [&](int64_t t, int height) {
      kOuter<T>[width / Simd<T>::width - 1][height - 1](dz, t, packed + count * d, width, count, dx + t * c.ld_x + d, c.ld_x);
    });
  });
}

// The second phase.
template <class T>
void find_gradients(const Chunk<T>& c, T share, int64_t part) {
  if (c.p.dx) memset(c.dx + part * c.n * c.ld_x, 0, static_cast<size_t>(c.n * c.ld_x) * sizeof(T));
  for_blocks(c, part, [&](int64_t v, int64_t count) {
    T* const z = c.block(part, v);
    form(c, share, part, v, count, z);
    const T* dz[kBlock];
    for (int64_t i = 0; i < count; ++i) dz[i] = z + i * c.ld;
    if (c.p.dweight) add_dweight(c, dz, v, count);
    if (c.p.dx) add_dx(c, part, dz, v, count);
  });
}

template <class T>
void sum_dx(const Chunk<T>& c, int threads) {
  parallel_for(threads, threads, [&](int64_t i) {
    for (int64_t t = i * c.n / threads; t < (i + 1) * c.n / threads; ++t)
      for (int64_t d = 0; d < c.p.D; d += Simd<T>::width) {
        Vec<T> sum{};
        for (int64_t part = 0; part < c.parts; ++part) sum += load(c.dx + (part * c.n + t) * c.ld_x + d);
        store(c.p.dx + c.token[t] * c.p.D + d, sum, c.p.D - d);
      }
  });
}

// Lists the tokens whose target counts; the others have dx = 0. The divisor of the mean is known then: line (3).
template <class T>
int64_t list_tokens(const LinearCrossEntropy<T>& p, int64_t* token, double& share) {
  int64_t count = 0;
  double weights = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    if (p.target[n] == p.ignore_index) {
      if (p.dx) memset(p.dx + n * p.D, 0, static_cast<size_t>(p.D) * sizeof(T));
      continue;
    }
    weights += p.class_weight ? static_cast<double>(p.class_weight[p.target[n]]) : 1;
    token[count++] = n;
  }
  share = p.mean && weights != 0 ? 1 / weights : 1;
  return count;
}

}  // namespace

template <class T>
int64_t linear_cross_entropy(const LinearCrossEntropy<T>& p) {
  for (int64_t n = 0; n < p.N; ++n)
    if (p.target[n] != p.ignore_index && (p.target[n] < 0 || p.target[n] >= p.V)) return n;
  const Scratch list(static_cast<size_t>(p.N) * sizeof(int64_t));
  int64_t* const token = reinterpret_cast<int64_t*>(list.data());
  double share, loss = 0, weights = 0;
  const int64_t count = list_tokens(p, token, share);
  for (int64_t v = 0; v < p.V; ++v) weights += p.class_weight ? static_cast<double>(p.class_weight[v]) : 1;
  const bool keep = p.dx || p.dweight;
  if (!count && p.dweight) memset(p.dweight, 0, static_cast<size_t>(p.V * p.D) * sizeof(T));
  if (!count && p.dbias) memset(p.dbias, 0, static_cast<size_t>(p.V) * sizeof(T));

  const int threads =
      useful_threads(p.threads, (keep ? 3.0 : 1.0) * static_cast<double>(count) * static_cast<double>(p.V * (p.D + 8)));
  const int64_t parts = threads < p.V ? threads : p.V, most = p.V ? kLogits / p.V / kPanel<T> * kPanel<T> : kTokens;
  const int64_t tokens = most < kPanel<T> ? kPanel<T> : (most < kTokens ? most : kTokens);
  const int64_t n = count < tokens ? count : tokens, D = padded<T>(p.D), ld = leading<T>(n), ld_x = leading<T>(p.D);
  const int64_t sizes[] = {padded<T>(n) * p.D, keep ? n * D : 0, (keep ? p.V : parts * kBlock) * ld,
                           p.dx ? parts * kBlock * D : 0, p.dx ? parts * n * ld_x : 0, (p.V / kBlock + parts) * ld,
                           parts * ld, parts * ld, parts * ld, ld, ld, ld};
  int64_t total = 0;
  for (const int64_t size : sizes) total += size;
  const Scratch scratch(static_cast<size_t>(total) * sizeof(T));
  T* next = reinterpret_cast<T*>(scratch.data());
  const int64_t* size = sizes;
  const auto part = [&] { return next += *size++, next - size[-1]; };
  Chunk<T> c{p, parts, ld, ld_x, static_cast<T>(1 - p.label_smoothing),
             static_cast<T>(p.V ? p.label_smoothing / static_cast<double>(p.V) : 0), token, n, true, keep,
             part(), part(), part(), part(), part(), part(), part(), part(), part(), part(), part(), part()};
  for (int64_t done = 0; done < count; done += c.n, c.first = false) {
    c.token = token + done;
    c.n = count - done < tokens ? count - done : tokens;
    pack(c, threads);
    parallel_for(threads, parts, [&](int64_t i) { find_logits(c, i); });
    loss += add_losses(c, weights, share);
    if (keep) parallel_for(threads, parts, [&](int64_t i) { find_gradients(c, static_cast<T>(share), i); });
    if (p.dx) sum_dx(c, threads);
  }
  *p.loss = static_cast<T>(loss);
  return -1;
}

template int64_t linear_cross_entropy(const LinearCrossEntropy<float>&);
template int64_t linear_cross_entropy(const LinearCrossEntropy<double>&);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
