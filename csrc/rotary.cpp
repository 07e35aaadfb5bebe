// TODO.
#include "kernels.h"

namespace unrolled {
namespace UNROLLED_TARGET {

template <class T>
void rotary(const Rotary<T>&) {}
template void rotary(const Rotary<float>&);
template void rotary(const Rotary<double>&);

}  // namespace UNROLLED_TARGET
}  // namespace unrolled
