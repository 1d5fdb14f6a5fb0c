#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Set-up, lint and the tests that a contributor waits for, in two processes: most tests use one core
# at a time. The others: scripts/test_deep.sh.
# Arguments go to pytest: `scripts/test.sh -k merge`, `scripts/test.sh -n 0 --pdb`.
source "$(dirname "$0")/setup"
say "Lint"
scripts/lint.sh
say "Tests"
exec "$PYTHON" -m pytest -n 2 --dist worksteal -m "not deep" "$@"
