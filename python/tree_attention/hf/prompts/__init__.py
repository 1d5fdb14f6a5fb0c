# SPDX-License-Identifier: BSD-3-Clause
"""Prompts whose tokens are split over ranks, or which are fed in chunks."""
