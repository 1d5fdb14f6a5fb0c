#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Formatting, lint, types and the layers of imports (.importlinter). `scripts/lint.sh --fix` formats
# instead of checking.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
for tool in clang-format ruff mypy; do
  if [[ ! -x $bin/$tool ]]; then
    echo "lint: there is no $bin/$tool. Run: scripts/setup, which makes it" >&2
    exit 1
  fi
done
mapfile -t cpp < <(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

if [[ ${1:-} == --fix ]]; then
  $bin/clang-format -i "${cpp[@]}"
  $bin/ruff check --quiet --fix .
  $bin/ruff format --quiet .
fi
$bin/clang-format --dry-run -Werror "${cpp[@]}"
$bin/ruff check .
$bin/ruff format --check .
$bin/mypy
if [[ -x $bin/lint-imports ]]; then # needs Python >= 3.11
  PYTHONPATH=python $bin/lint-imports --no-logo >/dev/null || {
    PYTHONPATH=python $bin/lint-imports --no-logo
    exit 1
  }
fi
