#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# scripts/gpu_check.sh OUT [EARLIER]: what a GPU has to show, in a call of ten minutes that ends by
# itself, and what is left of it in calls after that one: see gpu_check.py.
exec python3 "$(dirname "$0")/gpu_check.py" "$@"
