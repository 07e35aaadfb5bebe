// TODO.
#include "kernels.h"

namespace unrolled {
namespace UNROLLED_TARGET {

template <class T>
void additive_attention_forward(const AdditiveAttentionForward<T>&) {}
template <class T>
void additive_attention_backward(const AdditiveAttentionBackward<T>&) {}
template void additive_attention_forward(const AdditiveAttentionForward<float>&);
template void additive_attention_forward(const AdditiveAttentionForward<double>&);
template void additive_attention_backward(const AdditiveAttentionBackward<float>&);
template void additive_attention_backward(const AdditiveAttentionBackward<double>&);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
