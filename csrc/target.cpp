// The table of one CPU variant.
#include "kernels.h"
#include "simd.h"

namespace unrolled {
namespace UNROLLED_TARGET {
namespace {

template <class T>
void tanh_of(int64_t n, const T* x, T* y) {
  for (int64_t i = 0; i < n; i += Simd<T>::width) store(y + i, vtanh(load(x + i, n - i)), n - i);
}

template <class T>
void exp_of(int64_t n, const T* x, T* y) {
  for (int64_t i = 0; i < n; i += Simd<T>::width) store(y + i, vexp(load(x + i, n - i)), n - i);
}

template <class T>
void forward_of(Cell cell, const RecurrentForward<T>& p) {
  switch (cell) {
    case Cell::rnn_tanh: return rnn_tanh_forward(p);
    case Cell::rnn_relu: return rnn_relu_forward(p);
    case Cell::lstm: return lstm_forward(p);
    case Cell::lstm_options: return lstm_options_forward(p);
    case Cell::gru: return gru_forward(p);
    case Cell::gru_before: return gru_before_forward(p);
  }
}

template <class T>
void backward_of(Cell cell, const RecurrentBackward<T>& p) {
  switch (cell) {
    case Cell::rnn_tanh: return rnn_tanh_backward(p);
    case Cell::rnn_relu: return rnn_relu_backward(p);
    case Cell::lstm: return lstm_backward(p);
    case Cell::lstm_options: return lstm_options_backward(p);
    case Cell::gru: return gru_backward(p);
    case Cell::gru_before: return gru_before_backward(p);
  }
}

}  // namespace

template <class T>
extern const Kernels<T> kKernels = {
    forward_of,       backward_of,      linear_forward,             linear_backward,
    embedding_forward, embedding_backward, dropout_forward,         mean_squared_error_forward,
    mean_squared_error_backward, cross_entropy_forward, cross_entropy_backward, attention_forward, attention_backward,
    additive_attention_forward, additive_attention_backward, norm_forward, norm_backward, rotary,
    feed_forward_forward, feed_forward_backward, linear_cross_entropy, activation_forward, activation_backward, tanh_of, exp_of,
};

extern const Kernels<float>* const float32;
extern const Kernels<double>* const float64;
const Kernels<float>* const float32 = &kKernels<float>;
const Kernels<double>* const float64 = &kKernels<double>;

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
