// What the kernels of scaled dot-product attention read and write.
#pragma once

#include "unrolled/sequences.h"

namespace unrolled {

struct AttentionSizes {
  int64_t N, M;  // rows of queries and of keys
  int64_t B, A, F;  // sequences, heads, numbers of a head
  bool causal;
  double scale;
  int threads;
};

template <class T>
struct AttentionForward {
  AttentionSizes sizes;
};

template <class T>
struct AttentionBackward {
  AttentionSizes sizes;
};

}  // namespace unrolled
