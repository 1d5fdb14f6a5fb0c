#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Runs the C++ code without torch (tests/cpp) and the CUDA kernels on the emulated device
# (tests/cuda_emulator) under AddressSanitizer with UndefinedBehaviorSanitizer, then under
# ThreadSanitizer. at::parallel_for is std::thread there: libgomp's own synchronisation is invisible
# to ThreadSanitizer and would drown a real race in false ones. AMX is emulated, so that the loads of
# its tiles are seen. Where there is a GPU, the CUDA kernels run on it under compute-sanitizer.
# Environment: PYTHON (by default .venv/bin/python, which scripts/setup makes), CXX, MAX_JOBS.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/sanitize
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c "import torch" 2>/dev/null; then
  echo "sanitize: $python has no torch, whose headers are compiled. Run: scripts/setup, or name a" \
    "Python that has it with PYTHON=" >&2
  exit 1
fi
if ! command -v "${CXX:-g++}" >/dev/null; then
  echo "sanitize: there is no ${CXX:-g++}: apt install g++, or name a compiler with CXX=" >&2
  exit 1
fi
"$python" csrc/cuda/decode/instances.py build/instances >/dev/null

# Whether the processor has the instructions for which a source is compiled.
runs_here() {
  case $1 in
    *_avx512.cpp) grep -qw avx512f /proc/cpuinfo ;;
    *_avx512_bf16.cpp | *_amx.cpp) grep -qw avx512_bf16 /proc/cpuinfo ;;
  esac
}

# The linker lets what is not compiled be missing: kernels that this processor cannot run, without
# AVX-512 a third of what g++ has to do, and decode kernels that the short cases do not use.
missing_flags=(-no-pie -Wl,--unresolved-symbols=ignore-in-object-files)
cpu_sources=() cpu_missing_flags=()
for source in csrc/cpu/{vector/,bf16/,amx/,index/,}*.cpp \
  csrc/experts/{multiply,rows*,unpack}.cpp tests/cpp/*.cpp; do # what takes longest first
  if runs_here "$source"; then
    cpu_sources+=("$source")
  else
    cpu_missing_flags=("${missing_flags[@]}")
  fi
done
cuda_sources=(tests/cpp/decode_case.cpp csrc/cuda/{append,decode,merge,one_shot,ranges}/*.cu
  csrc/cuda/decode/workspaces.cpp
  benchmarks/cuda/ablations/{ablations,stamped}.cu
  build/instances/lean_decode_{bf16_64,bf16_128,bf16_576,fp16_576,fp16_256,fp32_64,fp32_256}.cu
  build/instances/lean_decode_{bf16_int8_64,bf16_float8_64,bf16_int8_128,fp16_float8_128}.cu
  build/instances/lean_decode_wgmma_bf16_64.cu
  tests/cuda_emulator/{fiber,hopper,machine,main,products,ptx_host,test_*}.cpp)
decode_cases=(decode_{short,short_kinds,int8_short,float8_short,latents_short,float16_latents_short}
  decode_clusters_short decode_wgmma_tokens)
# c10's BFloat16 and Half are headers without a library.
torch_include=$("$python" -c \
  'from torch.utils.cpp_extension import include_paths; print(include_paths()[0])')
cpu_flags=(-Itests/cpp/shim -isystem "$torch_include" -include tests/amx_emulator/amx.h
  "${cpu_missing_flags[@]}")
# The first warning is often wrong under sanitizers.
cuda_flags=(-DTREE_ATTENTION_WGMMA -Itests/cuda_emulator -Wno-maybe-uninitialized -Wno-unknown-pragmas "${missing_flags[@]}")

# compile FOLDER SOURCES... -- FLAGS...: makes FOLDER/tests.
compile() {
  local folder=$build/$1 sources=() objects=()
  for (( ; $# > 1; )); do
    shift
    [[ $1 == -- ]] && break
    sources+=("$1") objects+=("$folder/${1//\//_}.o")
  done
  shift
  printf '\033[1m== %s\033[0m\n' "$folder"
  mkdir -p "$folder"
  printf '%s\n' "${sources[@]}" | xargs -P "${MAX_JOBS:-$(nproc)}" -I '{}' bash -c '
    source=$1; object=$2/${source//\//_}.o; shift 2
    exec ${CXX:-g++} "$@" -c -xc++ "$source" -o "$object"' - '{}' "$folder" \
    -std=c++20 -O1 -g1 -fno-omit-frame-pointer -ffp-contract=off -Wall -Wextra \
    -Itests/cpp -Icsrc -I. "$@"
  "${CXX:-g++}" "$@" "${objects[@]}" -pthread -o "$folder/tests"
}

# run LOG COMMAND...: most tests use one core, so they run beside what is compiled next.
processes=() logs=()
run() {
  local log=$build/$1.log
  "${@:2}" >"$log" 2>&1 &
  processes+=($!) logs+=("$log")
}

# Waits for all that runs and shows what it said; fails where one of them has failed.
results() {
  local i failed=()
  for i in "${!processes[@]}"; do
    wait "${processes[i]}" || failed+=("${logs[i]}")
    printf '\033[1m== %s\033[0m\n' "${logs[i]%.log}"
    cat "${logs[i]}"
  done
  if ((${#failed[@]})); then
    echo "sanitize: failed: ${failed[*]}" >&2
    return 1
  fi
}
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# The races of tests/cuda_emulator/test_races.cpp, each of which must be reported.
expect_race() {
  local report
  report=$("${thread_launcher[@]}" "$build/cuda-thread/tests" "$1" 2>&1) || true
  if [[ $report != *"WARNING: ThreadSanitizer: data race"* ]]; then
    printf '%s was not reported:\n%s\n' "$1" "$report"
    return 1
  fi
  printf '%-28s reported\n' "$1"
}

export UBSAN_OPTIONS=print_stacktrace=1
address_flags=(-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all)
thread_flags=(-fsanitize=thread)
# ThreadSanitizer's shadow memory collides with addresses that some kernels randomise.
thread_launcher=(env)
setarch -R true 2>/dev/null && thread_launcher=(setarch -R)

# With -O1 these kernels take g++ three times as long.
compile cpu-address+undefined "${cpu_sources[@]}" -- -O0 "${address_flags[@]}" "${cpu_flags[@]}"
run cpu-address+undefined "$build/cpu-address+undefined/tests"
compile cpu-thread "${cpu_sources[@]}" -- "${thread_flags[@]}" "${cpu_flags[@]}"
run cpu-thread "${thread_launcher[@]}" "$build/cpu-thread/tests"

compile cuda-address+undefined "${cuda_sources[@]}" -- "${address_flags[@]}" "${cuda_flags[@]}"
run cuda-address+undefined "$build/cuda-address+undefined/tests"
run cuda-address+undefined-decode "$build/cuda-address+undefined/tests" "${decode_cases[@]}"
compile cuda-thread "${cuda_sources[@]}" -- "${thread_flags[@]}" "${cuda_flags[@]}"
run cuda-thread "${thread_launcher[@]}" "$build/cuda-thread/tests"
for case in "${decode_cases[@]}"; do
  run "cuda-thread-$case" "${thread_launcher[@]}" "$build/cuda-thread/tests" "$case"
done
results
for race in no_barrier relaxed no_warp_barrier early_refill no_order; do
  expect_race "race_$race"
done

printf '\033[1m== compute-sanitizer\033[0m\n'
PYTHON=$python scripts/sanitize_cuda.sh || (($? == 77)) # 77: said why there is nothing to run
