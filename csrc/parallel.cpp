#include "unrolled/parallel.h"

#include <atomic>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <dlfcn.h>
#include <pthread.h>
#endif

namespace unrolled {
namespace {

struct Region {
  Body body;
  void* context;
  int64_t n;
  std::atomic<int64_t> next{0};

  static void run(void* self) {
    auto& region = *static_cast<Region*>(self);
    for (int64_t i; (i = region.next.fetch_add(1, std::memory_order_relaxed)) < region.n;) region.body(region.context, i);
  }
};

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

std::atomic<bool> forked{false};

#if defined(_WIN32)
GompParallel torch_pool() { return nullptr; }
#else
// from the moment the module is loaded: torch may have started its pool before our first call
const int watching = pthread_atfork(nullptr, nullptr, [] { forked = true; });

GompParallel torch_pool() {
  static const auto pool = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return pool;
}
#endif

}  // namespace

void parallel_for(int threads, int64_t n, Body body, void* context) {
  if (threads > n) threads = static_cast<int>(n);
  const GompParallel pool = torch_pool();
  Region region{body, context, n};
  if (threads <= 1 || forked) {
    Region::run(&region);
  } else if (pool) {
    pool(Region::run, &region, static_cast<unsigned>(threads), 0);
  } else {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(Region::run, &region);
    Region::run(&region);
    for (auto& other : others) other.join();
  }
}

int useful_threads(int threads, double operations) {
  const double worth = operations / 200e3;
  return worth < threads ? (worth < 1 ? 1 : static_cast<int>(worth)) : threads;
}

}  // namespace unrolled
