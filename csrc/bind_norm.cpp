// The border to Python of norm.
#include "bind.h"

void define_norm(nb::module_&) {}
