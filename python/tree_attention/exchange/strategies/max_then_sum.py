# SPDX-License-Identifier: BSD-3-Clause
"""`three_allreduce` in two: maxima first, then numerators and denominators packed into one sum."""

from __future__ import annotations

from functools import partial

import torch

from ..state import StateLayout
from ..topology import Topology
from . import Strategy, Traffic, three_allreduce


def traffic(
    layout: StateLayout, topology: Topology, out_dtype: torch.dtype, head_sharded: bool
) -> Traffic:
    return three_allreduce.ring_all_reduces(topology, 4 * layout.num_rows, layout.num_bytes)


STRATEGY = Strategy(
    partial(three_allreduce.prepare, packed=True), traffic, is_canonical=False, takes_16_bit=False
)
