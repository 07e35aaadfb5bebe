// What the kernels of the normalisations and of the rotary positions read and write.
#pragma once

#include "unrolled/sequences.h"

namespace unrolled {

template <class T>
struct NormForward {
  int threads;
};

template <class T>
struct NormBackward {
  int threads;
};

template <class T>
struct Rotary {
  int threads;
};

}  // namespace unrolled
