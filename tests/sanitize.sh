#!/usr/bin/env bash
# Builds the core with sanitizers and warnings as errors and drives every kernel. Usage: tests/sanitize.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?where to build}
for sanitizers in address,undefined thread; do
  cmake -S . -B "$folder/$sanitizers" -DUNROLLED_SANITIZE=$sanitizers -DUNROLLED_WERROR=ON >/dev/null
  cmake --build "$folder/$sanitizers" -j "$(nproc)" >/dev/null
  echo "$sanitizers: $(ASAN_OPTIONS=quarantine_size_mb=16 "$folder/$sanitizers/sanitize")"
done
