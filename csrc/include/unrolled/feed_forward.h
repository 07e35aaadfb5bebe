// What the kernels of the activations and of the feed-forward layer read and write. D width, F hidden units.
#pragma once

#include "unrolled/sequences.h"

namespace unrolled {

enum class Activation { relu, gelu, gelu_tanh, silu };

struct FeedForwardSizes {
  int64_t N, D, F;
  Activation activation;
  int threads;
};

template <class T>
struct FeedForwardForward {
  FeedForwardSizes sizes;
  Dropping dropping;     // of the hidden units
  const T* x;            // [N, D]
  const T* weight1;      // [F, D]
  const T* bias1;        // [F] or null
  const T* weight2;      // [D, F]
  const T* bias2;        // [D] or null
  const T* weight_gate;  // [F, D] or null: no gate
  const T* bias_gate;    // [F] or null
  T* y;                  // [N, D]
  T* a;                  // [N, F] before the activation, for the backward; or null: nothing is kept
  T* gate;               // [N, F] likewise, with a gate only
};

template <class T>
struct FeedForwardBackward {
  FeedForwardSizes sizes;
  Dropping dropping;
  const T* dy;           // [N, D]
  const T* x;            // [N, D]
  const T* a;            // [N, F]
  const T* gate;         // [N, F] or null
  const T* weight1;      // [F, D]
  const T* weight2;      // [D, F]
  const T* weight_gate;  // [F, D] or null
  T* dx;                 // [N, D] or null: not wanted
  T* dweight1;           // [F, D]
  T* dbias1;             // [F]
  T* dweight2;           // [D, F]
  T* dbias2;             // [D]
  T* dweight_gate;       // [F, D], with a gate only
  T* dbias_gate;         // [F]
};

}  // namespace unrolled
