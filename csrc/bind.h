// What the border to Python shares: arrays, checks, and the kernels of the chosen variant.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "unrolled/core.h"
#include "unrolled/schedule.h"

namespace nb = nanobind;
using namespace nb::literals;

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using Input = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using OptionalInput = std::optional<Input<T, N>>;

extern const unrolled::Variant* chosen;

template <class T>
const unrolled::Kernels<T>& kernels();
template <>
inline const unrolled::Kernels<float>& kernels() {
  return *chosen->float32;
}
template <>
inline const unrolled::Kernels<double>& kernels() {
  return *chosen->float64;
}

inline void check(bool ok, const char* what) {
  if (!ok) throw nb::value_error(what);
}

[[noreturn]] inline void refuse(const std::string& text) { throw nb::value_error(text.c_str()); }

template <class A>
int64_t size(const A& array, size_t axis) {
  return static_cast<int64_t>(array.shape(axis));
}

template <class A>
auto pointer(const std::optional<A>& array, int64_t expected, const char* what) -> decltype(array->data()) {
  if (!array) return nullptr;
  if (static_cast<int64_t>(array->size()) != expected) refuse(std::string(what) + ", found " + std::to_string(array->size()));
  return array->data();
}

// The pointer of an array of the given shape; null for None, which `required` refuses.
template <class A>
auto shaped(const std::optional<A>& array, std::initializer_list<int64_t> shape, bool required, const char* what)
    -> decltype(array->data()) {
  if (!array) {
    check(!required, what);
    return nullptr;
  }
  size_t axis = 0;
  for (const int64_t n : shape) {
    const int64_t found = size(*array, axis++);
    if (found != n) refuse(std::string(what) + ", found " + std::to_string(found) + " for " + std::to_string(n));
  }
  return array->data();
}

// A row outside memory would be written to: the last check before pointers. `tokens`: how many rows belong to a sequence.
inline unrolled::Rows rows_of(const Input<int64_t, 1>& start, const Input<int64_t, 1>& length, int64_t step, int64_t R, int64_t B,
                              int64_t& tokens) {
  tokens = 0;
  check(size(start, 0) == B && size(length, 0) == B, "start and length must have one number for each sequence");
  for (int64_t b = 0; b < B; ++b) {
    const int64_t n = length.data()[b], first = start.data()[b];
    const int64_t last = n > R ? -1 : first + (n - 1) * step;  // no product of numbers that nobody has looked at
    if (n < 0 || (n > 0 && !(first >= 0 && first < R && last >= 0 && last < R)))
      refuse("sequence " + std::to_string(b) + " (row " + std::to_string(first) + ", step " + std::to_string(step) +
             ", length " + std::to_string(n) + ") leaves the " + std::to_string(R) + " rows of memory");
    tokens += n;
  }
  return {start.data(), length.data(), step};
}

template <class A>
void in_large_pages(const A& array) {
  unrolled::in_large_pages(array.data(), array.nbytes());
}
template <class A>
void in_large_pages(const std::optional<A>& array) {
  if (array) in_large_pages(*array);
}

template <class A>
void clear(const A& array) {
  std::memset(array.data(), 0, array.nbytes());
}

inline void report(int64_t bad, const int64_t* index, int64_t limit, const char* what) {
  if (bad < 0) return;
  const std::string text = std::string(what) + " " + std::to_string(index[bad]) + " at place " + std::to_string(bad) +
                           " lies outside [0, " + std::to_string(limit) + ")";
  throw nb::index_error(text.c_str());
}

// No row in two sequences: it would be written twice.
inline void check_apart(const unrolled::Rows& rows, int64_t B, int64_t R) {
  std::vector<bool> taken(static_cast<size_t>(R), false);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t t = 0; t < rows.length[b]; ++t) {
      const auto row = static_cast<size_t>(rows.start[b] + t * rows.step);
      if (taken[row])
        refuse("a row must not belong to two sequences, row " + std::to_string(row) + " does: to sequence " + std::to_string(b) +
               " and one before it");
      taken[row] = true;
    }
}

void define_recurrent(nb::module_& m);
void define_attention(nb::module_& m);
void define_additive_attention(nb::module_& m);
void define_norm(nb::module_& m);
void define_feed_forward(nb::module_& m);
void define_linear_cross_entropy(nb::module_& m);
