# SPDX-License-Identifier: BSD-3-Clause
"""Timing, shapes, ranks, options and the report, for all benchmarks."""
