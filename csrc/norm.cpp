// TODO.
#include "kernels.h"

namespace unrolled {
namespace UNROLLED_TARGET {

template <class T>
void norm_forward(const NormForward<T>&) {}
template <class T>
void norm_backward(const NormBackward<T>&) {}
template void norm_forward(const NormForward<float>&);
template void norm_forward(const NormForward<double>&);
template void norm_backward(const NormBackward<float>&);
template void norm_backward(const NormBackward<double>&);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
