// The border to Python of attention.
#include "bind.h"

void define_attention(nb::module_&) {}
