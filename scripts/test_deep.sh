#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Set-up, with what builds the site and CuTe's headers, and the tests that scripts/test.sh leaves
# out: the CUDA kernels on the emulated device, their PTX, machine code (where USE_CUDA=1 had them
# compiled) and mutations, the programs of benchmarks and docs, every family and option in every
# world. In three processes: of two cores two of them used two thirds.
# Arguments go to pytest: `scripts/test_deep.sh tests/cuda`.
source "$(dirname "$0")/setup"
install requirements-docs.txt
install requirements-cute.txt "headers alone" --no-deps
say "Compiling the emulated device, which takes two cores two minutes, once"
PYTHONPATH=. "$PYTHON" tests/compile_first.py
say "Deep tests"
exec "$PYTHON" -m pytest -n 3 --dist worksteal -m deep "$@"
