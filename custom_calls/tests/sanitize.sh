#!/usr/bin/env bash
# Builds and runs the C++ tests under the address, undefined-behaviour and thread sanitizers:
#
#   custom_calls/tests/sanitize.sh [python with jaxlib]
#
# Nothing is left behind. CAST_CASES (default 100), PRODUCT_CASES (default 200): how many random ones
# for each instruction set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

for sanitizers in address,undefined thread; do
  build="$scratch/${sanitizers/,/-}"
  cmake -S . -B "$build" -DMX_JAX_TESTS=ON -DMX_JAX_SANITIZE="$sanitizers" \
    -DPython_EXECUTABLE="$(command -v "${1:-python3}")" >/dev/null
  cmake --build "$build" --target codec_test cast_test thread_pool_test matmul_test subnormal_test \
    attributes_test \
    -j "${JOBS:-2}" >/dev/null
  for test in codec_test attributes_test thread_pool_test subnormal_test "cast_test ${CAST_CASES:-100}" \
    "matmul_test ${PRODUCT_CASES:-200}"; do
    echo "$sanitizers: $test"
    "$build"/tests/$test
  done
done
