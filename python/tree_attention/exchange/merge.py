# SPDX-License-Identifier: BSD-3-Clause
"""`all_merge_states`, which other engines call too, and the operators that compiled graphs call."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from ..options import lists_options
from .communicator import Communicator, get_communicator
from .compile import add_operator, collective
from .options import MERGE_DEFAULTS, MERGE_SCHEMA, ExchangeOptions, MergeOptions
from .transport.buffers import StateLayout


def fake_merge(
    like: Tensor, head_dim: int, group: Communicator, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Outputs of a merge of states with the rows and on the device of `like`."""
    exchange = ExchangeOptions.of("merge", options, like.dtype)
    layout = StateLayout(like.shape[:3], head_dim, exchange.payload_dtype)
    return group.outputs("merge", layout, exchange, like.device)


def _fake(o: Tensor, lse: Tensor, group: Communicator, **options: Any) -> tuple[Tensor, Tensor]:
    return fake_merge(o, o.shape[3], group, options)


@lists_options(MergeOptions, MERGE_DEFAULTS)
@collective(
    f"(Tensor o, Tensor lse, str? group=None, *, {MERGE_SCHEMA}) -> (Tensor o, Tensor lse)", _fake
)
def all_merge_states(
    o: Tensor,
    lse: Tensor,
    group: dist.ProcessGroup | Communicator | None = None,
    **options: Unpack[MergeOptions],
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
        group: process group or `Communicator`, default the world, of one without torch.distributed.
        strategy: "auto" or one of `strategies()`.
        out_dtype: dtype of the merged `o`, default `o`'s. Arithmetic is float32.
        payload_dtype: dtype in which each rank's `o` travels: float32, or bfloat16 to halve the
            bytes, where every rank, also its own, sees the rounded copy. lse stays float32.
            Ignored in a world of one.
        head_sharded: return to each rank the heads of
            `torch.tensor_split(o, world_size, dim=1)[rank]` only, maybe none.
        head_counts: with head_sharded, one integer for each rank, the same on every rank: those of
            `torch.split(o, head_counts, dim=1)[rank]` instead.
        timeout: seconds, or a `datetime.timedelta`, in which the call returns or raises, 30 unless
            the communicator says otherwise; a number where torch.compile traces the call.

    Returns:
        New tensors: the merged o and the float32 lse, with the same bits on every rank, which all
        strategies but "three_allreduce" share with `merge_states` of the ranks' states; `(0, -inf)`
        for a row that has no keys on any rank.

    Raises:
        ValueError: there is no such strategy, it cannot do what the options ask for, or shapes or
            dtypes break the rules above. This rank sent nothing; ranks whose arguments were right
            raise ExchangeError at their timeout.
        TypeError: timeout is neither a number nor a timedelta.
        RuntimeError: a gradient is required. This rank sent nothing.
        ExchangeError: a rank was lost, stalled, or called with other arguments; or another thread
            uses the group (see `Communicator`).

    For example::

        import torch
        from tree_attention import all_merge_states

        # One process; with several, after torch.distributed.init_process_group, every rank passes
        # the state of its own keys, and gets the state of all keys.
        o, lse = torch.randn(1, 8, 1, 64), torch.randn(1, 8, 1)
        merged_o, merged_lse = all_merge_states(o, lse)
        print(torch.equal(merged_o, o), torch.equal(merged_lse, lse))  # True True

    Source: Tree Attention (arXiv:2408.04093), section 5.
    """
    return get_communicator(group).all_merge_states(o, lse, **options)


def _fake_sum(x: Tensor, **_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_gather(x: Tensor, counts: list[int], dim: int = -1, **_: object) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(counts)
    return x.new_empty(shape)


add_operator(
    "(str? self, Tensor x, *, ScalarType? payload_dtype=None, float? timeout=None) -> Tensor",
    Communicator.all_reduce,
    _fake_sum,
    group="self",
)
add_operator(
    "(str? self, Tensor x, SymInt[] counts, int dim=-1, *, float? timeout=None) -> Tensor",
    Communicator.all_gather,
    _fake_gather,
    group="self",
)
