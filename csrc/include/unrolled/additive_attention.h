// What the kernels of additive attention read and write.
#pragma once

#include "unrolled/sequences.h"

namespace unrolled {

struct AdditiveAttentionSizes {
  int64_t N, M;     // rows of queries and of keys
  int64_t B, H, D;  // sequences, numbers of a query and of a value
  int threads;
};

// Added to the scores: of query i and key j of sequence b the number at b * sequence + i * query + j * key; or null.
template <class T>
struct AdditiveMask {
  const T* data;
  int64_t sequence, query, key;  // 0 where the mask is the same for all
};

template <class T>
struct AdditiveAttentionForward {
  AdditiveAttentionSizes sizes;
  Rows queries, keys;
  const T* q;      // [N, H]
  const T* k;      // [M, H]
  const T* value;  // [M, D]
  const T* v;      // [H]
  AdditiveMask<T> mask;
  T* o;            // [N, D], cleared by the caller where rows of no sequence exist, and so is log_sum
  T* log_sum;      // [N]
  int64_t Q, K;    // the longest of queries and of keys
  T* weights;      // [B, Q, K], cleared by the caller, or null: not wanted
};

template <class T>
struct AdditiveAttentionBackward {
  AdditiveAttentionSizes sizes;
  Rows queries, keys;
  const T* d_o;      // [N, D]
  const T* q;        // [N, H], and the rest as in the forward
  const T* k;
  const T* value;
  const T* v;
  AdditiveMask<T> mask;
  const T* o;
  const T* log_sum;
  T* dq;             // [N, H], cleared by the caller likewise, and so are the next two
  T* dk;             // [M, H]
  T* dvalue;         // [M, D]
  T* dv;             // [H]
};

}  // namespace unrolled
