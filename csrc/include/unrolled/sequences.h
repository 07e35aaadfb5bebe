// Where sequences lie in memory, and which numbers of their rows are dropped.
#pragma once

#include <stdint.h>

namespace unrolled {

// Where the sequences lie: step t of sequence b is row start[b] + t * step of the R rows.
struct Rows {
  const int64_t* start;   // [B]
  const int64_t* length;  // [B]
  int64_t step;
};

// Which numbers of a row are dropped: a function of (seed, layer, key, t, unit), as in philox.h. p = 0: none, null pointers.
struct Dropping {
  double p;
  int64_t seed, layer;
  const int64_t* key;  // one for each row, and t
  const int64_t* t;
};

}  // namespace unrolled
