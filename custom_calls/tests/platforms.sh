#!/usr/bin/env bash
# Compiles and links the library for the platforms that JAX's users hold beside this one, without
# optimization: shows what does not compile there, and runs nothing.
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

# `compile PLATFORM SYSTEM PROCESSOR COMPILER...`
compile() {
  local name=$1 system=$2 processor=$3
  shift 3
  if ! "$@" --version >/dev/null 2>&1; then
    echo "$name: left out: no compiler: $*"
    return
  fi
  CXX="$*" cmake -S . -B "$scratch/$name" -DMX_JAX_OPTIMIZE=-O0 -DMX_JAX_FFI_INCLUDE="$headers" \
    -DCMAKE_SYSTEM_NAME="$system" -DCMAKE_SYSTEM_PROCESSOR="$processor" \
    >"$scratch/$name.log" 2>&1 &&
    cmake --build "$scratch/$name" -j "${JOBS:-2}" >>"$scratch/$name.log" 2>&1 ||
    { tail -n 40 "$scratch/$name.log"; echo "$name: FAILED"; return 1; }
  echo "$name: compiled"
}

zig=("$python" -m ziglang c++ -target)
compile aarch64-linux Linux aarch64 aarch64-linux-gnu-g++
compile x86_64-windows Windows AMD64 "${zig[@]}" x86_64-windows-gnu
compile aarch64-macos Darwin arm64 "${zig[@]}" aarch64-macos
