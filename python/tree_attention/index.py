# SPDX-License-Identifier: BSD-3-Clause
"""The local operators of models that choose their keys: documentation and fake kernels."""

import torch
from torch import Tensor

from ._numbers import integer, real
from .ops import _check_devices
from .options import check_tensors

_ops = torch.ops.tree_attention
_index_topk, _merge_topk = _ops.index_topk.default, _ops.merge_topk.default
MAX_TOPK = (1 << 31) - 1


def index_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None = None,
    key_ranges: Tensor | None = None,
    *,
    topk: int,
    scale: float = 1.0,
    block: int = 1,
    local_blocks: int = 0,
    key_slots: Tensor | None = None,
    query_positions: Tensor | None = None,
    page_table: Tensor | None = None,
    num_workers: int = 0,
) -> tuple[Tensor, Tensor]:
    """The keys that each query chooses by the scores of an index, of those that are held here.

    Equivalent PyTorch, with weights and without blocks::

        scores = (weights[..., None] * (scale * q.float() @ k.float().mT).relu()).sum(1, True)
        scores = scores.masked_fill(~visible, -inf)          # visible: begin <= key < end
        scores, keys = scores.sort(descending=True, stable=True)
        scores, slots = scores[..., :topk], key_slots[keys[..., :topk]]

    Chosen keys stand in a total order: NaN first, then by score downwards, and equal scores by slot
    upwards, where -0 is 0. So there is one choice, whatever the number of threads. The bits of a
    score depend on the query, its weights and the key alone, and on the instruction set, which
    `python -m tree_attention info` names.

    Args:
        q: `[batch, num_heads, seqlen_q, head_dim]`, float32, bfloat16 or float16, on the CPU. Any
            strides with a contiguous last axis, for every tensor but the weights and positions,
            which have any.
        k: `[batch, 1, seqlen_k, head_dim]` in q's dtype, or with `page_table` `[num_pages, 1,
            page_size, head_dim]`.
        weights: float32 `[batch, num_heads, seqlen_q]`: the score of a key is the sum over heads of
            `weight * relu(scale * q @ key)`, and there is one choice for all heads. None: it is
            `scale * q @ key`, and each head chooses.
        key_ranges: int32 `[batch, seqlen_q, 2]`, the half-open range of keys each query sees,
            clamped to `[0, seqlen_k]`. Others are never read. None: all keys.
        topk: number of keys, or blocks, that are chosen.
        scale: factor of the products.
        block: with 2 or more, blocks of so many slots are chosen: block `slot // block` has the
            largest score of its visible keys.
        local_blocks: so many blocks have the score +inf, held here or not: those up to the block of
            the query's position.
        key_slots: int32 `[seqlen_k]`, increasing from at least 0: the global slot of each key.
            None: 0, 1, ....
        query_positions: int64 `[batch, seqlen_q]` in [0, 2^31), required with `local_blocks`.
        page_table: int32 `[batch, pages]`; keys are then counted along the concatenated pages.
            Entries that no range reaches are never read.
        num_workers: into how many parts the keys are cut, which changes no bit of the results. 0,
            the default, is one for each thread; -1 does not cut.

    Returns:
        float32 scores and int32 slots `[batch, 1 or num_heads, seqlen_q, topk]`. Where a query sees
        fewer keys, slot -1 and score -inf follow them. A visible key may have the score -inf.

    Raises:
        ValueError: an argument breaks the rules above.
        TypeError: an argument is no tensor or number.
        NotImplementedError: the tensors are on a GPU.
        RuntimeError: a gradient is required (inference only).

    Sums are float32: the error of a score is at most `(head_dim + num_heads + 8) * 2**-24` of the
    sum over heads and columns of `|weight * scale * q * k|`. The scores of all heads are formed for
    64 keys at a time, so up to a topk of 4 million a call takes 64 MiB besides its results.

    For example::

        import torch
        from tree_attention import index_topk

        q, k = torch.randn(1, 8, 1, 32), torch.randn(1, 1, 100, 32)  # 8 heads of an index
        scores, slots = index_topk(q, k, torch.rand(1, 8, 1), topk=4)
        print(slots.shape, bool((scores.diff() <= 0).all()))  # torch.Size([1, 1, 1, 4]) True

    Source: the lightning indexer of DeepSeek-V3.2 (arXiv:2512.02556), section 2.1.
    """
    topk = integer("index_topk", "topk", topk, 1, MAX_TOPK)
    block = integer("index_topk", "block", block, 1, MAX_TOPK)
    local_blocks = integer("index_topk", "local_blocks", local_blocks, 0, MAX_TOPK)
    num_workers = integer("index_topk", "num_workers", num_workers, -1, MAX_TOPK)
    scale = real("index_topk", "scale", scale)
    optional = {
        "weights": weights,
        "key_ranges": key_ranges,
        "key_slots": key_slots,
        "query_positions": query_positions,
        "page_table": page_table,
    }
    given = {name: x for name, x in optional.items() if x is not None}
    check_tensors("index_topk", q=q, k=k, **given)
    check_cpu("index_topk", "q", q)
    result: tuple[Tensor, Tensor] = _index_topk(
        q,
        k,
        weights,
        key_ranges,
        topk=topk,
        scale=scale,
        block=block,
        local_blocks=local_blocks,
        key_slots=key_slots,
        query_positions=query_positions,
        page_table=page_table,
        num_workers=num_workers,
    )
    return result


def merge_topk(scores: Tensor, slots: Tensor, *, topk: int) -> tuple[Tensor, Tensor]:
    """Merges n choices of the same queries: the first topk of their union, in the total order.

    Equivalent PyTorch, for a row of scores without NaN, and slots none of which is named twice::

        slots, order = slots.flatten().sort()
        scores, order = scores.flatten()[order].sort(descending=True, stable=True)
        scores, slots = scores[:topk], slots[order[:topk]]

    The order is that of `index_topk`. The merge is associative, commutative and idempotent, so that
    choices may be merged on any tree. A slot that several parts name counts once, with its largest
    score. NaN counts as larger than any number.

    Args:
        scores: float32 `[n, ..., k]` with n >= 1, any strides, on the CPU.
        slots: int32 of the same shape, any strides. -1 is no entry, wherever it stands.
        topk: number of entries of the result.

    Returns:
        float32 scores and int32 slots `[..., topk]`. Where the union has fewer, they
        are followed by slot -1 and score -inf.

    Raises:
        ValueError: an argument breaks the rules above.
        TypeError: scores or slots is no tensor, or topk no integer.
        NotImplementedError: the tensors are on a GPU.
        RuntimeError: a gradient is required.

    For example::

        import torch
        from tree_attention import merge_topk

        scores = torch.tensor([[3.0, 1.0], [2.0, 1.0]])  # of two ranks
        slots = torch.tensor([[7, 9], [4, 5]], dtype=torch.int32)
        print(merge_topk(scores, slots, topk=3)[1].tolist())  # [7, 4, 5]
    """
    topk = integer("merge_topk", "topk", topk, 1, MAX_TOPK)
    check_tensors("merge_topk", scores=scores, slots=slots)
    check_cpu("merge_topk", "scores", scores)
    result: tuple[Tensor, Tensor] = _merge_topk(scores, slots, topk=topk)
    return result


def check_cpu(op: str, name: str, x: Tensor) -> None:
    if x.device.type not in ("cpu", "meta"):
        raise NotImplementedError(
            f"{op}: there is no kernel for {x.device.type} yet, got {name} on {x.device}; give "
            f"tensors of the CPU"
        )


@torch.library.register_fake("tree_attention::index_topk")
def _(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None = None,
    key_ranges: Tensor | None = None,
    *,
    topk: int,
    **options: object,
) -> tuple[Tensor, Tensor]:
    others = {"k": k, "weights": weights, "key_ranges": key_ranges, **options}
    _check_devices("index_topk", "q's", q.device, **others)
    num_choices = q.shape[1] if weights is None else 1
    scores = q.new_empty((q.shape[0], num_choices, q.shape[2], topk), dtype=torch.float32)
    return scores, torch.empty_like(scores, dtype=torch.int32)


@torch.library.register_fake("tree_attention::merge_topk")
def _(scores: Tensor, slots: Tensor, *, topk: int) -> tuple[Tensor, Tensor]:
    _check_devices("merge_topk", "scores'", scores.device, slots=slots)
    shape = (*scores.shape[1:-1], topk)
    return scores.new_empty(shape), slots.new_empty(shape)
