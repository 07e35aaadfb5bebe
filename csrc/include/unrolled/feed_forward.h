// What the kernels of the feed-forward layer read and write.
#pragma once

#include "unrolled/sequences.h"

namespace unrolled {

template <class T>
struct FeedForwardForward {
  int threads;
};

template <class T>
struct FeedForwardBackward {
  int threads;
};

}  // namespace unrolled
