// The border to Python of additive_attention.
#include "bind.h"

void define_additive_attention(nb::module_&) {}
