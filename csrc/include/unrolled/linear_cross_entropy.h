// What the kernel of the output projection with its loss reads and writes.
#pragma once

#include "unrolled/sequences.h"

namespace unrolled {

template <class T>
struct LinearCrossEntropy {
  int64_t N, D, V, ignore_index;
  double label_smoothing;
  bool mean;
  int threads;
  const T* x;             // [N, D]
  const T* weight;        // [V, D]
  const T* bias;          // [V] or null
  const int64_t* target;  // [N]
  const T* class_weight;  // [V] or null
  T* loss;                // one number
  T* dx;                  // [N, D] for dloss = 1, or null: not wanted; and so are the next two
  T* dweight;             // [V, D]
  T* dbias;               // [V], only with dweight
};

}  // namespace unrolled
