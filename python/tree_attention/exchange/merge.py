# SPDX-License-Identifier: BSD-3-Clause
"""The door for other engines, and the collective operators that compiled graphs call."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import Communicator
from .compile import add_collective
from .groups import get_communicator, name_of, named
from .options import ExchangeOptions, check_no_gradient
from .transport.buffers import StateLayout


def all_merge_states(
    o: Tensor,
    lse: Tensor,
    group: dist.ProcessGroup | Communicator | None = None,
    *,
    strategy: str = "auto",
    out_dtype: torch.dtype | None = None,
    payload_dtype: torch.dtype = torch.float32,
    head_sharded: bool = False,
    timeout: float | timedelta | None = None,
) -> tuple[Tensor, Tensor]:
    """An all-reduce of partial attention states whose operation is `merge_states`.

    Equivalent PyTorch, up to rounding::

        lse = torch.stack(all_gathered_lse).logsumexp(0)
        o = sum((lse_r - lse).exp()[..., None] * o_r for o_r, lse_r in all_gathered_states)

    Collective: every rank calls with its own state of the same queries over its own keys.

    Args:
        o: `[batch, num_heads_q, seqlen_q, head_dim]`, float32, bfloat16 or float16, any strides.
        lse: float32 `[batch, num_heads_q, seqlen_q]`, natural logarithm, any strides; `-inf` for a
            row without keys on this rank, whatever its `o`.
        group: a process group or a `Communicator`, default the world. Without torch.distributed
            this is a world of one.
        strategy: "auto" or one of `strategies()`.
        out_dtype: dtype of the merged `o`, default that of `o`. Arithmetic is float32.
        payload_dtype: dtype in which each rank's `o` travels: float32, or bfloat16 to halve the
            bytes, where every rank, also its own, sees the rounded copy. lse stays float32.
            Ignored in a world of one.
        head_sharded: return to each rank its heads only, those that
            `torch.tensor_split(o, world_size, dim=1)[rank]` names, maybe none.
        timeout: seconds, or a `datetime.timedelta`, in which the call returns or raises, 30 unless
            the communicator says otherwise; a number where torch.compile traces the call.

    Returns:
        New tensors: the merged o and the float32 lse, with the same bits on every rank, and those
        of `merge_states` of the ranks' states for all strategies but "three_allreduce"; `(0, -inf)`
        for a row that has no keys on any rank.

    Raises:
        ValueError: there is no such strategy, it cannot do what the options ask for, or shapes or
            dtypes break the rules above. This rank sent nothing; ranks whose arguments were right
            raise ExchangeError at their timeout.
        TypeError: timeout is neither a number nor a timedelta.
        ExchangeError: a rank was lost, stalled, or called with other arguments; or another thread
            uses the group (see `Communicator`).

    Source: Tree Attention (arXiv:2408.04093), section 5.
    """
    if torch.compiler.is_compiling():
        check_no_gradient("all_merge_states", "o and lse", o, lse)
        result: tuple[Tensor, Tensor] = _in_graph(
            o,
            lse,
            name_of(group),
            strategy=strategy,
            out_dtype=out_dtype,
            payload_dtype=payload_dtype,
            head_sharded=head_sharded,
            timeout=timeout,
        )
        return result
    return get_communicator(group).all_merge_states(
        o,
        lse,
        strategy=strategy,
        out_dtype=out_dtype,
        payload_dtype=payload_dtype,
        head_sharded=head_sharded,
        timeout=timeout,
    )


def fake_merge(
    like: Tensor,
    head_dim: int,
    group: str,
    *,
    strategy: str,
    out_dtype: torch.dtype | None,
    payload_dtype: torch.dtype,
    head_sharded: bool,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Outputs of a merge of states with the rows and on the device of `like`."""
    options = ExchangeOptions(strategy, out_dtype or like.dtype, payload_dtype, head_sharded)
    layout = StateLayout(like.shape[:3], head_dim, payload_dtype)
    return named(group).outputs(layout, options, like.device)


def _run(o: Tensor, lse: Tensor, group: str, **options: Any) -> tuple[Tensor, Tensor]:
    return named(group).all_merge_states(o, lse, **options)


def _fake(o: Tensor, lse: Tensor, group: str, **options: Any) -> tuple[Tensor, Tensor]:
    return fake_merge(o, o.shape[3], group, **options)


_in_graph = add_collective(
    "all_merge_states(Tensor o, Tensor lse, str group, *, str strategy, ScalarType? out_dtype, "
    "ScalarType payload_dtype, bool head_sharded, float? timeout) -> (Tensor o, Tensor lse)",
    _run,
    _fake,
)

add_collective(
    "all_reduce(Tensor x, str group, *, ScalarType? payload_dtype, float? timeout) -> Tensor",
    lambda x, group, **options: named(group).all_reduce(x, **options),
    lambda x, group, **_: torch.empty_like(x, memory_format=torch.contiguous_format),
)


def _fake_gather(x: Tensor, group: str, counts: Sequence[int], dim: int, **_: object) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(counts)
    return x.new_empty(shape)


add_collective(
    "all_gather(Tensor x, str group, SymInt[] counts, int dim, *, float? timeout) -> Tensor",
    lambda x, group, counts, dim, **options: named(group).all_gather(x, counts, dim, **options),
    _fake_gather,
)
