// Defines the two kernels of a cell from its struct, in float and double.
#pragma once

#include "kernels.h"
#include "phased_backward.h"

#define UNROLLED_KERNELS(name, forward, backward)                          \
  template <class T>                                                       \
  void name##_forward(const RecurrentForward<T>& p) { forward; }           \
  template <class T>                                                       \
  void name##_backward(const RecurrentBackward<T>& p) { backward; }        \
  template void name##_forward(const RecurrentForward<float>&);            \
  template void name##_forward(const RecurrentForward<double>&);           \
  template void name##_backward(const RecurrentBackward<float>&);          \
  template void name##_backward(const RecurrentBackward<double>&);

// A pointwise cell: fused, or with options in phases.
#define UNROLLED_CELL(Cell, name)                                                                          \
  UNROLLED_KERNELS(name,                                                                                   \
                   (p.sizes.plain ? fused_forward<T, Cell<T>>(p) : phased_forward<T, Pointwise<T, Cell<T>>>(p)), \
                   (p.sizes.plain ? fused_backward<T, Cell<T>>(p) : phased_backward<T, Pointwise<T, Cell<T>>>(p)))

// A cell of whole rows.
#define UNROLLED_ROW_CELL(Row, name) UNROLLED_KERNELS(name, (phased_forward<T, Row<T>>(p)), (phased_backward<T, Row<T>>(p)))
