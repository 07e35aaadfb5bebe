#include "sanitize.h"

void sanitize::attention() {}
