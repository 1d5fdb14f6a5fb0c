# SPDX-License-Identifier: BSD-3-Clause
"""The ways to merge the states of all ranks. A new one is a function and an entry in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import merge_states
from .link import Link
from .state import State


@dataclass(frozen=True)
class Strategy:
    """How ranks exchange and merge their states.

    `run(link, state, out_dtype, deadline)` finds this rank's state in `state.send`, may use all of
    `state` as scratch and returns new tensors: `o` in `out_dtype` and the float32 `lse`, with the
    same bits on every rank. Whatever it sends goes through `link`, every rank calls the same
    operations with the same sizes, and nothing in it depends on the values of a device's tensors.
    """

    run: Callable[[Link, State, torch.dtype, float], tuple[Tensor, Tensor]]
    # The bits are those of `merge_states` over the ranks' states, whatever the world looks like.
    is_canonical: bool


def _all_gather(
    link: Link, state: State, out_dtype: torch.dtype, deadline: float
) -> tuple[Tensor, Tensor]:
    """One collective that only moves bytes; every rank merges all states in the canonical order."""
    link.all_gather(state.receive, state.send, deadline)
    return merge_states(state.o_parts, state.lse_parts, out_dtype=out_dtype)


def _three_allreduce(
    link: Link, state: State, out_dtype: torch.dtype, deadline: float
) -> tuple[Tensor, Tensor]:
    """Tree Attention (arXiv:2408.04093), Algorithm 3, for any batch and number of queries."""
    o, lse = state.o, state.lse
    largest = lse.clone()
    link.all_reduce(largest, dist.ReduceOp.MAX, deadline)
    # Empty on all ranks: any finite shift gives the denominator 0 and lse -inf.
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    denominator = torch.exp(lse - shift)
    # The o of an empty state may be uninitialised, and 0 * NaN is NaN.
    numerator = torch.where(lse[..., None] == -torch.inf, 0.0, o * denominator[..., None])
    link.all_reduce(denominator, dist.ReduceOp.SUM, deadline)
    link.all_reduce(numerator, dist.ReduceOp.SUM, deadline)
    merged = numerator / denominator.masked_fill(denominator == 0, 1.0)[..., None]
    return merged.to(out_dtype), shift + denominator.log()


STRATEGIES = {
    "all_gather": Strategy(_all_gather, is_canonical=True),
    "three_allreduce": Strategy(_three_allreduce, is_canonical=False),
}


def strategies() -> tuple[str, ...]:
    """The names that `strategy` takes besides "auto"."""
    return tuple(STRATEGIES)


def resolve(strategy: str) -> str:
    """The name of the strategy to run; "auto" is always a canonical one.

    Raises:
        ValueError: there is no such strategy.
    """
    if strategy == "auto":
        return "all_gather"
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of auto, {', '.join(STRATEGIES)}, got {strategy!r}")
    return strategy
