# SPDX-License-Identifier: BSD-3-Clause
"""Attention that takes a stated time and has a known result, for ranks that share few processors.

States come from a formula, so that results can be checked without a second computation, and
computing takes as long as it is told to, asleep.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tree_attention.baselines as ring_module
import tree_attention.decode as tree_module

from ..simulation import Problem

NUM_HEADS, NUM_HEADS_KV, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16


def problem_of(batch: int, keys: int) -> Problem:
    """A step with `keys` keys of each sequence on every rank."""
    return Problem(keys, batch, (NUM_HEADS, NUM_HEADS_KV), HEAD_DIM, DTYPE)


class FakeAttention:
    """Stands for `lean_decode`: a state that depends on the query and on whose keys these are."""

    def __init__(self, seconds_per_key: float) -> None:
        self._seconds_per_key = seconds_per_key

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        o, lse = options["out"]
        # The first key and the last value, as both travel.
        owner, last = k[0, 0, 0, 0].item(), v[-1, -1, -1, -1].item()
        torch.mul(q, last + 1.0, out=o)
        lse.fill_(owner / 4.0)
        # A part of the heads takes a part of the time.
        num_keys = q.shape[0] * k.shape[2] * k.shape[1] / NUM_HEADS_KV
        if self._seconds_per_key:
            time.sleep(self._seconds_per_key * num_keys)
        return o, lse


def shard_of(rank: int, batch: int, keys: int, one_memory: bool) -> tuple[Tensor, Tensor]:
    """Keys and values of a rank; `one_memory`: which both are sent from, and read from nowhere."""
    shape = (batch, NUM_HEADS_KV, keys, HEAD_DIM)
    k = torch.full(shape, rank, dtype=DTYPE)
    return k, k if one_memory else torch.full(shape, rank, dtype=DTYPE)


def merged(q: Tensor, world_size: int) -> tuple[Tensor, Tensor]:
    """Return what all ranks together make of it."""
    lse = torch.arange(world_size) / 4.0
    factor = (torch.softmax(lse.double(), 0) * torch.arange(1, world_size + 1)).sum()
    return q.float() * factor.float(), lse.logsumexp(0).expand(q.shape[:3])


@contextmanager
def faked_attention(seconds_per_key: float) -> Iterator[None]:
    """Every method of decoding calls it instead of `lean_decode`."""
    attention = FakeAttention(seconds_per_key)
    with ExitStack() as stack:
        for module in (tree_module, ring_module):
            stack.enter_context(mock.patch.object(module, "lean_decode", attention))
        yield
