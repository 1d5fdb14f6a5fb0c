#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Runs the C++ code without torch (tests/cpp) under AddressSanitizer with UndefinedBehaviorSanitizer,
# then under ThreadSanitizer. at::parallel_for is std::thread there: libgomp's own synchronisation is
# invisible to ThreadSanitizer and would drown a real race in false ones. Where there is a GPU, the
# CUDA kernels run on it under compute-sanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/sanitize
mkdir -p "$build"

sources=(tests/cpp/*.cpp csrc/cpu/*.cpp)
# c10's BFloat16 and Half are headers without a library.
torch_include=$(.venv/bin/python -c \
  'from torch.utils.cpp_extension import include_paths; print(include_paths()[0])')

run() {
  local name=$1 launcher=$2
  shift 2
  printf '\033[1m== %s\033[0m\n' "$name"
  local objects=()
  for source in "${sources[@]}"; do objects+=("$build/$name/${source//\//_}.o"); done
  mkdir -p "$build/$name"
  printf '%s\n' "${sources[@]}" | xargs -P "${MAX_JOBS:-$(nproc)}" -I '{}' bash -c '
    source=$1; object=$2/${source//\//_}.o; shift 2
    exec ${CXX:-g++} "$@" -c "$source" -o "$object"' - '{}' "$build/$name" \
    -std=c++20 -O1 -g -fno-omit-frame-pointer -ffp-contract=off -Wall -Wextra \
    -Itests/cpp/shim -Itests/cpp -Icsrc -isystem "$torch_include" "$@"
  "${CXX:-g++}" "$@" "${objects[@]}" -pthread -o "$build/$name/tests"
  $launcher "$build/$name/tests"
}

export UBSAN_OPTIONS=print_stacktrace=1
run address+undefined "" -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all
# ThreadSanitizer's shadow memory collides with addresses that some kernels randomise.
fixed_addresses=$(setarch -R true 2>/dev/null && echo "setarch -R" || true)
run thread "$fixed_addresses" -fsanitize=thread

printf '\033[1m== compute-sanitizer\033[0m\n'
scripts/sanitize_cuda.sh || (($? == 77)) # 77: said why there is nothing to run
