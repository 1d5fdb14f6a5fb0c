# SPDX-License-Identifier: BSD-3-Clause
"""An exchange in its steady state allocates its outputs and nothing else, and keeps little."""

from __future__ import annotations

import ctypes
import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed import on_ranks, run_ranks, through_the_group
from test_strategies import BF16, CANONICAL
from tiers import tiers_of
from tree_attention import merge_states, ring_decode, ring_pass_q_decode, strategies
from tree_attention.exchange import Communicator
from tree_attention.exchange.transport.buffers import MAX_KEPT_BYTES


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


ROWS = 4096  # of the large call: a state of 32 MiB, of which nine were kept
LARGE = torch.Size((1, 16, ROWS, 128))


def calls_of(kind: str, comm: Communicator, shape: torch.Size) -> None:
    """A call of the kind, small or large."""
    value, o, lse = comm.rank + 1.0, torch.ones(shape), torch.zeros(shape[:3])
    if kind in strategies():
        merged, _ = comm.all_merge_states(o * value, lse, strategy=kind)
        torch.testing.assert_close(merged, o * (comm.world_size + 1) / 2)
    elif kind == "all_reduce":
        assert comm.all_reduce(o)[0, 0, -1, -1] == comm.world_size
    elif kind == "all_gather":
        assert comm.all_gather(o, (shape[3],) * comm.world_size).shape[3] == 2 * shape[3]
    else:
        keys = torch.ones(1, 16, 8 if kind == "ring of queries" else shape[2], 128)
        ring = ring_pass_q_decode if kind == "ring of queries" else ring_decode
        result, _ = ring(o if kind == "ring of queries" else o[:, :, :1], keys, keys, group=comm)
        torch.testing.assert_close(result, torch.ones_like(result))


def anonymous_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def live_bytes() -> int:
    """Of all tensors, wherever they are kept."""
    tensors = [x for x in gc.get_objects() if type(x) is Tensor]
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()
    )


def large_then_small(rank: int, world_size: int, kind: str) -> None:
    comm, small = Communicator(), torch.Size((1, 16, 1, 128))
    gc.collect()
    gc.disable()  # what is not needed goes without it
    try:
        calls_of(kind, comm, small)
        before, live_before = anonymous_bytes(), live_bytes()
        calls_of(kind, comm, LARGE)
        calls_of("all_reduce", comm, torch.Size((3,) * 3 + (5,)))  # after the large call's replay
        calls_of(kind, comm, small)
        assert live_bytes() - live_before <= MAX_KEPT_BYTES
        assert anonymous_bytes() - before <= MAX_KEPT_BYTES + SLACK
    finally:
        gc.enable()


SLACK = 24 << 20  # what the allocator keeps
KINDS = (*strategies(), "ring", "ring of queries", "all_reduce", "all_gather")


@pytest.mark.parametrize("kind", tiers_of(KINDS, quick=("two_phase",)))
def test_a_large_call_leaves_little_behind(kind: str) -> None:
    run_ranks(large_then_small, 2, kind, fresh=True)


@on_ranks(3)
def test_a_door_leaves_the_next_state_as_it_is(rank: int, world_size: int) -> None:
    """The last call's messages go once more while the next call's state is in the buffer."""
    for direct in (True, False):
        with nullcontext() if direct else through_the_group():
            comm = Communicator(nodes="aab")
            for strategy in strategies():
                for step, rows in enumerate((1, 7, 3, 40, 2)):
                    o = torch.randn(
                        world_size, 2, 3, rows, 5, generator=torch.Generator().manual_seed(step)
                    )
                    lse = o.sum(-1)
                    merged = comm.all_merge_states(o[rank], lse[rank], strategy=strategy)
                    for x, y in zip(merged, merge_states(o, lse), strict=True):
                        torch.testing.assert_close(x, y)
