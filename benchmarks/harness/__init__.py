# SPDX-License-Identifier: BSD-3-Clause
"""What all benchmarks share: timing, shapes, ranks, options and the report."""
