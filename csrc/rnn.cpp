// The plain recurrence and back-propagation through time; the equations are in src/unrolled/equations/rnn.py.
//
// A task walks its sequences through time, longest first, so that the live ones are always the first n. Tokens are taken in
// blocks of about kBlock rows: their input projection before the steps, their part of every weight gradient after them, all
// while the rows are in the L2 cache. The only thing that crosses a step is h, or on the way back da.

#include "gemm.h"
#include "kernels.h"
#include "unrolled/parallel.h"
#include "unrolled/schedule.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

constexpr int64_t kBlock = 128;

// Pieces of one allocation, each on a cache line of its own.
class Pieces {
 public:
  explicit Pieces(char* base) : base_(reinterpret_cast<uintptr_t>(base)) {}
  template <class P>
  P* take(int64_t count) {
    P* const piece = reinterpret_cast<P*>(base_ + static_cast<uintptr_t>(used_));
    used_ += ceil_div(count * static_cast<int64_t>(sizeof(P)), 64) * 64;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  uintptr_t base_;  // 0 when only the size is wanted
  int64_t used_ = 0;
};

// The sequences of a task as a walk: who is alive, which row is next.
struct Walk {
  const Rows& rows;
  const Task& task;
  bool reverse;
  int64_t stride;

  Walk(const Rows& r, const Task& t) : rows(r), task(t), reverse(t.direction == 1), stride(reverse ? -r.step : r.step) {}
  int64_t length(int64_t b) const { return rows.length[task.sequence[b]]; }
  int64_t row(int64_t b, int64_t t) const {
    const int64_t s = task.sequence[b];
    return rows.start[s] + (reverse ? rows.length[s] - 1 - t : t) * rows.step;
  }
  int64_t alive(int64_t t, int64_t from) const {
    while (from > 0 && length(from - 1) <= t) --from;
    return from;
  }
  int64_t steps() const { return task.count ? length(0) : 0; }
  // f(t, n alive) for the steps [t0, t1)
  template <class F>
  void each(int64_t t0, int64_t t1, F&& f) const {
    for (int64_t t = t0, n = alive(t0, task.count); t < t1; ++t) f(t, n = alive(t, n));
  }
};

// A block of steps holds about kBlock rows and at most kBlock + count.
inline int64_t block_steps(int64_t alive) { return alive >= kBlock ? 1 : kBlock / alive; }
inline int64_t block_rows(int64_t sequences) { return kBlock > sequences ? kBlock : sequences; }

// f(first, count) over [0, n), cut among the threads that a lone task leaves idle. A cut changes no sum.
template <class F>
inline void share(int helpers, int64_t n, F&& f) {
  if (helpers <= 1) return f(0, n);
  parallel_for(helpers, helpers, [&](int64_t i) {
    const int64_t first = i * n / helpers;
    f(first, (i + 1) * n / helpers - first);
  });
}

template <class T>
inline Vec<T> phi(Vec<T> a, bool relu) {
  return relu ? (a > 0 ? a : (a != a ? a : Vec<T>{})) : vtanh(a);
}

template <class T>
inline Vec<T> phi_grad_from_output(Vec<T> h, bool relu) {
  return relu ? (h > 0 ? Vec<T>{} + 1 : Vec<T>{}) : 1 - h * h;
}

// ------------------------------------------------------------------------------------------------ forward

template <class T>
struct ForwardScratch {
  const T **x_row, **h_before;  // [block rows], [sequences]
  T **y_row, **h_after;         // [sequences]
  T *u, *tile;                  // [block rows, ld], [kRows, kPanel]

  ForwardScratch(Pieces& pieces, int64_t sequences, int64_t H) {
    const int64_t rows = block_rows(sequences);
    x_row = pieces.take<const T*>(rows);
    h_before = pieces.take<const T*>(sequences);
    y_row = pieces.take<T*>(sequences);
    h_after = pieces.take<T*>(sequences);
    u = pieces.take<T>(rows * leading<T>(H));
    tile = pieces.take<T>(kRows * kPanel<T>);
  }
};

// h = phi(u + W_hh h_before + bias) for the n live sequences of one step            (2), (3)
template <class T>
void forward_step(const RnnForward<T>& p, const ForwardScratch<T>& s, int64_t t, int64_t n, const T* u, const T* packed_hh,
                  const T* bias) {
  constexpr int W = Simd<T>::width;
  const int64_t H = p.sizes.H, ld = leading<T>(H);
  for_panels(H, H, packed_hh, t % 2 == 1, [&](int64_t c0, int vectors, const T* panel) {
    for_tiles(n, [&](int64_t r0, int height) {
      kTile<T>[vectors - 1][height - 1](s.h_before + r0, panel, H, s.tile, kPanel<T>);
      for (int64_t r = r0; r < r0 + height; ++r) {
        T *const y = s.y_row[r], *const after = s.h_after[r];
        for (int64_t c = c0; c < H && c < c0 + kPanel<T>; c += W) {
          const Vec<T> a = load(s.tile + (r - r0) * kPanel<T> + c - c0) + load(u + r * ld + c) + load(bias + c);
          const Vec<T> h = phi<T>(a, p.sizes.relu);
          store(y + c, h, H - c);
          if (after != y) store(after + c, h, H - c);
        }
      }
    });
  });
}

template <class T>
void forward_task(const RnnForward<T>& p, const Task& task, const T* packed_ih, const T* packed_hh, const T* bias,
                  char* memory, int helpers) {
  const auto& z = p.sizes;
  const int64_t DH = z.D * z.H, ld = leading<T>(z.H), d = task.direction;
  const Walk walk(p.rows, task);
  Pieces pieces(memory);
  const ForwardScratch<T> s(pieces, task.count, z.H);
  for (int64_t b = 0; b < task.count; ++b) {
    const int64_t place = (d * z.B + task.sequence[b]) * z.H;
    s.h_before[b] = p.h0 + place;
    T* const first = walk.length(b) == 0 ? p.h_last + place
                     : p.h_prev          ? p.h_prev + walk.row(b, 0) * DH + d * z.H
                                         : nullptr;
    if (first) memcpy(first, p.h0 + place, static_cast<size_t>(z.H) * sizeof(T));
  }
  int64_t n = task.count;
  for (int64_t t = 0; t < walk.steps();) {
    n = walk.alive(t, n);
    int64_t t1 = t + block_steps(n), m = 0;
    t1 = t1 < walk.steps() ? t1 : walk.steps();
    walk.each(t, t1, [&](int64_t step, int64_t alive) {
      for (int64_t b = 0; b < alive; ++b) s.x_row[m++] = p.x + walk.row(b, step) * z.I;
    });
    share(helpers, m, [&](int64_t first, int64_t rows) {
      multiply(s.x_row + first, rows, packed_ih, z.I, z.H, s.u + first * ld, ld);  // (1)
    });
    m = 0;
    walk.each(t, t1, [&](int64_t step, int64_t alive) {
      for (int64_t b = 0; b < alive; ++b) {
        const bool last = step + 1 == walk.length(b);
        s.y_row[b] = p.y + walk.row(b, step) * DH + d * z.H;
        s.h_after[b] = last       ? p.h_last + (d * z.B + task.sequence[b]) * z.H
                       : p.h_prev ? p.h_prev + walk.row(b, step + 1) * DH + d * z.H
                                  : s.y_row[b];
      }
      forward_step(p, s, step, alive, s.u + m * ld, packed_hh, bias);
      for (int64_t b = 0; b < alive; ++b) s.h_before[b] = s.h_after[b];
      m += alive;
    });
    t = t1;
  }
}

// ----------------------------------------------------------------------------------------------- backward

template <class T>
struct BackwardScratch {
  const T **x_row, **h_prev_row, **da_row;  // [block rows]
  const T **h, **da_next, **dh_last;        // [sequences]; dh_last null where the sequence goes on
  int64_t* row;                             // [block rows]
  T *da[2], *tile, *dx;                     // [block rows, ld] twice, [kRows, kPanel], [block rows, ld of I]
  T *dweight_ih, *dweight_hh, *dbias;       // [I, ld], [H, ld], [ld]: transposed, summed over the tasks at the end

  BackwardScratch(Pieces& pieces, int64_t sequences, int64_t I, int64_t H, bool need_dx) {
    const int64_t rows = block_rows(sequences), ld = leading<T>(H);
    dweight_ih = pieces.take<T>((I + H + 1) * ld);
    dweight_hh = dweight_ih + I * ld;
    dbias = dweight_hh + H * ld;
    x_row = pieces.take<const T*>(rows);
    h_prev_row = pieces.take<const T*>(rows);
    da_row = pieces.take<const T*>(rows);
    h = pieces.take<const T*>(sequences);
    da_next = pieces.take<const T*>(sequences);
    dh_last = pieces.take<const T*>(sequences);
    row = pieces.take<int64_t>(rows);
    for (T*& half : da) half = pieces.take<T>(rows * ld);
    tile = pieces.take<T>(kRows * kPanel<T>);
    dx = pieces.take<T>(need_dx ? rows * leading<T>(I) : 0);
  }
};

// da = (dy + W_hh^T da_next, or dy + dh_last at a sequence's end) * phi'(h) for the n live sequences     (3), (2)
// The first `going_on` of them have a next step.
template <class T>
void backward_step(const RnnBackward<T>& p, const BackwardScratch<T>& s, int64_t t, int64_t going_on, int64_t n,
                   const int64_t* row, int64_t d, const T* packed_hh, T* da) {
  constexpr int W = Simd<T>::width;
  const int64_t H = p.sizes.H, DH = p.sizes.D * H, ld = leading<T>(H);
  for_panels(H, H, packed_hh, t % 2 == 1, [&](int64_t c0, int vectors, const T* panel) {
    const int64_t c1 = H < c0 + kPanel<T> ? H : c0 + kPanel<T>;
    const auto finish = [&](int64_t r, const T* indirect) {
      const T* const dy = p.dy + row[r] * DH + d * H;
      for (int64_t c = c0; c < c1; c += W) {
        const Vec<T> dh = load(dy + c, H - c) + load(indirect + c - c0, H - c);
        store(da + r * ld + c, dh * phi_grad_from_output<T>(load(s.h[r] + c, H - c), p.sizes.relu));
      }
    };
    for_tiles(going_on, [&](int64_t r0, int height) {
      kTile<T>[vectors - 1][height - 1](s.da_next + r0, panel, H, s.tile, kPanel<T>);
      for (int64_t r = r0; r < r0 + height; ++r) finish(r, s.tile + (r - r0) * kPanel<T>);
    });
    for (int64_t r = going_on; r < n; ++r) finish(r, s.dh_last[r] + c0);
  });
}

// dh0 = W_hh^T da of the first step
template <class T>
void initial_gradient(const RnnBackward<T>& p, const BackwardScratch<T>& s, const Task& task, int64_t n,
                      const T* packed_hh) {
  const int64_t H = p.sizes.H;
  for_panels(H, H, packed_hh, false, [&](int64_t c0, int vectors, const T* panel) {
    const int64_t columns = H - c0 < kPanel<T> ? H - c0 : kPanel<T>;
    for_tiles(n, [&](int64_t r0, int height) {
      kTile<T>[vectors - 1][height - 1](s.da_next + r0, panel, H, s.tile, kPanel<T>);
      for (int64_t r = 0; r < height; ++r)
        memcpy(p.dh0 + (task.direction * p.sizes.B + task.sequence[r0 + r]) * H + c0, s.tile + r * kPanel<T>,
               static_cast<size_t>(columns) * sizeof(T));
    });
  });
}

// What a block of m tokens adds to every gradient: dW_hh, db, dW_ih, and its rows of dx.                  (2), (1)
template <class T>
void block_gradients(const RnnBackward<T>& p, const BackwardScratch<T>& s, int64_t m, const T* da, int64_t d,
                     const T* packed_ih, int helpers) {
  const int64_t I = p.sizes.I, H = p.sizes.H, ld = leading<T>(H), ld_x = leading<T>(I);
  share(helpers, H, [&](int64_t j, int64_t n) {
    multiply_transposed(s.h_prev_row, j, n, da, ld, m, H, s.dweight_hh, ld);
  });
  share(helpers, I, [&](int64_t j, int64_t n) {
    multiply_transposed(s.x_row, j, n, da, ld, m, H, s.dweight_ih, ld);
  });
  for (int64_t c = 0; c < padded<T>(H); c += Simd<T>::width) {
    Vec<T> sum = load(s.dbias + c);
    for (int64_t i = 0; i < m; ++i) sum += load(da + i * ld + c);
    store(s.dbias + c, sum);
  }
  if (!p.dx) return;
  share(helpers, m, [&](int64_t first, int64_t n) {
    multiply(s.da_row + first, n, packed_ih, H, I, s.dx + first * ld_x, ld_x);
    for (int64_t i = first; i < first + n; ++i)
      memcpy(p.dx + (d * p.sizes.R + s.row[i]) * I, s.dx + i * ld_x, static_cast<size_t>(I) * sizeof(T));
  });
}

template <class T>
void backward_task(const RnnBackward<T>& p, const Task& task, const T* packed_ih, const T* packed_hh, char* memory,
                   int helpers) {
  const auto& z = p.sizes;
  const int64_t DH = z.D * z.H, ld = leading<T>(z.H), d = task.direction;
  const Walk walk(p.rows, task);
  Pieces pieces(memory);
  const BackwardScratch<T> s(pieces, task.count, z.I, z.H, p.dx != nullptr);
  memset(s.dweight_ih, 0, static_cast<size_t>((z.I + z.H + 1) * ld) * sizeof(T));
  for (int64_t b = 0; b < task.count; ++b) {
    const int64_t place = (d * z.B + task.sequence[b]) * z.H;
    s.h[b] = p.h_end + place;
    s.dh_last[b] = p.dh_last + place;
    if (walk.length(b) == 0) memcpy(p.dh0 + place, s.dh_last[b], static_cast<size_t>(z.H) * sizeof(T));
  }
  int half = 0;
  for (int64_t t1 = walk.steps(); t1 > 0; half ^= 1) {
    // as many steps back as hold kBlock rows, at least one
    int64_t t0 = t1, m = 0, first_alive = walk.alive(t1, task.count);
    for (int64_t n = first_alive; t0 > 0; --t0) {
      while (n < task.count && walk.length(n) >= t0) ++n;
      if (m > 0 && m + n > kBlock) break;
      m += n;
    }
    T* const da = s.da[half];
    int64_t done = 0;
    int64_t going_on = first_alive;
    for (int64_t t = t1 - 1; t >= t0; --t) {
      int64_t n = going_on;
      while (n < task.count && walk.length(n) > t) ++n;
      for (int64_t b = 0; b < n; ++b) {
        const int64_t row = walk.row(b, t);
        s.row[done + b] = row;
        s.x_row[done + b] = p.x + row * z.I;
        s.h_prev_row[done + b] = p.h_prev + row * DH + d * z.H;
        s.da_row[done + b] = da + (done + b) * ld;
      }
      backward_step(p, s, t, going_on, n, s.row + done, d, packed_hh, da + done * ld);
      for (int64_t b = 0; b < n; ++b) {
        s.h[b] = s.h_prev_row[done + b];  // the state before this step is the one after the step before
        s.da_next[b] = s.da_row[done + b];
      }
      done += n;
      going_on = n;
    }
    block_gradients(p, s, m, da, d, packed_ih, helpers);
    t1 = t0;
  }
  initial_gradient(p, s, task, walk.alive(0, task.count), packed_hh);
}

// The weights of each direction packed side by side: ih then hh, `depth` rows of the source to a column where transposed.
template <class T>
struct Packed {
  int64_t ih, hh, bias;  // numbers taken
  Packed(int64_t ih_depth, int64_t ih_columns, int64_t H)
      : ih(padded<T>(ih_columns) * ih_depth), hh(padded<T>(H) * H), bias(leading<T>(H)) {}
  int64_t total() const { return ih + hh + bias; }
};

}  // namespace

template <class T>
void rnn_forward(const RnnForward<T>& p) {
  const auto& z = p.sizes;
  if (z.B == 0) return;
  const int threads = useful_threads(z.threads, 1.0 * static_cast<double>(z.R * z.D * z.H) * static_cast<double>(z.I + z.H));
  const Schedule schedule(p.rows.length, z.B, z.D, threads);
  const Packed<T> sizes(z.I, z.H, z.H);
  Pieces layout(nullptr);
  layout.take<T>(sizes.total() * z.D);
  const int64_t packed_bytes = layout.used();
  ForwardScratch<T>(layout, z.B, z.H);
  const int64_t task_bytes = layout.used() - packed_bytes;
  const Scratch scratch(static_cast<size_t>(packed_bytes + task_bytes * schedule.tasks()));
  T* const packed = reinterpret_cast<T*>(scratch.data());
  parallel_for(threads, z.D, [&](int64_t d) {
    T *const ih = packed + d * sizes.total(), *const hh = ih + sizes.ih, *const bias = hh + sizes.hh;
    pack(p.weight_ih + d * z.H * z.I, z.I, z.H, 1, z.I, ih);
    pack(p.weight_hh + d * z.H * z.H, z.H, z.H, 1, z.H, hh);
    for (int64_t c = 0; c < sizes.bias; ++c)
      bias[c] = c < z.H ? (p.bias_ih ? p.bias_ih[d * z.H + c] : 0) + (p.bias_hh ? p.bias_hh[d * z.H + c] : 0) : 0;
  });
  parallel_for(threads, schedule.tasks(), [&](int64_t i) {
    const T *const ih = packed + schedule[i].direction * sizes.total(), *const hh = ih + sizes.ih;
    forward_task(p, schedule[i], ih, hh, hh + sizes.hh, scratch.data() + packed_bytes + i * task_bytes,
                 schedule.tasks() == 1 ? threads : 1);
  });
}

template <class T>
void rnn_backward(const RnnBackward<T>& p) {
  const auto& z = p.sizes;
  const int threads = useful_threads(z.threads, 2.0 * static_cast<double>(z.R * z.D * z.H) * static_cast<double>(z.I + z.H));
  const Schedule schedule(p.rows.length, z.B, z.D, threads);
  const Packed<T> sizes(z.H, z.I, z.H);
  Pieces layout(nullptr);
  layout.take<T>(sizes.total() * z.D);
  const int64_t packed_bytes = layout.used();
  BackwardScratch<T>(layout, z.B, z.I, z.H, p.dx != nullptr);
  const int64_t task_bytes = layout.used() - packed_bytes;
  const Scratch scratch(static_cast<size_t>(packed_bytes + task_bytes * schedule.tasks()));
  T* const packed = reinterpret_cast<T*>(scratch.data());
  parallel_for(threads, z.D, [&](int64_t d) {
    T* const ih = packed + d * sizes.total();
    if (p.dx) pack(p.weight_ih + d * z.H * z.I, z.H, z.I, z.I, 1, ih);
    pack(p.weight_hh + d * z.H * z.H, z.H, z.H, z.H, 1, ih + sizes.ih);
  });
  parallel_for(threads, schedule.tasks(), [&](int64_t i) {
    const T* const ih = packed + schedule[i].direction * sizes.total();
    backward_task(p, schedule[i], ih, ih + sizes.ih, scratch.data() + packed_bytes + i * task_bytes,
                  schedule.tasks() == 1 ? threads : 1);
  });
  // the tasks of a direction, added up in their order
  const int64_t ld = leading<T>(z.H), stride = task_bytes / static_cast<int64_t>(sizeof(T)), parts = schedule.per_direction();
  constexpr int64_t kColumns = 64;
  const int64_t chunks = ceil_div(z.H, kColumns);
  parallel_for(threads, z.D * chunks, [&](int64_t i) {
    const int64_t d = i / chunks, c0 = i % chunks * kColumns, c1 = c0 + kColumns < z.H ? c0 + kColumns : z.H;
    const T* const first = reinterpret_cast<const T*>(scratch.data() + packed_bytes + d * parts * task_bytes);
    sum_transposed(first, parts, stride, z.I, c0, c1, ld, p.dweight_ih + d * z.H * z.I);
    sum_transposed(first + z.I * ld, parts, stride, z.H, c0, c1, ld, p.dweight_hh + d * z.H * z.H);
    sum_transposed(first + (z.I + z.H) * ld, parts, stride, 1, c0, c1, ld, p.dbias + d * z.H);
  });
}

template void rnn_forward(const RnnForward<float>&);
template void rnn_forward(const RnnForward<double>&);
template void rnn_backward(const RnnBackward<float>&);
template void rnn_backward(const RnnBackward<double>&);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
