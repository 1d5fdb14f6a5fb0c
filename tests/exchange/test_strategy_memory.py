# SPDX-License-Identifier: BSD-3-Clause
"""An exchange in its steady state allocates its outputs and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed import run_ranks
from test_strategies import BF16, CANONICAL
from tree_attention import strategies
from tree_attention.exchange import Communicator


class Allocations(TorchDispatchMode):
    """Bytes of the new tensors that operators return; what a library keeps inside it hides."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def storages(values: Any) -> dict[int, int]:
            tensors = (x for x in tree_leaves(values) if isinstance(x, Tensor) and x.nbytes)
            return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}

        known = storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self.sizes += [size for address, size in storages(result).items() if address not in known]
        return result


def allocations(comm: Communicator, o: Tensor, lse: Tensor, **options: Any) -> list[int]:
    with Allocations() as mode:
        comm.all_merge_states(o, lse, **options)
    return sorted(mode.sizes)


def exchange_in_steady_state(rank: int, world_size: int, nodes: str) -> None:
    comm = Communicator(nodes=nodes)
    o, lse = torch.full((2, 4, 1, 17), float(rank)), torch.full((2, 4, 1), float(rank))
    for strategy in strategies():
        for payload_dtype in (torch.float32, BF16):
            if payload_dtype == BF16 and strategy not in CANONICAL:
                continue
            options = {"strategy": strategy, "payload_dtype": payload_dtype, "out_dtype": BF16}
            comm.all_merge_states(o, lse, **options)
            assert allocations(comm, o, lse, **options) == [8 * 4, 8 * 17 * 2], strategy
    comm.all_merge_states(o, lse, head_sharded=True)
    heads = len(torch.arange(4).tensor_split(world_size)[rank])
    sizes = allocations(comm, o, lse, head_sharded=True)
    assert sizes == [size for size in (2 * heads * 4, 2 * heads * 17 * 4) if size]


@pytest.mark.parametrize("nodes", ["aaaa", "aabb", "abc"])
def test_nothing_but_outputs_is_allocated(nodes: str) -> None:
    run_ranks(exchange_in_steady_state, len(nodes), nodes)
