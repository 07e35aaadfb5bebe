// The contract of the core: what each kernel reads and writes. No torch, no Python, no C++ library type.
//
// Every array lies row by row without gaps. Outputs come last and are assigned unless they say "accumulate".
// Letters as in docs/en/notation.md: R rows of memory, N tokens, B sequences, D directions, I input, H hidden, O output,
// V vocabulary, E embedding, C classes, F features. A kernel that returns int64_t returns -1, or the place of a bad index.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace unrolled {

// Where the sequences lie: step t of sequence b is row start[b] + t * step of the R rows.
struct Rows {
  const int64_t* start;   // [B]
  const int64_t* length;  // [B]
  int64_t step;
};

// A recurrent cell. G gates stand one below the other in its weights, torch's order; S numbers a unit are kept for the
// backward: RNN (G 1, S 0), LSTM (i f g o; S 4: the gates), GRU (r z n; S 4: the gates and W_hn h + b_hn).
enum class Cell { rnn_tanh, rnn_relu, lstm, gru };

struct RecurrentSizes {
  int64_t R, B, D, I, H;
  int threads;
};

template <class T>
struct RecurrentForward {
  RecurrentSizes sizes;
  Rows rows;
  const T* x;          // [R, I]
  const T* h0;         // [D, B, H]
  const T* c0;         // [D, B, H], LSTM only
  const T* weight_ih;  // [D * G * H, I]
  const T* weight_hh;  // [D * G * H, H]
  const T* bias_ih;    // [D * G * H] or null
  const T* bias_hh;    // [D * G * H] or null
  T* y;                // [R, D * H], cleared by the caller where rows of no sequence exist, and so are the three below
  T* h_last;           // [D, B, H]
  T* c_last;           // [D, B, H], LSTM only
  T* h_prev;           // [R, D * H] the state before each row; or null: nothing is kept
  T* c_prev;           // [R, D * H], LSTM only
  T* kept;             // [R, D * S * H], S blocks of H a direction
};

template <class T>
struct RecurrentBackward {
  RecurrentSizes sizes;
  Rows rows;
  const T* dy;         // [R, D * H]
  const T* dh_last;    // [D, B, H]
  const T* dc_last;    // [D, B, H], LSTM only
  const T* x;          // [R, I]
  const T* weight_ih;  // [D * G * H, I]
  const T* weight_hh;  // [D * G * H, H]
  const T* h_prev;     // [R, D * H]
  const T* h_end;      // [D, B, H] the last states
  const T* c_prev;     // [R, D * H], LSTM only
  const T* c_end;      // [D, B, H], LSTM only
  const T* kept;       // [R, D * S * H]
  T* dx;               // [D, R, I] a part for each direction, cleared likewise; or null: not wanted
  T* dh0;              // [D, B, H]
  T* dc0;              // [D, B, H], LSTM only
  T* dweight_ih;       // [D * G * H, I]
  T* dweight_hh;       // [D * G * H, H]
  T* dbias_ih;         // [D * G * H]
  T* dbias_hh;         // [D * G * H]
};

struct LinearSizes {
  int64_t N, I, O;
  int threads;
};

struct CrossEntropySizes {
  int64_t N, C, ignore_index;
  double label_smoothing;
  int threads;
};

struct DropoutSizes {
  int64_t N, F;
  int64_t seed, layer;
  double p;
  int threads;
};

template <class T>
struct Kernels {
  void (*recurrent_forward)(Cell, const RecurrentForward<T>&);
  void (*recurrent_backward)(Cell, const RecurrentBackward<T>&);
  // x [N, I], weight [O, I], bias [O] or null; y [N, O]
  void (*linear_forward)(const LinearSizes&, const T* x, const T* weight, const T* bias, T* y);
  // dx [N, I] or null, dweight [O, I], dbias [O]
  void (*linear_backward)(const LinearSizes&, const T* dy, const T* x, const T* weight, T* dx, T* dweight, T* dbias);
  // token [N], weight [V, E]; y [N, E]
  int64_t (*embedding_forward)(int64_t N, int64_t V, int64_t E, const int64_t* token, const T* weight, int threads, T* y);
  // dweight [V, E]; the row `padding` stays 0 (-1: none)
  int64_t (*embedding_backward)(int64_t N, int64_t V, int64_t E, const T* dy, const int64_t* token, int64_t padding,
                                int threads, T* dweight);
  // x [N, F], key [N], t [N]; y [N, F]
  void (*dropout_forward)(const DropoutSizes&, const T* x, const int64_t* key, const int64_t* t, T* y);
  // y [n], target [n]; one number
  void (*mean_squared_error_forward)(int64_t n, const T* y, const T* target, int threads, T* loss);
  void (*mean_squared_error_backward)(int64_t n, T dloss, const T* y, const T* target, int threads, T* dy);
  // logits [N, C], target [N], class_weight [C] or null; loss [N], log_sum [N]
  int64_t (*cross_entropy_forward)(const CrossEntropySizes&, const T* logits, const int64_t* target,
                                   const T* class_weight, T* loss, T* log_sum);
  // dloss [N]; dlogits [N, C]
  void (*cross_entropy_backward)(const CrossEntropySizes&, const T* dloss, const T* logits, const T* log_sum,
                                 const int64_t* target, const T* class_weight, T* dlogits);
  // y = tanh(x) and y = exp(x) of n numbers, for the tests of their accuracy
  void (*tanh)(int64_t n, const T* x, T* y);
  void (*exp)(int64_t n, const T* x, T* y);
};

// One CPU variant. Each is the same source compiled for another instruction set, in a namespace of its own.
struct Variant {
  const char* name;
  bool (*supported)();
  const Kernels<float>* float32;
  const Kernels<double>* float64;
};

const Variant* variants(int* count);  // best first

}  // namespace unrolled
