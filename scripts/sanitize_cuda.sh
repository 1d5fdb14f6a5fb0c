#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Runs six CUDA kernels under compute-sanitizer's memcheck and racecheck, side by side: small
# problems, checked as always. What other kernels and tools would find, the emulated device and its
# sanitizers find without a GPU. Exit status 77: there is no GPU or no compute-sanitizer.
# Environment: PYTHON; LOGS, a folder that keeps the tools' output; SANITIZER_SECONDS, after which
# a tool is ended (default 0: never).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
logs=${LOGS:-$(mktemp -d)}

if ! command -v compute-sanitizer >/dev/null; then
  echo "compute-sanitizer is not installed"
  exit 77
fi
if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
  echo "sanitize_cuda: $PYTHON has no torch. Run: scripts/setup, or name a Python with PYTHON=" >&2
  exit 1
fi
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "no CUDA device"
  exit 77
fi

# Every tensor in an allocation of its own, or an access past its end would find the next one.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 REQUIRE_CUDA=1
tools=(memcheck racecheck)
# One of each kind of tile: 16 bits, pairs of warps that split the columns, float32, 8 bits, both,
# latents.
for kernel in "bfloat16 d128" "float16 d256" "float32 d64" "bfloat16 int8 d128" \
  "float16 float8_e4m3fn d256" "bfloat16 latents of 40"; do
  kernels+=("tests/cuda/test_cuda_smoke.py::test_kernel[cuda-$kernel]")
done
for tool in "${tools[@]}"; do
  timeout --kill-after=2 "${SANITIZER_SECONDS:-0}" \
    compute-sanitizer --tool "$tool" --kernel-regex kns=tree_attention --error-exitcode 99 \
    --print-limit 20 "$PYTHON" -m pytest -v -p no:cacheprovider --timeout 0 \
    "${kernels[@]}" >"$logs/$tool.log" 2>&1 &
  pids+=($!)
done
failed=()
for i in "${!tools[@]}"; do
  status=0
  wait "${pids[i]}" || status=$?
  log=$logs/${tools[i]}.log
  summary=$(grep -h 'ERROR SUMMARY\|RACECHECK SUMMARY' "$log" || tail -1 "$log")
  # Of a tool that was ended it counts how far it came.
  printf '%-10s status %s, %s tests passed: %s\n' "${tools[i]}" "$status" \
    "$(grep -c ' PASSED' "$log" || true)" "$summary"
  ((status == 0)) || failed+=("${tools[i]}")
done
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]} (logs: $logs)"; exit 1; }
echo "no errors in ${#tools[@]} tools"
