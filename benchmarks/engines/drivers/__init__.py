# SPDX-License-Identifier: BSD-3-Clause
"""One program for each engine: `python -m benchmarks.engines.drivers.NAME`, in its environment.

What they share needs nothing but Python: `timing` alone.
"""
