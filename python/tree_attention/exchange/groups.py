# SPDX-License-Identifier: BSD-3-Clause
"""The door for other engines, and the communicators of process groups, made once."""

from __future__ import annotations

import threading
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import resolve_group
from .communicator import Communicator


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
            the communicator says otherwise.

    Returns:
        New tensors: the merged o and the float32 lse, with the same bits on every rank, and those
        of `merge_states` of the ranks' states for all strategies but "three_allreduce" and
        "max_then_sum"; `(0, -inf)` for a row that has no keys on any rank.

    Raises:
        ValueError: there is no such strategy, it cannot do what the options ask for, or shapes or
            dtypes break the rules above. This rank sent nothing; ranks whose arguments were right
            raise ExchangeError at their timeout.
        TypeError: timeout is neither a number nor a timedelta.
        ExchangeError: a rank was lost, stalled, or called with other arguments; or another thread
            uses the group (see `Communicator`).

    Source: Tree Attention (arXiv:2408.04093), section 5.
    """
    return get_communicator(group).all_merge_states(
        o,
        lse,
        strategy=strategy,
        out_dtype=out_dtype,
        payload_dtype=payload_dtype,
        head_sharded=head_sharded,
        timeout=timeout,
    )


_communicators: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()
_making = threading.Lock()


def get_communicator(group: dist.ProcessGroup | Communicator | None = None) -> Communicator:
    """The communicator of `group`, by default the world: made at first use, kept with the group."""
    if isinstance(group, Communicator):
        return group
    group = resolve_group(group)
    if group is None:
        return Communicator()
    with _making:  # or two threads would make two, and ranks count them
        comm = _communicators.get(group)
        if comm is None:
            comm = _communicators[group] = Communicator(group)
        return comm
