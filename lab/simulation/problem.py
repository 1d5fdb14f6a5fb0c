# SPDX-License-Identifier: BSD-3-Clause
"""Problem that the ranks of a simulated cluster decode."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tree_attention.exchange.transport.buffers import StateLayout


@dataclass(frozen=True)
class Problem:
    """One query token per sequence; every rank holds `keys_per_rank` keys of each."""

    keys_per_rank: int
    batch: int = 1
    heads: tuple[int, int] = (32, 8)  # query, key/value
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def layout(self) -> StateLayout:
        """Layout of a rank's state."""
        return StateLayout((self.batch, self.heads[0], 1), self.head_dim, torch.float32)

    @property
    def kv_bytes(self) -> int:
        """Size in bytes of one rank's keys and values."""
        size = self.batch * self.heads[1] * self.keys_per_rank * self.head_dim
        return 2 * size * self.dtype.itemsize
