// TODO.
#include "kernels.h"

namespace unrolled {
namespace UNROLLED_TARGET {

template <class T>
void feed_forward_forward(const FeedForwardForward<T>&) {}
template <class T>
void feed_forward_backward(const FeedForwardBackward<T>&) {}
template void feed_forward_forward(const FeedForwardForward<float>&);
template void feed_forward_forward(const FeedForwardForward<double>&);
template void feed_forward_backward(const FeedForwardBackward<float>&);
template void feed_forward_backward(const FeedForwardBackward<double>&);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
