// The activations and the feed-forward layer; the equations are in src/unrolled/equations/{activations,feed_forward}.py.
//
// Hidden units are computed kUnits at a time, for the rows of a task: between the two maps they never leave the cache.
#include "activations.h"
#include "kernels.h"
#include "philox.h"
#include "products.h"
#include "unrolled/schedule.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

template <class F>
void with_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::relu: return f(Relu{});
    case Activation::gelu: return f(Gelu{});
    case Activation::gelu_tanh: return f(GeluTanh{});
    case Activation::silu: return f(Silu{});
  }
}

constexpr int64_t kUnits = kDepth;
static_assert(kUnits % (4 * kLanes) == 0, "a mask begins at a whole block of random numbers");

// f(first unit, units) for all hidden units; once for none.
template <class F>
void for_units(int64_t units, F&& f) {
  int64_t first = 0;
  do {
    f(first, units - first < kUnits ? units - first : kUnits);
    first += kUnits;
  } while (first < units);
}

// What multiplies the hidden units of a row, at most kUnits at a time.
template <class T>
class Mask {
 public:
  explicit Mask(const Dropping& d) : d_(d), keeping_(d.p) {}
  // Null where nothing is dropped.
  const T* row(int64_t row, int64_t first, int64_t units) {
    if (d_.p == 0) return nullptr;
    const uint32_t least = keeping_.least;
    const T factor = keeping_.factor;
    uint32_t word[4 * kLanes];
    for (int64_t u = 0; u < units; u += 4 * kLanes) {
      philox(static_cast<uint32_t>((first + u) / 4), static_cast<uint32_t>(d_.t[row]), static_cast<uint32_t>(d_.key[row]),
             static_cast<uint32_t>(d_.layer), static_cast<uint64_t>(d_.seed), word);
      for (int64_t i = 0; i < 4 * kLanes; ++i) mask_[u + i] = word[i] >= least ? factor : 0;
    }
    return mask_;
  }

 private:
  const Dropping& d_;
  Keeping<T> keeping_;
  T mask_[kUnits];
};

// Line (3) for some units of a row, from a and the gate g or null. Beyond them h is 0, up to a whole vector.
template <class Phi, class T>
void hidden_row(int64_t units, const T* a, const T* g, const T* mask, T* h) {
  for (int64_t u = 0; u < units; u += Simd<T>::width) {
    const int64_t left = units - u;
    const Vec<T> au = load(a + u, left);
    Vec<T> y = g ? Phi::value(load(g + u, left)) * au : Phi::value(au);
    if (mask) y *= load(mask + u);
    store(h + u, first_lanes<T>(y, left));
  }
}

// And back: da comes in as the gradient of h, h is computed again, h_of(unit) says where it goes.
template <class Phi, class T, class H>
void hidden_row_backward(int64_t units, const T* a, const T* g, const T* mask, T* da, T* dg, H&& h_of) {
  for (int64_t u = 0; u < units; u += Simd<T>::width) {
    const int64_t left = units - u;
    const Vec<T> m = mask ? load(mask + u) : Vec<T>{} + 1, dh = m * load(da + u), au = load(a + u, left);
    Vec<T> derivative, y = Phi::value(g ? load(g + u, left) : au, derivative);
    if (g) store(dg + u, dh * au * derivative);
    store(da + u, dh * (g ? y : derivative));
    if (g) y *= au;
    store(h_of(u), first_lanes<T>(m * y, left));
  }
}

template <class T>
struct Weights {
  Packed<T> first, gate, second;
};

template <class T, class Phi>
void forward_rows(const FeedForwardForward<T>& p, const Weights<T>& w, int64_t first, int64_t n, int64_t block, T* scratch) {
  const auto& z = p.sizes;
  const int64_t ld = leading<T>(kUnits), ld_a = p.a ? z.F : ld;
  const T* const x = p.x + first * z.D;
  Mask<T> mask(p.dropping);
  for_units(z.F, [&](int64_t f, int64_t units) {
    const int64_t at = first * z.F + f;
    T *const h = scratch, *const a = p.a ? p.a + at : h + block, *const g = p.a ? p.gate + at : h + 2 * block;
    map_rows(x, z.D, n, w.first, f, units, p.bias1 ? p.bias1 + f : nullptr, false, a, ld_a);  // (1)
    if (p.weight_gate) map_rows(x, z.D, n, w.gate, f, units, p.bias_gate ? p.bias_gate + f : nullptr, false, g, ld_a);  // (2)
    for (int64_t i = 0; i < n; ++i)
      hidden_row<Phi>(units, a + i * ld_a, p.weight_gate ? g + i * ld_a : nullptr, mask.row(first + i, f, units), h + i * ld);
    map_rows(h, ld, n, w.second.rows(f, units), 0, z.D, p.bias2, f > 0, p.y + first * z.D, z.D);  // (4)
  });
}

// All rows at once, for few of them: first the hidden units, shared out, then what is made of them.
template <class T, class Phi>
void forward_few_rows(const FeedForwardForward<T>& p, int threads) {
  const auto& z = p.sizes;
  const int64_t ld = p.a ? z.F : leading<T>(z.F), ld_h = leading<T>(z.F), block = z.N * ld_h;
  const Scratch scratch(static_cast<size_t>(3 * block) * sizeof(T));
  T* const h = reinterpret_cast<T*>(scratch.data());
  T *const a = p.a ? p.a : h + block, *const g = p.a ? p.gate : h + 2 * block;
  constexpr int64_t kStep = 4 * kLanes;
  const int64_t steps = ceil_div(z.F, kStep), least = ceil_div(z.F, kUnits), tasks = least > threads ? least : threads;
  parallel_for(threads, tasks, [&](int64_t i) {
    const int64_t f = i * steps / tasks * kStep, end = (i + 1) * steps / tasks * kStep, units = (end < z.F ? end : z.F) - f;
    Mask<T> mask(p.dropping);
    map_few_rows(p.x, z.D, z.N, p.weight1 + f * z.D, z.D, units, p.bias1 ? p.bias1 + f : nullptr, a + f, ld);  // (1)
    if (p.weight_gate)
      map_few_rows(p.x, z.D, z.N, p.weight_gate + f * z.D, z.D, units, p.bias_gate ? p.bias_gate + f : nullptr, g + f, ld);  // (2)
    for (int64_t n = 0; n < z.N; ++n)
      hidden_row<Phi>(units, a + n * ld + f, p.weight_gate ? g + n * ld + f : nullptr, mask.row(n, f, units), h + n * ld_h + f);
  });
  parallel_for(threads, threads, [&](int64_t i) {
    const int64_t d = i * z.D / threads, count = (i + 1) * z.D / threads - d;
    map_few_rows(h, ld_h, z.N, p.weight2 + d * z.F, z.F, count, p.bias2 ? p.bias2 + d : nullptr, p.y + d, z.D);  // (4)
  });
}

// A block of tokens on its way back: what the products over tokens read. h and x in panels.
template <class T>
struct Block {
  int64_t capacity, ld, ld_y;
  T *da, *dg, *dy, *h, *x;
  Block(const FeedForwardSizes& z, bool gated, T* memory)
      : capacity(tokens(z)), ld(leading<T>(z.F)), ld_y(leading<T>(z.D)), da(memory), dg(da + capacity * ld),
        dy(dg + (gated ? capacity * ld : 0)), h(dy + capacity * ld_y), x(h + capacity * padded<T>(z.F)) {}
  static int64_t tokens(const FeedForwardSizes& z) { return z.N < kTokens ? z.N : kTokens; }
  static int64_t size(const FeedForwardSizes& z) {
    return tokens(z) * (2 * leading<T>(z.F) + leading<T>(z.D) + padded<T>(z.F) + padded<T>(z.D));
  }
};

// Rows [begin, begin + n) of the block that starts at token `first`: everything but the gradients of the parameters.
template <class T, class Phi>
void backward_rows(const FeedForwardBackward<T>& p, const Weights<T>& w, const Block<T>& b, int64_t first, int64_t begin,
                   int64_t n) {
  const auto& z = p.sizes;
  const int64_t row = first + begin;
  const T* const dy = p.dy + row * z.D;
  T* const dx = p.dx ? p.dx + row * z.D : nullptr;
  Mask<T> mask(p.dropping);
  for_units(z.F, [&](int64_t f, int64_t units) {
    T *const da = b.da + begin * b.ld + f, *const dg = b.dg + begin * b.ld + f;
    map_rows<T>(dy, z.D, n, w.second, f, units, nullptr, false, da, b.ld);  // (4)
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = (row + i) * z.F + f;
      hidden_row_backward<Phi>(units, p.a + at, p.gate ? p.gate + at : nullptr, mask.row(row + i, f, units), da + i * b.ld,
                               dg + i * b.ld, [&](int64_t u) { return in_panels(b.h, b.capacity, z.F, begin + i, f + u); });  // (3)
    }
    if (dx) map_rows<T>(da, b.ld, n, w.first.rows(f, units), 0, z.D, nullptr, f > 0, dx, z.D);  // (1)
    if (dx && p.gate) map_rows<T>(dg, b.ld, n, w.gate.rows(f, units), 0, z.D, nullptr, true, dx, z.D);  // (2)
  });
  for (int64_t i = 0; i < n; ++i) {
    memcpy(b.dy + (begin + i) * b.ld_y, dy + i * z.D, static_cast<size_t>(z.D) * sizeof(T));
    put_in_panels(p.x + (row + i) * z.D, b.x, b.capacity, z.D, begin + i);
  }
}

// The gradients of the parameters from a block.
template <class T>
void backward_parameters(const FeedForwardBackward<T>& p, const Block<T>& b, int threads, int64_t tokens, bool add) {
  const auto& z = p.sizes;
  const Parts<T> up(z.F, z.D, threads), down(z.D, z.F, threads);
  const int64_t ups = up.count() * (p.gate ? 2 : 1);
  parallel_for(threads, ups + down.count(), [&](int64_t i) {
    const bool is_up = i < ups, is_gate = is_up && i >= up.count();
    const Part part = is_up ? up[i % up.count()] : down[i - ups];
    const T* const a = is_gate ? b.dg : is_up ? b.da : b.dy;
    const int64_t ld = is_up ? b.ld : b.ld_y;
    outer_product(part, a, ld, is_up ? b.x : b.h, b.capacity, tokens, is_up ? z.D : z.F, add,
                  is_gate ? p.dweight_gate : is_up ? p.dweight1 : p.dweight2);
    if (part.i0 == 0) sum_tokens(a, ld, tokens, part.o0, part.o1, add, is_gate ? p.dbias_gate : is_up ? p.dbias1 : p.dbias2);
  });
}

// Multiply-adds of the forward.
inline double work(const FeedForwardSizes& z, bool gated) {
  return (gated ? 3.0 : 2.0) * static_cast<double>(z.N) * static_cast<double>(z.D) * static_cast<double>(z.F);
}

}  // namespace

template <class T>
void feed_forward_forward(const FeedForwardForward<T>& p) {
  const auto& z = p.sizes;
  const bool gated = p.weight_gate != nullptr;
  const int threads = useful_threads(z.threads, work(z, gated));
  if (z.N <= kFewRows)
    return with_activation(z.activation, [&](auto phi) { forward_few_rows<T, decltype(phi)>(p, threads); });
  const int64_t up = Packed<T>::size(z.D, z.F), down = Packed<T>::size(z.F, z.D), tasks = row_tasks(z.N, threads);
  const int64_t block = tasks ? ceil_div(z.N, tasks) * leading<T>(kUnits) : 0;
  const Scratch scratch(static_cast<size_t>(2 * up + down + 3 * block * threads) * sizeof(T));
  T* const memory = reinterpret_cast<T*>(scratch.data());
  const Weights<T> w{pack_transposed(threads, p.weight1, z.D, z.F, memory),
                     gated ? pack_transposed(threads, p.weight_gate, z.D, z.F, memory + up) : Packed<T>{},
                     pack_transposed(threads, p.weight2, z.F, z.D, memory + 2 * up)};
  with_activation(z.activation, [&](auto phi) {
    share_out(threads, tasks, [&](int64_t worker, int64_t i) {
      const int64_t first = i * z.N / tasks, n = (i + 1) * z.N / tasks - first;
      forward_rows<T, decltype(phi)>(p, w, first, n, block, memory + 2 * up + down + 3 * block * worker);
    });
  });
}

template <class T>
void feed_forward_backward(const FeedForwardBackward<T>& p) {
  const auto& z = p.sizes;
  const bool gated = p.weight_gate != nullptr;
  const int threads = useful_threads(z.threads, 2 * work(z, gated));
  const int64_t up = Packed<T>::size(z.F, z.D), down = Packed<T>::size(z.D, z.F);
  const Scratch scratch(static_cast<size_t>(2 * up + down + Block<T>::size(z)) * sizeof(T));
  T* const memory = reinterpret_cast<T*>(scratch.data());
  const Weights<T> w{p.dx ? pack_plain(threads, p.weight1, z.F, z.D, memory) : Packed<T>{},
                     p.dx && gated ? pack_plain(threads, p.weight_gate, z.F, z.D, memory + up) : Packed<T>{},
                     pack_plain(threads, p.weight2, z.D, z.F, memory + 2 * up)};
  const Block<T> block(z, gated, memory + 2 * up + down);
  int64_t first = 0;
  do {
    const int64_t tokens = z.N - first < kTokens ? z.N - first : kTokens;
    with_activation(z.activation, [&](auto phi) {
      for_row_tasks(threads, tokens,
                    [&](int64_t begin, int64_t n) { backward_rows<T, decltype(phi)>(p, w, block, first, begin, n); });
    });
    backward_parameters(p, block, threads, tokens, first > 0);
    first += kTokens;
  } while (first < z.N);
}

template <class T>
void activation_forward(Activation activation, int64_t n, const T* x, int threads, T* y) {
  const int64_t parts = useful_threads(threads, 20.0 * static_cast<double>(n));
  with_activation(activation, [&](auto phi) {
    parallel_for(threads, parts, [&](int64_t part) {
      const int64_t end = (part + 1) * n / parts;
      for (int64_t i = part * n / parts; i < end; i += Simd<T>::width) store(y + i, phi.value(load(x + i, end - i)), end - i);
    });
  });
}

template <class T>
void activation_backward(Activation activation, int64_t n, const T* dy, const T* x, int threads, T* dx) {
  const int64_t parts = useful_threads(threads, 20.0 * static_cast<double>(n));
  with_activation(activation, [&](auto phi) {
    parallel_for(threads, parts, [&](int64_t part) {
      const int64_t end = (part + 1) * n / parts;
      for (int64_t i = part * n / parts; i < end; i += Simd<T>::width) {
        Vec<T> derivative;
        phi.value(load(x + i, end - i), derivative);
        store(dx + i, load(dy + i, end - i) * derivative, end - i);
      }
    });
  });
}

template void feed_forward_forward(const FeedForwardForward<float>&);
template void feed_forward_forward(const FeedForwardForward<double>&);
template void feed_forward_backward(const FeedForwardBackward<float>&);
template void feed_forward_backward(const FeedForwardBackward<double>&);
template void activation_forward(Activation, int64_t, const float*, int, float*);
template void activation_forward(Activation, int64_t, const double*, int, double*);
template void activation_backward(Activation, int64_t, const float*, const float*, int, float*);
template void activation_backward(Activation, int64_t, const double*, const double*, int, double*);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
