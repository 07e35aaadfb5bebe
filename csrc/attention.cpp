// TODO.
#include "kernels.h"

namespace unrolled {
namespace UNROLLED_TARGET {

template <class T>
void attention_forward(const AttentionForward<T>&) {}
template <class T>
void attention_backward(const AttentionBackward<T>&) {}
template void attention_forward(const AttentionForward<float>&);
template void attention_forward(const AttentionForward<double>&);
template void attention_backward(const AttentionBackward<float>&);
template void attention_backward(const AttentionBackward<double>&);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
