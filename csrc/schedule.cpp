#include "unrolled/schedule.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace unrolled {

Schedule::Schedule(const int64_t* length, int64_t B, int64_t D, int threads) {
  const int64_t wanted = threads % D == 0 ? threads / D : threads;
  groups_ = std::max<int64_t>(1, std::min<int64_t>(wanted, B));
  tasks_ = groups_ * D;
  std::vector<int64_t> order(B), tokens(groups_, 0);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length[a] > length[b]; });
  std::vector<std::vector<int64_t>> members(groups_);
  const bool equal = B == 0 || length[order.front()] == length[order.back()];
  for (int64_t i = 0; i < B; ++i) {
    // equal lengths: neighbours stay together, so that threads do not share cache lines
    const int64_t g = equal ? i * groups_ / B : std::min_element(tokens.begin(), tokens.end()) - tokens.begin();
    members[g].push_back(order[i]);
    tokens[g] += length[order[i]];
  }
  task_ = new Task[tasks_];
  sequence_ = new int64_t[B];
  int64_t* next = sequence_;
  for (int64_t g = 0; g < groups_; ++g) {
    const auto count = static_cast<int64_t>(members[g].size());
    largest_ = std::max(largest_, count);
    for (int64_t d = 0; d < D; ++d) task_[d * groups_ + g] = {d, count, next};
    next = std::copy(members[g].begin(), members[g].end(), next);
  }
}

Schedule::~Schedule() {
  delete[] task_;
  delete[] sequence_;
}

void heaviest_first(Piece* piece, int64_t n) {
  const auto heavier = [](const Piece& a, const Piece& b) { return a.work > b.work; };
  if (!std::is_sorted(piece, piece + n, heavier)) std::stable_sort(piece, piece + n, heavier);
}

void in_large_pages(const void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data), first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + bytes) / kPage * kPage;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

Scratch::Scratch(size_t bytes) : data_(static_cast<char*>(::operator new(bytes, std::align_val_t(64)))) {
  in_large_pages(data_, bytes);
}
Scratch::~Scratch() { ::operator delete(data_, std::align_val_t(64)); }

}  // namespace unrolled
