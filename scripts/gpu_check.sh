#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# scripts/gpu_check.sh OUT: builds, tests, measures and sanitizes on the GPU of this machine, within
# nine minutes on 16 cores, without network or installation. Stages come in the order of their
# value; each has a limit and the rest of the time, and one that fails stops no other. OUT gets
# summary.json, summary.md, logs.tar.gz and at most five files of the benchmark.
# Exit status 0: every stage passed. Environment: PYTHON (else .venv/bin/python, else python3),
# TORCH_CUDA_ARCH_LIST (else the GPU's), GPU_CHECK_SECONDS (else 540).
set -uo pipefail
[[ $# == 1 ]] || { echo "usage: scripts/gpu_check.sh OUT" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python
fi
limit=${GPU_CHECK_SECONDS:-540}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
LOGS=$work/logs
mkdir "$LOGS"
export PYTHON LOGS PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
export PYTHONPATH=$PWD/python PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# A test without its device fails; asking for devices initialises nothing.
export REQUIRE_CUDA=1 PYTORCH_NVML_BASED_CUDA_CHECK=1

device=none capability=9.0
if described=$("$PYTHON" -c 'import torch
print(torch.cuda.get_device_name(), "%d.%d" % torch.cuda.get_device_capability(), sep="|")' \
  2>"$LOGS/device.log"); then
  device=${described%|*} capability=${described##*|}
fi
# Instructions of one generation only, which sm_90a has, need the a.
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-${capability/9.0/9.0a}}

rows=()
failures=0

# record STAGE SECONDS RESULT [DETAIL]
record() {
  local detail
  detail=$(printf '%s' "${4:-}" | sed 's/\x1b\[[0-9;]*m//g' | tr -d '\000-\037"\\|' |
    sed 's/ *$//' | cut -c1-100)
  rows+=("$1|$2|$3|$detail")
  printf '%-10s %4s s  %-28s %s\n' "$1" "$2" "$3" "$detail"
  write_summary
}

# What there is so far, should this script be ended from outside.
write_summary() {
  local row name seconds result detail separator=""
  {
    printf '{\n"device": "%s",\n"architectures": "%s",\n"commit": "%s",\n"seconds": %d,\n"stages": [' \
      "$device" "$TORCH_CUDA_ARCH_LIST" "$(git rev-parse HEAD 2>/dev/null)" "$SECONDS"
    for row in "${rows[@]}"; do
      IFS='|' read -r name seconds result detail <<<"$row"
      printf '%s\n{"stage": "%s", "seconds": %d, "result": "%s", "detail": "%s"}' \
        "$separator" "$name" "$seconds" "$result" "$detail"
      separator=,
    done
    printf '\n]\n}\n'
  } >"$out/summary.json"
  {
    printf '# GPU check\n\n%s, built for %s, %d s\n\n' "$device" "$TORCH_CUDA_ARCH_LIST" "$SECONDS"
    printf '| stage | seconds | result | last line of its log |\n| --- | ---: | --- | --- |\n'
    for row in "${rows[@]}"; do
      IFS='|' read -r name seconds result detail <<<"$row"
      printf '| %s | %s | %s | %s |\n' "$name" "$seconds" "$result" "$detail"
    done
  } >"$out/summary.md"
  tar -czf "$out/logs.tar.gz" -C "$work" .
}

# stage NAME LIMIT COMMAND...
stage() {
  local name=$1 seconds=$2 begin=$SECONDS status=0 result left=$((limit - SECONDS))
  shift 2
  if ((left < 5)); then
    failures=$((failures + 1))
    record "$name" 0 "not run: no time left"
    return 1
  fi
  # The whole process group gets the signal: ranks and tools as well.
  timeout --kill-after=5 "$((seconds < left ? seconds : left))" "$@" >"$LOGS/$name.log" 2>&1 ||
    status=$?
  case $status in
    0) result=passed ;;
    77) result="not run" ;;
    124 | 137) result="FAILED: out of time" ;;
    *) result="FAILED: exit status $status" ;;
  esac
  [[ $result == FAILED* ]] && failures=$((failures + 1))
  record "$name" "$((SECONDS - begin))" "$result" "$(grep -v '^[[:space:]]*$' "$LOGS/$name.log" | tail -1)"
  ((status == 0))
}

gpu_stage() {
  if [[ $device == none || $built == no ]]; then
    failures=$((failures + 1))
    record "$1" 0 "$([[ $built == no ]] && echo "not run: no build" || echo "no CUDA device")"
    return 1
  fi
  stage "$@"
}

describe_machine() {
  nvidia-smi || true
  nvcc --version
  compute-sanitizer --version || true
  "$PYTHON" --version
  "$PYTHON" -m pip list || true
  cuobjdump --dump-resource-usage python/tree_attention/_C*.so >"$LOGS/resource_usage.txt" || true
  "$PYTHON" -m tree_attention info
}
export -f describe_machine

pytest=("$PYTHON" -m pytest -q -p no:cacheprovider --timeout 120)
parallel=()
"$PYTHON" -c 'import xdist' 2>/dev/null && parallel=(-n 8)
# These need the device, or all ranks, to themselves.
alone=(graphs launches numerics workspace)
ranks=(ranks huggingface static_cache)
ignored=()
for name in smoke "${alone[@]}" "${ranks[@]}"; do ignored+=("--ignore=tests/cuda/test_cuda_$name.py"); done
files_of() {
  local name
  for name in "$@"; do compgen -G "tests/cuda/test_cuda_$name.py"; done
}

# Not what is only named after CUDA: it compiles emulators or packages and asks no GPU.
on_device="cuda"
for name in emulat mutations resources packaging any_order old_architectures; do
  on_device+=" and not $name"
done

built=yes
stage build 300 env USE_CUDA=1 MAX_JOBS="${MAX_JOBS:-$(nproc)}" "$PYTHON" setup.py build_ext --inplace ||
  built=no
stage machine 60 bash -c describe_machine
gpu_stage smoke 90 "${pytest[@]}" -v -k "not emulated" tests/cuda/test_cuda_smoke.py
gpu_stage tests 150 env OMP_NUM_THREADS=2 "${pytest[@]}" "${parallel[@]}" "${ignored[@]}" \
  -k "$on_device" tests
gpu_stage alone 150 "${pytest[@]}" $(files_of "${alone[@]}")
gpu_stage ranks 180 "${pytest[@]}" $(files_of "${ranks[@]}")
gpu_stage ablations 150 "$PYTHON" -m benchmarks.cuda.ablations
# It writes its files at its end, which should come before that of its time.
budget=$((limit - SECONDS - 40))
gpu_stage benchmark 180 "$PYTHON" benchmarks/decode.py --device cuda \
  --budget "$((budget < 130 ? budget : 130))" --out "$work/benchmark"
find "$work/benchmark" -type f 2>/dev/null | sort | head -5 | xargs -r cp -t "$out"
gpu_stage sanitizer 300 scripts/sanitize_cuda.sh

write_summary
printf '\n%s: %d of %d stages did not pass, %d s\n' "$device" "$failures" "${#rows[@]}" "$SECONDS"
((failures == 0))
