// Parallel regions on the OpenMP pool that torch has already loaded: a second pool would fight with its spinning workers.
#pragma once

#include <stdint.h>

namespace unrolled {

using Body = void (*)(void* context, int64_t index);

// Runs body(context, i) for every i in [0, n) on at most `threads` threads; one thread after a fork, where the pool hangs.
void parallel_for(int threads, int64_t n, Body body, void* context);

template <class F>
void parallel_for(int threads, int64_t n, F&& f) {
  parallel_for(
      threads, n, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

// f(worker, task) for every task, the first ones first, on at most `threads` workers, each with scratch of its own.
template <class F>
void share_out(int threads, int64_t tasks, F&& f) {
  int64_t next = 0;
  parallel_for(threads, threads, [&](int64_t worker) {
    for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < tasks;) f(worker, i);
  });
}

// How many threads are worth it for `operations` multiply-adds: a region costs a few microseconds.
int useful_threads(int threads, double operations);

}  // namespace unrolled
