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

# `compile PLATFORM SETS CHECK COMPILER...`, where a set is `<name>:<flag>`. Kernels are compiled, since
# intrinsics that a set lacks show then alone; of the handlers GCC checks the syntax and types (zig
# must write objects). XLA's headers are parsed once.
compile() {
  local name=$1 sets=$2 check=$3 began=$SECONDS isa source
  shift 3
  if ! "$@" -E -x c++ /dev/null >/dev/null 2>&1; then
    echo "$name: left out, no compiler: $*"
    return
  fi
  local options=(-std=c++17 -O0 -ffp-contract=off -Wall -Wextra -Wno-maybe-uninitialized
    -Wno-unknown-warning-option -I. -isystem "$headers")
  echo '#include "xla/ffi/api/ffi.h"' >"$scratch/ffi.h"
  "$@" "${options[@]}" -x c++-header "$scratch/ffi.h" -o "$scratch/ffi.h.gch" ||
    { echo "$name: FAILED"; return 1; }
  {
    for source in */*.cc; do
      case $source in
        tests/* | benchmarks/*) ;;
        *_kernels.cc) echo "-c -DMX_TARGET=portable $source" ;;
        *) echo "$check -include $scratch/ffi.h $source" ;;
      esac
    done
    for isa in $sets; do echo "-c -DMX_TARGET=${isa%%:*} ${isa#*:} products/matmul_kernels.cc"; done
  } | xargs -P "${JOBS:-2}" -I{} bash -c '"${@:2}" -o "$(mktemp "$0/XXXXXX")" $1' "$scratch" {} \
    "$@" "${options[@]}" || { echo "$name: FAILED"; return 1; }
  echo "$name: compiled in $((SECONDS - began)) s"
}

export ZIG_GLOBAL_CACHE_DIR="$scratch/zig"
zig=("$python" -m ziglang c++ -target)
compile aarch64-linux "dotprod:-march=armv8.2-a+dotprod i8mm:-march=armv8.2-a+dotprod+i8mm" -fsyntax-only \
  aarch64-linux-gnu-g++
compile aarch64-macos "dotprod:-mcpu=generic+dotprod i8mm:-mcpu=generic+dotprod+i8mm" -c \
  "${zig[@]}" aarch64-macos
compile x86_64-windows "" -c "${zig[@]}" x86_64-windows-gnu
