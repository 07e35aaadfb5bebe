// What each file of a target defines; target.cpp gathers them into the target's table.
#pragma once

#include "unrolled/core.h"

namespace unrolled {
namespace UNROLLED_TARGET {

template <class T>
void rnn_tanh_forward(const RecurrentForward<T>&);
template <class T>
void rnn_tanh_backward(const RecurrentBackward<T>&);
template <class T>
void rnn_relu_forward(const RecurrentForward<T>&);
template <class T>
void rnn_relu_backward(const RecurrentBackward<T>&);
template <class T>
void lstm_forward(const RecurrentForward<T>&);
template <class T>
void lstm_backward(const RecurrentBackward<T>&);
template <class T>
void lstm_options_forward(const RecurrentForward<T>&);
template <class T>
void lstm_options_backward(const RecurrentBackward<T>&);
template <class T>
void gru_forward(const RecurrentForward<T>&);
template <class T>
void gru_backward(const RecurrentBackward<T>&);
template <class T>
void gru_before_forward(const RecurrentForward<T>&);
template <class T>
void gru_before_backward(const RecurrentBackward<T>&);
template <class T>
void linear_forward(const LinearSizes&, const T* x, const T* weight, const T* bias, T* y);
template <class T>
void linear_backward(const LinearSizes&, const T* dy, const T* x, const T* weight, T* dx, T* dweight, T* dbias);
template <class T>
int64_t embedding_forward(int64_t N, int64_t V, int64_t E, const int64_t* token, const T* weight, int threads, T* y);
template <class T>
int64_t embedding_backward(int64_t N, int64_t V, int64_t E, const T* dy, const int64_t* token, int64_t padding,
                           int threads, T* dweight);
template <class T>
void dropout_forward(const DropoutSizes&, const T* x, const int64_t* key, const int64_t* t, T* y);
template <class T>
void mean_squared_error_forward(int64_t n, const T* y, const T* target, int threads, T* loss);
template <class T>
void mean_squared_error_backward(int64_t n, T dloss, const T* y, const T* target, int threads, T* dy);
template <class T>
int64_t cross_entropy_forward(const CrossEntropySizes&, const T* logits, const int64_t* target, const T* class_weight,
                              T* loss, T* log_sum);
template <class T>
void cross_entropy_backward(const CrossEntropySizes&, const T* dloss, const T* logits, const T* log_sum,
                            const int64_t* target, const T* class_weight, T* dlogits);
template <class T>
void attention_forward(const AttentionForward<T>&);
template <class T>
void attention_backward(const AttentionBackward<T>&);
template <class T>
void additive_attention_forward(const AdditiveAttentionForward<T>&);
template <class T>
void additive_attention_backward(const AdditiveAttentionBackward<T>&);
template <class T>
void norm_forward(const NormForward<T>&);
template <class T>
void norm_backward(const NormBackward<T>&);
template <class T>
void rotary(const Rotary<T>&);
template <class T>
void feed_forward_forward(const FeedForwardForward<T>&);
template <class T>
void feed_forward_backward(const FeedForwardBackward<T>&);
template <class T>
int64_t linear_cross_entropy(const LinearCrossEntropy<T>&);
template <class T>
void activation_forward(Activation, int64_t n, const T* x, int threads, T* y);
template <class T>
void activation_backward(Activation, int64_t n, const T* dy, const T* x, int threads, T* dx);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
