#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Runs the CUDA kernels under the four tools of compute-sanitizer, side by side: small problems for
# every kernel and path, checked as always. Exit status 77: there is no GPU or no compute-sanitizer.
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
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "no CUDA device"
  exit 77
fi

# Every tensor in an allocation of its own, or an access past its end would find the next one.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 REQUIRE_CUDA=1
tools=(memcheck racecheck synccheck initcheck)
for tool in "${tools[@]}"; do
  # Kernels of others are not watched, except for what they initialise.
  ours=(--kernel-regex kns=tree_attention)
  [[ $tool == initcheck ]] && ours=()
  timeout --kill-after=2 "${SANITIZER_SECONDS:-0}" \
    compute-sanitizer --tool "$tool" "${ours[@]}" --error-exitcode 99 \
    --print-limit 20 "$PYTHON" -m pytest -v -p no:cacheprovider --timeout 0 -k "not emulated" \
    tests/cuda/test_cuda_smoke.py >"$logs/$tool.log" 2>&1 &
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
