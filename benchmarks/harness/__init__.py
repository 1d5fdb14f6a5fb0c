# SPDX-License-Identifier: BSD-3-Clause
"""Timing, shapes, ranks, options and the report, for all benchmarks."""

LAUNCHER = "BENCHMARK_LAUNCHER"  # in the environment of a program: what it runs under
