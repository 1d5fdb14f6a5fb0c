#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# scripts/gpu_check.sh CALL OUT: what a GPU has to show, in four calls that end by themselves: see
# gpu_check.py.
exec python3 "$(dirname "$0")/gpu_check.py" "$@"
