# SPDX-License-Identifier: BSD-3-Clause
"""Checks of any engine's merge and sharded decoding."""

from .cases import DecodeProblem
from .checks import Report, check_merge, check_sharded_decode

__all__ = ["DecodeProblem", "Report", "check_merge", "check_sharded_decode"]
