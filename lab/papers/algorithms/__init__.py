# SPDX-License-Identifier: BSD-3-Clause
"""The algorithms of the papers, step by step, with what they count."""
