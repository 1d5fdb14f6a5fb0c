# SPDX-License-Identifier: BSD-3-Clause
"""Sums over ranks: in rank order, the same bits on every rank and by every route."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import on_ranks
from helpers import assert_same_bits
from tiers import by_world
from tree_attention import Communicator, ExchangeError
from tree_attention.exchange.transport import collectives

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def parts_of(world_size: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values of very different size, so that another order gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-3, 4, (world_size, size), generator=generator)
    return (torch.randn(world_size, size, generator=generator) * scale).to(dtype)


def added(parts: Tensor, payload_dtype: torch.dtype) -> Tensor:
    total = parts[0].to(payload_dtype).float()
    for part in parts[1:]:
        total = total + part.to(payload_dtype).float()
    return total.to(payload_dtype).to(parts.dtype)


@by_world([1, 2, 3], [5])
@on_ranks()
def test_sums_have_the_bits_of_rank_order(rank: int, world_size: int) -> None:
    comm = Communicator()
    for size in (1, world_size, 1000, 50_001):
        for dtype, payload in (
            (FP32, FP32),
            (FP32, BF16),
            (BF16, BF16),
            (BF16, FP32),
            (FP16, FP32),
        ):
            parts = parts_of(world_size, size, dtype, size)
            expected = added(parts, payload if world_size > 1 else dtype)
            direct, *routes = (
                comm.all_reduce(parts[rank], payload_dtype=payload) for _ in range(2)
            )
            with mock.patch.object(collectives, "_MAX_DIRECT_BYTES", 0):
                routes += [comm.all_reduce(parts[rank], payload_dtype=payload) for _ in range(2)]
            for result in (direct, *routes):
                assert_same_bits((result,), (expected,))
            assert direct.data_ptr() != parts[rank].data_ptr()
    # The default payload loses nothing that the result could hold.
    for dtype, same in ((BF16, FP32), (FP16, FP32), (FP32, FP32), (torch.float64, FP32)):
        x = parts_of(world_size, 50, dtype)[rank]
        assert_same_bits((comm.all_reduce(x),), (comm.all_reduce(x, payload_dtype=same),))
    if world_size == 3:
        differs = parts_of(3, 1000, FP32)
        assert (added(differs, FP32) != added(differs.flip(0), FP32)).any(), "order never matters"


@on_ranks(2)
def test_any_strides_and_shapes(rank: int, world_size: int) -> None:
    comm = Communicator()
    x = torch.arange(24.0).view(2, 3, 4).transpose(0, 2) + rank
    result = comm.all_reduce(x)
    assert result.shape == x.shape and torch.equal(result, 2 * (x - rank) + 1)
    assert comm.all_reduce(x[:0]).shape == (0, 3, 2)
    assert comm.all_reduce(x[0, 0, 0]).shape == ()
    nan = torch.tensor([1.0, torch.nan if rank else 1.0, torch.inf])
    result = comm.all_reduce(nan)
    assert result[0] == 2 and result[1].isnan() and result[2] == torch.inf


@on_ranks(3)
def test_bytes_and_operations(rank: int, world_size: int) -> None:
    comm = Communicator()
    for size, payload, operations in ((1000, FP32, 1), (1000, BF16, 1), (50_001, FP32, 2)):
        x = torch.ones(size)
        comm.all_reduce(x, payload_dtype=payload)
        before = comm.bytes_sent, comm.link.num_operations
        comm.all_reduce(x, payload_dtype=payload)
        part = size if operations == 1 else -(-size // world_size)
        sent = operations * (world_size - 1) * part * payload.itemsize
        assert comm.bytes_sent - before[0] == sent
        assert comm.link.num_operations - before[1] == operations


@on_ranks(2)
def test_refused_arguments(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=20.0)
    x = torch.ones(4)
    with pytest.raises(ValueError, match=r"all_reduce: x must have a floating dtype, got torch.i"):
        comm.all_reduce(x.int())
    with pytest.raises(ValueError, match=r"all_reduce: payload_dtype must be .* got torch.float16"):
        comm.all_reduce(x, payload_dtype=FP16)
    with pytest.raises(RuntimeError, match="all_reduce: x must not require a gradient"):
        comm.all_reduce(x.clone().requires_grad_())
    assert comm.bytes_sent == 0
    with pytest.raises(ExchangeError, match=r"shape is \(5,\) on rank 1, \(4,\) on rank 0"):
        comm.all_reduce(torch.ones(4 + rank))
    assert (comm.all_reduce(x) == 2).all()
