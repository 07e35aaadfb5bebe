// The border to Python of feed_forward.
#include "bind.h"

void define_feed_forward(nb::module_&) {}
