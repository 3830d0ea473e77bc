#!/usr/bin/env bash
# Cross-compiles the C++ tests for AArch64 and runs them under qemu, as a processor that has every
# instruction set:
#
#   custom_calls/tests/aarch64.sh [python with jaxlib]
#
# Needs Debian's g++-aarch64-linux-gnu and qemu-user. Nothing is left behind.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

find_headers="import jaxlib, pathlib; print(pathlib.Path(jaxlib.__file__).parent / 'include')"
cmake -S . -B "$scratch" -DMX_JAX_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DMX_JAX_FFI_INCLUDE="$("${1:-python3}" -c "$find_headers")" \
  -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-cpu;max;-L;/usr/aarch64-linux-gnu" >/dev/null
cmake --build "$scratch" -j "${JOBS:-2}" >/dev/null
ctest --test-dir "$scratch" --output-on-failure
