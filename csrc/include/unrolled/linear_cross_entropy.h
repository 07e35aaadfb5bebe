// What the kernel of the output projection with its loss reads and writes.
#pragma once

#include "unrolled/sequences.h"

namespace unrolled {

template <class T>
struct LinearCrossEntropy {
  int threads;
};

}  // namespace unrolled
