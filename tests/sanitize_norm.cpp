#include "sanitize.h"

void sanitize::norm() {}
