# SPDX-License-Identifier: BSD-3-Clause
"""`all_merge_topk`, the merge of all ranks' choices of keys."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import Communicator, get_communicator
from .compile import collective
from .options import Timeout


def _fake(
    scores: Tensor, slots: Tensor, group: Communicator, *, topk: int, **_: Any
) -> tuple[Tensor, Tensor]:
    shape = (*scores.shape[:-1], topk)
    return scores.new_empty(shape), slots.new_empty(shape)


@collective(
    "(Tensor scores, Tensor slots, str? group=None, *, int topk, ScalarType? index_dtype=None, "
    "float? timeout=None) -> (Tensor scores, Tensor slots)",
    _fake,
)
def all_merge_topk(
    scores: Tensor,
    slots: Tensor,
    group: dist.ProcessGroup | Communicator | None = None,
    *,
    topk: int,
    index_dtype: torch.dtype | None = None,
    timeout: Timeout = None,
) -> tuple[Tensor, Tensor]:
    """An all-reduce of choices of keys whose operation is `merge_topk`.

    Equivalent PyTorch::

        merge_topk(torch.stack(all_gathered_scores), torch.stack(all_gathered_slots), topk=topk)

    Collective: every rank calls with the choice of the same queries among its own keys, as
    `index_topk` gives it with `key_slots`. A message has 8 bytes for each entry.

    Args:
        scores: float32 `[..., k]`, any strides, on the CPU, of the same shape on every rank.
        slots: int32 of the same shape, any strides: global slots, or -1 where there is no entry.
        group: process group or `Communicator`, default the world, of one without torch.distributed.
        topk: number of entries of the result, the same on every rank.
        index_dtype: dtype of the queries and keys that were scored, which ranks compare: keys that
            are rounded otherwise on one rank would be chosen otherwise. None: not said.
        timeout: as in `all_merge_states`.

    Returns:
        New tensors `[..., topk]`, as `merge_topk` returns them, with the same bits on every rank.

    Raises:
        ValueError: shapes, dtypes or topk break the rules above. This rank sent nothing; ranks
            whose arguments were right raise ExchangeError at their timeout.
        TypeError: scores or slots is no tensor, topk or timeout no number, or index_dtype no dtype.
        RuntimeError: a gradient is required. This rank sent nothing.
        ExchangeError: a rank was lost, stalled, or called with other arguments; or another thread
            uses the group (see `Communicator`).

    For example::

        import torch
        from tree_attention import all_merge_topk, index_topk

        # One process; with several, after torch.distributed.init_process_group, every rank passes
        # the choice among its own keys, and gets the choice among all keys.
        q, k = torch.randn(1, 8, 1, 32), torch.randn(1, 1, 100, 32)
        scores, slots = index_topk(q, k, torch.rand(1, 8, 1), topk=4)
        print(torch.equal(all_merge_topk(scores, slots, topk=4)[1], slots))  # True
    """
    return get_communicator(group).all_merge_topk(
        scores, slots, topk=topk, index_dtype=index_dtype, timeout=timeout
    )
