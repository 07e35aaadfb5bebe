// What the kernels of the normalisations and of the rotary positions read and write.
#pragma once

#include "unrolled/sequences.h"

namespace unrolled {

// r = x + m * s, where m drops; y = norm(r).
template <class T>
struct NormForward {
  int64_t N, F;
  bool centred;  // layer norm; else by the mean square alone
  double epsilon;
  Dropping dropping;
  const T* x;     // [N, F]
  const T* s;     // [N, F]; null: r is x
  const T* gain;  // [F]; null: 1
  const T* bias;  // [F]; null: 0
  T* r;           // [N, F]; null without s
  T* y;           // [N, F]
  T* mean;        // [N]; null unless centred
  T* scale;       // [N]
  int threads;
};

template <class T>
struct NormBackward {
  int64_t N, F;
  bool centred;
  Dropping dropping;
  const T* dr;  // [N, F], the gradient of r itself; null: 0
  const T* dy;  // [N, F]
  const T* r;   // [N, F]
  const T* mean;
  const T* scale;
  const T* gain;
  T* dx;     // [N, F]
  T* ds;     // [N, F]; null where nothing is dropped: it is dx
  T* dgain;  // [F]; null: not wanted
  T* dbias;  // [F]; null: not wanted
  int threads;
};

template <class T>
struct Rotary {
  int64_t N, W, heads, columns;
  const double* frequency;  // [columns / heads / 2]: radians a position
  const T* x;               // [N, W]
  const int64_t* t;         // [N]
  T* y;                     // [N, W]
  int threads;
};

}  // namespace unrolled
