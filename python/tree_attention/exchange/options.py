# SPDX-License-Identifier: BSD-3-Clause
"""The only validation of what callers ask of an exchange, before anything is sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._numbers import MAX_SECONDS, as_integers, as_real, boolean, integer, shown
from ..index import MAX_TOPK, check_cpu
from ..options import MERGE, check_no_vmap, check_option_names, check_tensors, check_values
from .strategies import STRATEGIES, HeadSharding, StrategyName, candidates
from .transport.buffers import share

GivenStrategy = Literal["auto", StrategyName]
_PAYLOAD_DTYPES = (torch.float32, torch.bfloat16)
Timeout = float | timedelta | None  # seconds; None is the communicator's
_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class MergeOptions(TypedDict, total=False):
    """Keyword arguments that `tree_decode` and `all_merge_states` have in common."""

    strategy: GivenStrategy
    """"auto", the default, or one of `strategies()`."""
    out_dtype: torch.dtype | None
    """dtype of the merged `o`. Arithmetic is float32."""
    payload_dtype: torch.dtype
    """dtype in which each rank's `o` travels: float32, the default, or bfloat16."""
    head_sharded: bool
    """Return to each rank its heads only."""
    head_counts: Sequence[int] | None
    """With head_sharded, how many heads each rank gets."""
    timeout: Timeout
    """Seconds in which the call returns or raises, by default the communicator's."""


MERGE_DEFAULTS: MergeOptions = {
    "strategy": "auto",
    "out_dtype": None,
    "payload_dtype": torch.float32,
    "head_sharded": False,
    "head_counts": None,
    "timeout": None,
}
# The same options as operators of graphs have them.
MERGE_SCHEMA = (
    'str strategy="auto", ScalarType? out_dtype=None, ScalarType payload_dtype=float32, '
    "bool head_sharded=False, int[]? head_counts=None, float? timeout=None"
)


@dataclass(frozen=True)
class ExchangeOptions:
    """Options of one exchange."""

    strategy: GivenStrategy
    out_dtype: torch.dtype
    payload_dtype: torch.dtype = torch.float32
    head_sharded: HeadSharding = False

    @staticmethod
    def of(op: str, options: Mapping[str, Any], dtype: torch.dtype) -> "ExchangeOptions":
        """The `MergeOptions` of a call of `op`, checked; `dtype` is the default out_dtype."""
        check_option_names(op, options, MERGE_DEFAULTS, MERGE)
        out_dtype = options.get("out_dtype")
        exchange = ExchangeOptions(
            options.get("strategy", "auto"),
            dtype if out_dtype is None else out_dtype,
            options.get("payload_dtype", torch.float32),
            boolean(op, "head_sharded", options.get("head_sharded", False)),
        )
        counts = options.get("head_counts")
        if counts is not None:
            exchange = replace(exchange, head_sharded=_checked_counts(op, counts, exchange))
        check_options(op, exchange.strategy, exchange.payload_dtype, exchange.head_sharded)
        if out_dtype is not None:
            # Without this: a call with an impossible out_dtype sends first.
            _check_state_dtype(op, "out_dtype", out_dtype)
        return exchange


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(group, dist.ProcessGroup):
        way = "; give one of its groups, mesh.get_group(NAME)" * isinstance(group, DeviceMesh)
        raise ValueError(
            "tree_attention: group must be a process group that this process is in or a "
            f"Communicator, got {group!r}{way}"
        )
    return group


def _checked_counts(op: str, counts: object, exchange: ExchangeOptions) -> tuple[int, ...]:
    found = as_integers(counts)
    if found is None or min(found, default=-1) < 0 or not exchange.head_sharded:
        asked = f"with head_sharded={exchange.head_sharded}"
        raise ValueError(
            f"{op}: head_counts must be an integer of at least 0 for each rank, with "
            f"head_sharded=True, got {shown(counts)} {asked}"
        )
    return tuple(found)


def num_own_heads(
    op: str, num_heads: int, head_sharded: HeadSharding, rank: int, world_size: int
) -> int:
    """Number of the heads of a state that `rank` gets of their merge."""
    if not isinstance(head_sharded, tuple):
        return share(num_heads, world_size, rank) if head_sharded else num_heads
    if len(head_sharded) != world_size or sum(head_sharded) != num_heads:
        raise ValueError(
            f"{op}: head_counts must be {world_size} integers, one for each rank, that add up to "
            f"num_heads_q {num_heads}, got {list(head_sharded)}"
        )
    return head_sharded[rank]


def check_options(
    op: str,
    strategy: str,
    payload_dtype: torch.dtype = torch.float32,
    head_sharded: HeadSharding = False,
) -> None:
    """Refuses options of `op` that no rank could follow."""
    if strategy not in ("auto", *STRATEGIES):
        names = ", ".join(("auto", *STRATEGIES))
        raise ValueError(f"{op}: strategy must be one of {names}, got {strategy!r}")
    _check_payload(op, payload_dtype)
    if strategy != "auto" and strategy not in (
        able := candidates(payload_dtype, bool(head_sharded))
    ):
        asked = f"payload_dtype {payload_dtype}, head_sharded {head_sharded}"
        names = ", ".join(("auto", *able))
        raise ValueError(f"{op}: with {asked}, strategy must be one of {names}, got {strategy!r}")


def check_state(op: str, o: Tensor, lse: Tensor) -> None:
    _check_inputs(op, o=o, lse=lse)
    if o.dim() != 4 or lse.shape != o.shape[:3] or lse.dtype != torch.float32:
        raise ValueError(
            f"{op}: o must be [batch, num_heads_q, seqlen_q, head_dim] and lse float32 "
            f"[batch, num_heads_q, seqlen_q], got {_shapes(o, lse)}"
        )
    # Without this: a state without columns is sent.
    if o.shape[3] == 0:
        raise ValueError(f"{op}: head_dim must be at least 1, got {_shapes(o, lse)}")
    _check_state_dtype(op, "o", o.dtype)


def check_choice(
    op: str, scores: Tensor, slots: Tensor, topk: int, index_dtype: torch.dtype | None
) -> int:
    """The topk of a call of `op` with the choice of this rank."""
    topk = integer(op, "topk", topk, 1, MAX_TOPK)
    if not (index_dtype is None or isinstance(index_dtype, torch.dtype)):
        raise TypeError(f"{op}: index_dtype must be a torch.dtype or None, got {index_dtype!r}")
    _check_inputs(op, scores=scores, slots=slots)
    is_right = scores.dtype == torch.float32 and slots.dtype == torch.int32
    if not is_right or scores.dim() == 0 or scores.shape != slots.shape:
        raise ValueError(
            f"{op}: scores must be float32 [..., k] and slots int32 of the same shape, got "
            f"{_shapes(scores, slots)}"
        )
    check_cpu(op, "scores", scores)
    return topk


def _shapes(x: Tensor, y: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}"


def check_timeout(op: str, timeout: float | timedelta) -> float:
    """The seconds of an argument `timeout` of `op`."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else as_real(timeout)
    if seconds is None:
        raise TypeError(
            f"{op}: timeout must be a number of seconds or a datetime.timedelta, got "
            f"{shown(timeout)}"
        )
    # Without this: a deadline may be any number of seconds.
    if not 0 < seconds <= MAX_SECONDS:  # false for nan, too
        raise ValueError(
            f"{op}: timeout must be above 0 and at most {MAX_SECONDS:,} seconds, got {timeout}"
        )
    return seconds


def payload_of_sum(x: Tensor, payload_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which ranks send `x` to be summed."""
    _check_inputs("all_reduce", x=x)
    if not x.dtype.is_floating_point:
        raise ValueError(f"all_reduce: x must have a floating dtype, got {x.dtype}")
    if payload_dtype is None:
        # Nothing is lost: parts and sum are rounded to bfloat16 anyhow.
        return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    _check_payload("all_reduce", payload_dtype)
    return payload_dtype


def check_gather(
    x: Tensor, counts: Sequence[int], dim: int, rank: int, world_size: int
) -> tuple[tuple[int, ...], int]:
    """The counts and the dim, from 0 on, of an all_gather in which this is rank `rank`."""
    _check_inputs("all_gather", x=x)
    if x.dim() == 0:
        raise ValueError("all_gather: x must have at least one dimension, got a scalar")
    dim = integer("all_gather", "dim", dim, -x.dim(), x.dim() - 1) % x.dim()
    found = as_integers(counts)
    if found is None or len(found) != world_size or min(found) < 0:
        raise ValueError(
            f"all_gather: counts must be {world_size} integers of at least 0, one for each rank, "
            f"got {shown(counts)}"
        )
    if found[rank] != x.shape[dim]:
        raise ValueError(
            f"all_gather: counts[{rank}] must be the size of rank {rank}'s x in dim {dim}, which "
            f"is {x.shape[dim]}, got {shown(found[rank])}"
        )
    return tuple(found), dim


def _check_state_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    if dtype not in _STATE_DTYPES:
        raise ValueError(f"{op}: {name} must be float32, bfloat16 or float16, got {dtype}")


def _check_payload(op: str, dtype: torch.dtype) -> None:
    if dtype not in _PAYLOAD_DTYPES:
        names = " or ".join(str(dtype) for dtype in _PAYLOAD_DTYPES)
        raise ValueError(f"{op}: payload_dtype must be {names}, got {dtype}")


def _check_inputs(op: str, **tensors: Tensor) -> None:
    """Refuses tensors of several devices, of no values, or with a gradient."""
    check_tensors(op, **tensors)
    check_no_vmap(op, **tensors)
    names = " and ".join(tensors)
    if len({x.device for x in tensors.values()}) > 1:
        devices = " and ".join(str(x.device) for x in tensors.values())
        raise ValueError(f"{op}: {names} must be on one device, got {devices}")
    check_values(op, names, *tensors.values())
    check_no_gradient(op, names, *tensors.values())


def check_no_gradient(op: str, names: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            f"{op}: {names} must not require a gradient (inference only), got "
            "requires_grad=True; call it under torch.no_grad()"
        )
