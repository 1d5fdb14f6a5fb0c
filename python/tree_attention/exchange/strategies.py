# SPDX-License-Identifier: BSD-3-Clause
"""The ways to merge the states of all ranks. A new one is a file and an entry in the table."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch

from . import all_gather, all_reduce, butterfly, hierarchical, one_shot, two_phase
from .strategy import Strategy

STRATEGIES = {
    "all_gather": Strategy(all_gather.prepare),
    "two_phase": Strategy(two_phase.prepare, can_shard_heads=True),
    "hierarchical": Strategy(hierarchical.prepare),
    "butterfly": Strategy(butterfly.prepare),
    "three_allreduce": Strategy(all_reduce.prepare_three, is_canonical=False, takes_16_bit=False),
    "max_then_sum": Strategy(all_reduce.prepare_two, is_canonical=False, takes_16_bit=False),
    "one_shot": Strategy(one_shot.prepare, runs_everywhere=False, obstacle=one_shot.obstacle),
}
PAYLOAD_DTYPES = (torch.float32, torch.bfloat16)


def strategies() -> tuple[str, ...]:
    """The names that `strategy` takes besides "auto", in any process group.

    Where the GPUs of all ranks reach one another's memory it also takes "one_shot".
    """
    return tuple(name for name, strategy in STRATEGIES.items() if strategy.runs_everywhere)


def candidates(
    payload_dtype: torch.dtype,
    head_sharded: bool,
    canonical: bool = False,
    unavailable: Container[str] | None = None,
) -> tuple[str, ...]:
    """The strategies that can do what the options ask for, by default in any process group."""
    return tuple(
        name
        for name, strategy in STRATEGIES.items()
        if (strategy.runs_everywhere if unavailable is None else name not in unavailable)
        and (strategy.takes_16_bit or payload_dtype == torch.float32)
        and (strategy.can_shard_heads or not head_sharded)
        and (strategy.is_canonical or not canonical)
    )


def unavailable(obstacles: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Strategies that some rank cannot take part in, and why, from what each rank says."""
    result = {}
    for name in STRATEGIES:
        reasons = [said.get(name, "") for said in obstacles]
        if any(reasons):
            rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
            result[name] = reason if set(reasons) == {reason} else f"rank {rank}: {reason}"
    return result


def check_options(
    strategy: str, payload_dtype: torch.dtype = torch.float32, head_sharded: bool = False
) -> None:
    """Refuses what no rank could do.

    Raises:
        ValueError: there is no such strategy, or it cannot do what the options ask for.
    """
    if strategy not in ("auto", *STRATEGIES):
        raise ValueError(f"strategy must be one of auto, {', '.join(STRATEGIES)}, got {strategy!r}")
    if payload_dtype not in PAYLOAD_DTYPES:
        names = " or ".join(str(dtype) for dtype in PAYLOAD_DTYPES)
        raise ValueError(f"payload_dtype must be {names}, got {payload_dtype}")
    able = ("auto", *candidates(payload_dtype, head_sharded, unavailable=()))
    if strategy not in able:
        asked = f"payload_dtype {payload_dtype}, head_sharded {head_sharded}"
        names = ", ".join(able)
        raise ValueError(f"with {asked}, strategy must be one of {names}, got {strategy!r}")
