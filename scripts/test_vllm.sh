#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Tests of the plug-in in vLLM's real engine: `scripts/test_vllm.sh [DIR [ARGUMENTS OF PYTEST]]`.
# `benchmarks/engines/setup vllm DIR` makes the environment, about 6 GB, by default in
# benchmarks/engines/.environments/vllm, or keeps what is there. Not a part of scripts/test.sh.
# `scripts/test_vllm.sh DIR lab/tests/vllm` also serves from several emulated hosts, as root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
directory=${1:-benchmarks/engines/.environments/vllm}
benchmarks/engines/setup vllm "$directory"
python=$directory/bin/python
mapfile -t tools < <(grep -E '^(pytest|pytest-timeout|hypothesis)==' requirements-dev.txt)
"$python" -m pip install --disable-pip-version-check --quiet "${tools[@]}"
# Without the checkout's own package, whose extension is for another torch.
unset PYTHONPATH
exec "$python" -m pytest -o pythonpath="tests tests/vllm ." tests/vllm "${@:2}"
