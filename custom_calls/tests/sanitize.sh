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
  cmake --build "$build" -j "${JOBS:-2}" >/dev/null
  for source in tests/*_test.cc; do
    test=$(basename "$source" .cc)
    cases=()
    [[ $test != cast_test ]] || cases=("${CAST_CASES:-100}")
    [[ $test != matmul_test ]] || cases=("${PRODUCT_CASES:-200}")
    echo "$sanitizers: $test ${cases[*]}"
    "$build/tests/$test" "${cases[@]}"
  done
done
