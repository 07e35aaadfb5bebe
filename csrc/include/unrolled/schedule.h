// How a recurrence is shared out: every sequence is independent, so a task is some sequences of one direction.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace unrolled {

struct Task {
  int64_t direction;
  int64_t count;            // sequences
  const int64_t* sequence;  // [count], longest first
};

// Tasks of one direction follow one another, the same number for each; balanced by tokens.
class Schedule {
 public:
  Schedule(const int64_t* length, int64_t B, int64_t D, int threads);
  ~Schedule();
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  int64_t tasks() const { return tasks_; }
  int64_t per_direction() const { return groups_; }
  int64_t largest() const { return largest_; }  // sequences of a task
  const Task& operator[](int64_t i) const { return task_[i]; }

 private:
  int64_t groups_, tasks_, largest_ = 0;
  Task* task_;
  int64_t* sequence_;
};

// Part of the work on one head of one sequence: its queries, or its keys, [first, last).
struct Piece {
  int64_t sequence, head, first, last, part;
  double work;
};

void heaviest_first(Piece* piece, int64_t n);  // those of equal work in their order

// Large memory is mostly memory that was never touched. The kernel hands it out about four times as fast in pages of 2 MB,
// where it was told to.
void in_large_pages(const void* data, size_t bytes);

// Scratch for a call, aligned to a cache line; contents undefined. std::bad_alloc where there is none.
class Scratch {
 public:
  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data() const { return data_; }

 private:
  char* data_;
};

}  // namespace unrolled
