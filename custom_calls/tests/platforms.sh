#!/usr/bin/env bash
# Compiles the library, unoptimized and unlinked, for the platforms that JAX's users hold beside this
# one: shows what does not compile there.
#
#   custom_calls/tests/platforms.sh [python with jaxlib]
#
# It needs PyPI's ziglang in that Python, and says so where that is left out; AArch64 Linux has
# aarch64.sh. Nothing is left behind.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
headers=$("$python" -c "import jaxlib, pathlib; print(pathlib.Path(jaxlib.__file__).parent / 'include')")

# `compile PLATFORM SETS TARGET`, where a set is `<name>:<flag>`. XLA's headers are parsed once.
compile() {
  local name=$1 sets=$2 began=$SECONDS isa source
  set -- "$python" -m ziglang c++ -target "$3"
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
        *) echo "-c -include $scratch/ffi.h $source" ;;
      esac
    done
    for isa in $sets; do echo "-c -DMX_TARGET=${isa%%:*} ${isa#*:} products/matmul_kernels.cc"; done
  } | xargs -P "${JOBS:-2}" -I{} bash -c '"${@:2}" -o "$(mktemp "$0/XXXXXX")" $1' "$scratch" {} \
    "$@" "${options[@]}" || { echo "$name: FAILED"; return 1; }
  echo "$name: compiled in $((SECONDS - began)) s"
}

export ZIG_GLOBAL_CACHE_DIR="$scratch/zig"
compile aarch64-macos "dotprod:-mcpu=generic+dotprod" aarch64-macos
compile x86_64-windows "" x86_64-windows-gnu
