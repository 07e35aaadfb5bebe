// What the kernels of scaled dot-product attention read and write. The equations are in src/unrolled/equations/attention.py.
#pragma once

#include "unrolled/sequences.h"

namespace unrolled {

struct AttentionSizes {
  int64_t N, M;     // rows of queries and of keys
  int64_t B, A;     // sequences, heads
  int64_t F, G;     // numbers of a head, of its values
  int64_t q, k, v;  // from one row of q to the next, and of k and v: they may lie side by side in one array
  bool causal;
  double scale;
  int threads;
};

// One of both or none; element (b, a, i, j) at the sum of its places times the strides, 0 where the mask is repeated.
template <class T>
struct AttentionMask {
  const bool* seen;
  const T* added;
  int64_t stride[4];
};

template <class T>
struct AttentionInputs {
  AttentionSizes sizes;
  Rows queries, keys;
  const T *q, *k, *v;
  AttentionMask<T> mask;
  const T* slopes;    // [A] or null
  Dropping dropping;  // key and t of each row of queries
};

template <class T>
struct AttentionForward {
  AttentionInputs<T> in;
  T* o;        // [N, A * G], cleared by the caller where rows of no sequence exist, and so is log_sum
  T* log_sum;  // [N, A]
  T* weights;  // [B, A, Tq, Tk], Tq and Tk the longest, cleared by the caller; or null
  int64_t longest_query, longest_key;  // of the weights
};

template <class T>
struct AttentionBackward {
  AttentionInputs<T> in;
  const T *do_, *o, *log_sum;
  T *dq, *dk, *dv;  // laid out as q, k and v, cleared by the caller where rows of no sequence exist
};

}  // namespace unrolled
