#include "sanitize.h"

void sanitize::output() {}
