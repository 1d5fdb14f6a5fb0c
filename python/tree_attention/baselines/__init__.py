# SPDX-License-Identifier: BSD-3-Clause
"""Ring attention done properly, to compare tree decoding with."""

from .ring import ring_decode
from .ring_pass_q import ring_pass_q_decode

__all__ = ["ring_decode", "ring_pass_q_decode"]
