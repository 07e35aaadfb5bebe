// What the kernels of additive attention read and write.
#pragma once

#include "unrolled/sequences.h"

namespace unrolled {

template <class T>
struct AdditiveAttentionForward {
  int threads;
};

template <class T>
struct AdditiveAttentionBackward {
  int threads;
};

}  // namespace unrolled
