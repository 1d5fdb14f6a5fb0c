# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks that check what they time (`python -m tree_attention bench`)."""
