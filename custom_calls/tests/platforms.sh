#!/usr/bin/env bash
# Compiles the library, unoptimized and unlinked, for the platforms that JAX's users hold beside this
# one: shows what does not compile there.
#
#   custom_calls/tests/platforms.sh [python with jaxlib]
#
# AArch64 Linux needs Debian's g++-aarch64-linux-gnu; Windows and macOS need PyPI's ziglang in that
# Python. What is not here is named as left out. Nothing is left behind.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
headers=$("$python" -c "import jaxlib, pathlib; print(pathlib.Path(jaxlib.__file__).parent / 'include')")

# `compile PLATFORM SYSTEM PROCESSOR SETS COMPILER...`
compile() {
  local name=$1 system=$2 processor=$3 targets=(mx_jax_cpu_objects) isa
  for isa in portable $4; do targets+=("kernels_$isa"); done
  shift 4
  if ! "$@" -E -x c++ /dev/null >/dev/null 2>&1; then
    echo "$name: left out, no compiler: $*"
    return
  fi
  if CXX="$*" cmake -S . -B "$scratch/$name" -DMX_JAX_OPTIMIZE=-O0 -DMX_JAX_FFI_INCLUDE="$headers" \
    -DCMAKE_SYSTEM_NAME="$system" -DCMAKE_SYSTEM_PROCESSOR="$processor" \
    -DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY >"$scratch/log" 2>&1 &&
    cmake --build "$scratch/$name" -j "${JOBS:-2}" --target "${targets[@]}" >"$scratch/log" 2>&1; then
    echo "$name: compiled for ${targets[*]}"
  else
    tail -n 40 "$scratch/log"
    echo "$name: FAILED"
    return 1
  fi
}

zig=("$python" -m ziglang c++ -target)
x86_sets="avx2 avx512 avx512_vbmi avx512_vnni avx512_bf16"
compile aarch64-linux Linux aarch64 "dotprod i8mm" aarch64-linux-gnu-g++
compile aarch64-macos Darwin arm64 "dotprod i8mm" "${zig[@]}" aarch64-macos
compile x86_64-windows Windows AMD64 "$x86_sets" "${zig[@]}" x86_64-windows-gnu
