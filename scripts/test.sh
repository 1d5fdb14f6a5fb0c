#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Set-up, lint and the whole test suite. Arguments go to pytest: `scripts/test.sh -k merge`.
source "$(dirname "$0")/setup"
say "Lint"
scripts/lint.sh
say "Tests"
exec "$PYTHON" -m pytest "$@"
