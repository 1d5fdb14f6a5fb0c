# SPDX-License-Identifier: BSD-3-Clause
"""Comparisons of what ranks give to `generate`."""
