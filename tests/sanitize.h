// What the sanitizer drivers share.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "unrolled/core.h"

namespace sanitize {

using unrolled::Kernels;

inline std::mt19937_64 generator(1);
inline int64_t calls = 0;

// A buffer of its own on the heap, exactly as long as the array, so that a step beyond either end is seen.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t n, T value = std::numeric_limits<T>::quiet_NaN()) : n_(n), data_(new T[n]) {
    for (int64_t i = 0; i < n; ++i) data_[i] = value;
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { delete[] data_; }
  operator T*() { return data_; }
  T* begin() { return data_; }
  T* end() { return data_ + n_; }
  int64_t size() const { return n_; }

 private:
  int64_t n_;
  T* data_;
};

template <class T>
struct Random : Buffer<T> {
  explicit Random(int64_t n, double scale = 1) : Buffer<T>(n) {
    std::normal_distribution<double> normal(0, scale);
    for (T& x : *this) x = static_cast<T>(normal(generator));
  }
};

inline void demand(bool ok, const char* what) {
  if (ok) return;
  std::printf("FAILED: %s\n", what);
  std::exit(1);
}

// What a call gave, as numbers in a row; NaN where nothing was assigned.
struct Outputs {
  std::vector<double> values;
  template <class T>
  void add(Buffer<T>& buffer) {
    for (const T x : buffer) {
      demand(!std::isnan(x), "an output was not assigned");
      values.push_back(static_cast<double>(x));
    }
  }
};

// The same call on every variant, with the same numbers.
template <class F>
void on_every_variant(const std::string& name, F&& call) {
  int count;
  const unrolled::Variant* all = unrolled::variants(&count);
  const auto seed = generator();
  std::vector<double> reference;
  for (int i = count - 1; i >= 0; --i) {  // the plainest first
    if (!all[i].supported()) continue;
    for (const int threads : {1, 2, 3}) {
      generator.seed(seed);
      const std::vector<double> exact = call(*all[i].float64, threads).values;
      generator.seed(seed);
      const std::vector<double> single = call(*all[i].float32, threads).values;
      if (reference.empty()) reference = exact;
      demand(exact.size() == reference.size() && single.size() == reference.size(), "as many outputs on every variant");
      double largest = 1;
      for (const double r : reference) largest = std::max(largest, std::abs(r));
      for (size_t k = 0; k < exact.size(); ++k)
        if (!(std::abs(exact[k] - reference[k]) <= 1e-12 * largest && std::abs(single[k] - reference[k]) <= 1e-4 * largest))
          demand(false, (name + " on " + all[i].name + ", " + std::to_string(threads) + " threads, number " +
                         std::to_string(k)).c_str());
    }
  }
}

void attention();  // drives every kernel of its family
void norm();  // drives every kernel of its family
void feed_forward();  // drives every kernel of its family
void output();  // drives every kernel of its family

}  // namespace sanitize
