# SPDX-License-Identifier: BSD-3-Clause
"""Sparse attention as ranges of keys: what each query sees, for the `key_ranges` of `lean_decode`.

Every function takes the slots of the queries, an integer tensor `[batch, seqlen_q]`, and returns
int32 `[batch, seqlen_q, num_ranges, 2]` on its device: half-open ranges of slots, none of which
reaches behind the query's own. A query sees the union of its ranges, so patterns are put together
by concatenation::

    streaming_llm = torch.cat([first(slots, 4), window(slots, 2044)], dim=2)  # arXiv:2309.17453
    longformer = torch.cat([global_tokens(slots, [(0, 1)]), window(slots, 512)], dim=2)
    big_bird = torch.cat(
        [first(slots, 64), window(slots, 192), random_blocks(slots, 3, block=64, seed=0)], dim=2
    )
    strided = torch.cat([window(slots, 128), dilated(slots, 1024, dilation=128)], dim=2)

Where a cache is split over ranks, `local` gives each rank its part of the ranges. Nothing is read
on the host, so that calls can be captured in CUDA graphs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .sharding import ShardLayout


def window(slots: Tensor, size: int) -> Tensor:
    """The last `size` slots up to the query's own; `[batch, seqlen_q, 1, 2]`.

    Raises:
        ValueError: `size` is below 1, or `slots` are not integers `[batch, seqlen_q]`.

    Source: sliding windows, Longformer (arXiv:2004.05150), section 3.1.
    """
    slots = checked_slots("window", slots, size=size)
    ends = slots[..., None] + 1
    return _ranges(slots, ends - size, ends)


def first(slots: Tensor, count: int) -> Tensor:
    """The first `count` slots of the sequence; `[batch, seqlen_q, 1, 2]`.

    Raises:
        ValueError: `count` is below 1, or `slots` are not integers `[batch, seqlen_q]`.

    Source: attention sinks, StreamingLLM (arXiv:2309.17453), section 3.2.
    """
    slots = checked_slots("first", slots, count=count)
    begins = torch.zeros_like(slots[..., None])
    return _ranges(slots, begins, begins + count)


def global_tokens(slots: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The slots of some ranges, and all slots for a query that is in one of them itself.

    Args:
        ranges: half-open ranges of slots, the same for all sequences.

    Returns:
        `[batch, seqlen_q, len(ranges), 2]`.

    Raises:
        ValueError: there is no range, or `slots` are not integers `[batch, seqlen_q]`.

    Source: global attention, Longformer (arXiv:2004.05150), section 3.1.
    """
    slots = checked_slots("global_tokens", slots, **{"the number of ranges": len(ranges)})
    is_global = torch.stack([(begin <= slots) & (slots < end) for begin, end in ranges]).any(0)
    begins = [torch.where(is_global, 0, begin) for begin, _ in ranges]
    ends = [torch.where(is_global, slots + 1, end) for _, end in ranges]
    return _ranges(slots, torch.stack(begins, dim=-1), torch.stack(ends, dim=-1))


def dilated(slots: Tensor, count: int, *, dilation: int, block: int = 1) -> Tensor:
    """`count` blocks of slots of which the last ends with the query, and every next one begins
    `dilation` slots before; `[batch, seqlen_q, count, 2]`.

    Equivalent PyTorch, for one query and blocks of one slot::

        visible = slot - dilation * torch.arange(count)

    Raises:
        ValueError: `count`, `dilation` or `block` is below 1, or `slots` are not integers
            `[batch, seqlen_q]`.

    Source: dilated windows, Longformer (arXiv:2004.05150), section 3.1; with a window of
        `dilation` slots the strided pattern of Sparse Transformers (arXiv:1904.10509), section 4.3.
    """
    slots = checked_slots("dilated", slots, count=count, dilation=dilation, block=block)
    ends = slots[..., None] + 1 - dilation * torch.arange(count, device=slots.device)
    return _ranges(slots, ends - block, ends)


def random_blocks(slots: Tensor, count: int, *, block: int, seed: int) -> Tensor:
    """`count` blocks of slots that are drawn for each block of queries, from those up to its own.

    Which ones depends on the seed and the query's block alone: they are the same on every rank, in
    every batch, and for a query that decodes or is part of a prompt. A block may be drawn twice.

    Returns:
        `[batch, seqlen_q, count, 2]`; blocks begin at multiples of `block`.

    Raises:
        ValueError: `count` or `block` is below 1, `seed` is not in [0, 2^31), or `slots` are not
            integers `[batch, seqlen_q]`.

    Source: random attention, BigBird (arXiv:2007.14062), section 2 and appendix D.
    """
    slots = checked_slots("random_blocks", slots, count=count, block=block)
    if not 0 <= seed < 2**31:
        raise ValueError(f"random_blocks: seed must be in [0, 2^31), got {seed}")
    own = slots[..., None].clamp(min=0) // block
    draws = torch.arange(count, device=slots.device)
    begins = _hashed(_hashed(own + (seed << 32)) + draws) % (own + 1) * block
    return _ranges(slots, begins, begins + block)


def local(key_ranges: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    """The part of ranges of global slots that a rank holds, as ranges of its local slots.

    Args:
        key_ranges: int32 `[..., 2]`.
        layout: which rank holds which slot.

    Returns:
        int32 of the same shape.
    """
    begin, end = layout.local_range(rank, key_ranges[..., 0], key_ranges[..., 1])
    return torch.stack([begin, end], dim=-1).int()


def _ranges(slots: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
    """Ranges `[batch, seqlen_q, num_ranges]`, up to the query's own slot, as `key_ranges`."""
    bounds = torch.stack([begins, ends], dim=-1)
    return torch.minimum(bounds, slots[..., None, None] + 1).clamp(min=0).int()


def _hashed(x: Tensor) -> Tensor:
    """Mixes the bits of int64, with the same result on every device; not below 0.

    Source: the finaliser of MurmurHash3 for 64 bits, whose products wrap around.
    """
    for factor in (-0xAE502812AA7333, -0x3B314601E57A13AD):
        x = (x ^ (x >> 33 & 0x7FFFFFFF)) * factor
    return (x ^ (x >> 33 & 0x7FFFFFFF)) & 0x7FFFFFFFFFFFFFFF


def checked_slots(function: str, slots: Tensor, **sizes: int) -> Tensor:
    """The slots in int64, in which no sum with a size overflows."""
    is_integer = not (slots.is_floating_point() or slots.is_complex() or slots.dtype == torch.bool)
    if slots.dim() != 2 or not is_integer:
        raise ValueError(
            f"{function}: slots must be integers of shape [batch, seqlen_q], got {slots.dtype} of "
            f"shape {list(slots.shape)}"
        )
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{function}: {name} must be at least 1, got {size}")
    return slots.long()
