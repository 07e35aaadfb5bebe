// The contract of the core: what each kernel reads and writes. No torch, no Python, no C++ library type.
//
// Every array lies row by row without gaps. Outputs come last and are assigned unless they say "accumulate".
// Letters as in docs/en/notation.md: R rows of memory, N tokens, B sequences, D directions, I input, H hidden, O output,
// V vocabulary, E embedding, C classes, F features. A kernel that returns int64_t returns -1, or the place of a bad index.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "unrolled/additive_attention.h"
#include "unrolled/attention.h"
#include "unrolled/feed_forward.h"
#include "unrolled/linear_cross_entropy.h"
#include "unrolled/norm.h"
#include "unrolled/sequences.h"

namespace unrolled {

// A recurrent cell. G gates stand one below the other in its weights, torch's order; S numbers a unit are kept for the
// backward: RNN (G 1, S 0), LSTM (i f g o; S 4: the gates), GRU (r z n; S 4: the gates and W_hn h + b_hn), the GRU that
// resets before the product (S 3: the gates). lstm_options: with peepholes or a normalised memory.
enum class Cell { rnn_tanh, rnn_relu, lstm, lstm_options, gru, gru_before };

struct RecurrentSizes {
  int64_t R, B, D, I, H;
  int64_t P;       // units of h: H without a projection
  int64_t blocks;  // of H numbers kept for each row and direction, see `kept`
  bool plain;      // no option but bptt, and a pointwise cell: it runs fused, and keeps no more than the cell's own
  int64_t bptt;    // no gradient passes from step t + 1 to step t where this divides t; 0: it passes everywhere
  int threads;
};

// What a recurrence may have besides; all null and 0 for the plain one. With any of it, h and c as the cell gives them are
// kept too, and with layer norms, their normal rows.
template <class T>
struct RecurrentOptions {
  const T* weight_hr;   // [D * P, H] the projection
  const T* norm_ih;     // [D * G * H] gain of the layer norm of W_ih x; its bias is bias_ih
  const T* norm_hh;     // [D * G * H] and of W_hh h
  const T* peephole;    // [D * 3 * H] lstm_options only, as are the next two
  const T* norm_c;      // [D * H]
  const T* bias_c;      // [D * H]
  const T* mask;        // [D, B, P] multiplies h before W_hh
  double zoneout_h, zoneout_c;  // the probability that a unit keeps its old value
  const int64_t* seed;  // one number; null: the share zoneout_h of the old value in the place of chance
  const int64_t* keys;  // [B]
  int64_t layer;
};

constexpr int64_t kScales = 4;  // of layer norms: of u, of v, of c, and of what is reset first

template <class T>
struct RecurrentForward {
  RecurrentSizes sizes;
  Rows rows;
  const T* x;          // [R, I]
  const T* h0;         // [D, B, P]
  const T* c0;         // [D, B, H], LSTM only
  const T* weight_ih;  // [D * G * H, I]
  const T* weight_hh;  // [D * G * H, P]
  const T* bias_ih;    // [D * G * H] or null
  const T* bias_hh;    // [D * G * H] or null
  RecurrentOptions<T> options;
  T* y;                // [R, D * P], cleared by the caller where rows of no sequence exist, and so are the four below
  T* h_last;           // [D, B, P]
  T* c_last;           // [D, B, H], LSTM only
  T* h_prev;           // [R, D * P] the state before each row; or null: nothing is kept
  T* c_prev;           // [R, D * H], LSTM only
  T* kept;             // [R, D * blocks * H]: S, and with options the cell's h (and c), the normals of u (G), v (G), c
  T* scales;           // [R, D * kScales], layer norm only
};

template <class T>
struct RecurrentBackward {
  RecurrentSizes sizes;
  Rows rows;
  const T* dy;         // [R, D * P]
  const T* dh_last;    // [D, B, P]
  const T* dc_last;    // [D, B, H], LSTM only
  const T* x;          // [R, I]
  const T* weight_ih;  // [D * G * H, I]
  const T* weight_hh;  // [D * G * H, P]
  RecurrentOptions<T> options;
  const T* h_prev;     // [R, D * P]
  const T* c_prev;     // [R, D * H], LSTM only
  const T* kept;       // [R, D * blocks * H]
  const T* scales;     // [R, D * kScales]
  const T* h_end;      // [D, B, P] the last states
  const T* c_end;      // [D, B, H], LSTM only
  T* dx;               // [D, R, I] a part for each direction, cleared likewise; or null: not wanted
  T* dh0;              // [D, B, P]
  T* dc0;              // [D, B, H], LSTM only
  T* dweight_ih;       // [D * G * H, I]
  T* dweight_hh;       // [D * G * H, P]
  T* dbias_ih;         // [D * G * H]
  T* dbias_hh;         // [D * G * H]
  T* dweight_hr;       // as in the options, and so are the next five; null where there is no such weight
  T* dnorm_ih;
  T* dnorm_hh;
  T* dpeephole;
  T* dnorm_c;
  T* dbias_c;
  T* dh;               // [R, D * P] the total derivative with respect to h after each row, cleared likewise; or null
  T* dc;               // [R, D * H] and to c as the cell gives it
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
  void (*attention_forward)(const AttentionForward<T>&);
  void (*attention_backward)(const AttentionBackward<T>&);
  void (*additive_attention_forward)(const AdditiveAttentionForward<T>&);
  void (*additive_attention_backward)(const AdditiveAttentionBackward<T>&);
  void (*norm_forward)(const NormForward<T>&);
  void (*norm_backward)(const NormBackward<T>&);
  void (*rotary)(const Rotary<T>&);
  void (*feed_forward_forward)(const FeedForwardForward<T>&);
  void (*feed_forward_backward)(const FeedForwardBackward<T>&);
  int64_t (*linear_cross_entropy)(const LinearCrossEntropy<T>&);
  // x [n]; y [n]; dy [n]; dx [n]
  void (*activation_forward)(Activation, int64_t n, const T* x, int threads, T* y);
  void (*activation_backward)(Activation, int64_t n, const T* dy, const T* x, int threads, T* dx);
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
