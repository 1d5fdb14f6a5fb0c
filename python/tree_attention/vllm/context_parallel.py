# SPDX-License-Identifier: BSD-3-Clause
"""Decode context parallelism: the ranks of vLLM's group, each with its keys of every sequence.

The ranks have the same key heads and different query heads. Each attends with the query heads of
all ranks over its own keys; the states are merged, and each rank keeps the heads that are its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from vllm.distributed.parallel_state import get_dcp_group

from ..exchange import DEFAULT_TIMEOUT, Communicator
from ..sharding import BlockCyclic
from .batches import Shard


class Exchange:
    def __init__(self, group: ProcessGroup, interleave: int, timeout: float) -> None:
        # Two, as ranks compare what they call wherever it differs from the last call of the same.
        self._gathers, self._merges = (Communicator(group, timeout) for _ in range(2))
        self.world_size, rank = self._merges.world_size, self._merges.rank
        self.shard = Shard(BlockCyclic(self.world_size, interleave), rank)

    def gather_heads(self, x: Tensor) -> Tensor:
        """`[tokens, heads, ...]` with the heads of all ranks, in rank order."""
        return self._gathers.all_gather(x, [x.shape[1]] * self.world_size, dim=1)

    def state(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """`o` of `shape` `[tokens, heads, head_dim]` and `lse`, to be written and merged."""
        tokens, heads, head_dim = shape
        o = torch.empty((heads, tokens, head_dim), dtype=torch.float32)
        return o.transpose(0, 1), torch.empty(o.shape[:2], dtype=torch.float32).transpose(0, 1)

    def merge(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The state over the keys of all ranks, of this rank's heads, in float32."""
        o, lse = (x.transpose(0, 1)[None] for x in (o, lse))
        o, lse = self._merges.all_merge_states(o, lse, head_sharded=True)
        return o[0].transpose(0, 1), lse[0].transpose(0, 1)


def exchange_of(parallel_config: Any) -> Exchange:
    """Return this process's exchange; the first call is collective."""
    timeout = parallel_config.cpu_distributed_timeout_seconds or DEFAULT_TIMEOUT
    group = get_dcp_group().cpu_group
    return _exchange(group, parallel_config.cp_kv_cache_interleave_size, timeout)


_exchange = cache(Exchange)
