# SPDX-License-Identifier: BSD-3-Clause
"""Sparse attention as ranges of keys: what each query sees, for the `key_ranges` of `lean_decode`.

Every function takes the slots of the queries, an integer tensor `[batch, seqlen_q]`, and returns
int32 `[batch, seqlen_q, num_ranges, 2]` on its device: half-open ranges of slots that end with the
query's own or before. It raises ValueError for slots that are no such integers below 2^31,
which is checked on the CPU alone, and for sizes below 1; TypeError for sizes that are no integers.
A query sees the union of its ranges, so
patterns are put together by concatenation::

    streaming_llm = torch.cat([first(slots, 4), window(slots, 2044)], dim=2)  # arXiv:2309.17453
    longformer = torch.cat([global_tokens(slots, [(0, 1)]), window(slots, 512)], dim=2)
    big_bird = torch.cat(
        [first(slots, 64), window(slots, 192), random_blocks(slots, 3, block=64, seed=0)], dim=2
    )
    strided = torch.cat([window(slots, 128), dilated(slots, 1024, dilation=128)], dim=2)

Heads may have patterns of their own: `by_head` makes them sequences of one call. Where each query
has chosen its keys, as `index_topk` does, `by_rows` makes them pages. Where a cache is
split over ranks, `local` gives each rank its part of the ranges. Many small pieces are faster as a
list of pages, which `page_lists` makes where the cache has pages. Nothing is read back from a GPU,
so that calls can be captured in CUDA graphs.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ._numbers import as_integer, integer
from .options import check_tensors
from .sharding import ShardLayout

__all__ = [
    "block",
    "by_head",
    "by_rows",
    "dilated",
    "first",
    "global_tokens",
    "local",
    "page_lists",
    "random_blocks",
    "window",
]


def window(slots: Tensor, size: int) -> Tensor:
    """The last `size` slots up to the query's own; `[batch, seqlen_q, 1, 2]`.

    For example::

        import torch
        from tree_attention.patterns import window

        slots = torch.tensor([[9]])  # one query, at slot 9
        print(window(slots, 4).tolist())  # [[[[6, 10]]]]

    Source: sliding windows, Longformer (arXiv:2004.05150), section 3.1.
    """
    slots, size = checked_slots("window", slots), _size("window", "size", size)
    ends = slots[..., None] + 1
    return _ranges(slots, ends - size, ends)


def block(slots: Tensor, size: int) -> Tensor:
    """The slots of the query's block, which begins at a multiple of `size`, up to its own.

    The result has the shape `[batch, seqlen_q, 1, 2]`.

    For example::

        import torch
        from tree_attention.patterns import block

        slots = torch.tensor([[9]])  # one query, at slot 9
        print(block(slots, 4).tolist())  # [[[[8, 10]]]]

    Source: local attention in blocks, Image Transformer (arXiv:1802.05751), section 3.2.
    """
    slots, size = checked_slots("block", slots)[..., None], _size("block", "size", size)
    return _ranges(slots[..., 0], slots // size * size, slots + 1)


def first(slots: Tensor, count: int) -> Tensor:
    """The first `count` slots of the sequence; `[batch, seqlen_q, 1, 2]`.

    For example::

        import torch
        from tree_attention.patterns import first

        slots = torch.tensor([[9]])  # one query, at slot 9
        print(first(slots, 2).tolist())  # [[[[0, 2]]]]

    Source: attention sinks, StreamingLLM (arXiv:2309.17453), section 3.2.
    """
    slots, count = checked_slots("first", slots), _size("first", "count", count)
    begins = torch.zeros_like(slots[..., None])
    return _ranges(slots, begins, begins + count)


def global_tokens(slots: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The slots of some ranges, and all slots for a query that is in one of them itself.

    Args:
        ranges: half-open ranges of slots, the same for all sequences.

    Returns:
        `[batch, seqlen_q, len(ranges), 2]`.

    Raises:
        ValueError: there is no range.
        TypeError: a bound is no integer.

    For example::

        import torch
        from tree_attention.patterns import global_tokens

        slots = torch.tensor([[9]])  # one query, at slot 9
        print(global_tokens(slots, [(0, 1)]).tolist())  # [[[[0, 1]]]]

    Source: global attention, Longformer (arXiv:2004.05150), section 3.1.
    """
    slots = checked_slots("global_tokens", slots)
    _size("global_tokens", "the number of ranges", len(ranges))
    bounds = [tuple(map(as_integer, bounds)) for bounds in ranges]
    if any(len(pair) != 2 or None in pair for pair in bounds):
        raise TypeError(f"global_tokens: ranges must be pairs of integers, got {ranges!r:.80}")
    ranges = cast("list[tuple[int, int]]", bounds)
    is_global = torch.stack([(begin <= slots) & (slots < end) for begin, end in ranges]).any(0)
    begins = [torch.where(is_global, 0, begin) for begin, _ in ranges]
    ends = [torch.where(is_global, slots + 1, end) for _, end in ranges]
    return _ranges(slots, torch.stack(begins, dim=-1), torch.stack(ends, dim=-1))


def dilated(slots: Tensor, count: int, *, dilation: int, block: int = 1) -> Tensor:
    """`count` blocks of slots: one ends with the query, the others every `dilation` slots before.

    The result has the shape `[batch, seqlen_q, count, 2]`.

    Equivalent PyTorch, for one query and blocks of one slot::

        visible = slot - dilation * torch.arange(count)

    For example::

        import torch
        from tree_attention.patterns import dilated

        slots = torch.tensor([[9]])  # one query, at slot 9
        print(dilated(slots, 2, dilation=4).tolist())  # [[[[9, 10], [5, 6]]]]

    Source: dilated windows, Longformer (arXiv:2004.05150), section 3.1; with a window of
        `dilation` slots the strided pattern of Sparse Transformers (arXiv:1904.10509), section 4.3.
    """
    slots, count = checked_slots("dilated", slots), _size("dilated", "count", count)
    dilation, block = _size("dilated", "dilation", dilation), _size("dilated", "block", block)
    ends = slots[..., None] + 1 - dilation * torch.arange(count, device=slots.device)
    return _ranges(slots, ends - block, ends)


def random_blocks(slots: Tensor, count: int, *, block: int, seed: int) -> Tensor:
    """`count` blocks of slots that are drawn for each block of queries, from those up to its own.

    Which ones depends on the seed and the query's block alone: they are the same on every rank, in
    every batch, and for a query that decodes or is part of a prompt. A block may be drawn twice.

    Returns:
        `[batch, seqlen_q, count, 2]`; blocks begin at multiples of `block`.

    Raises:
        TypeError, ValueError: `seed` is no integer in [0, 2^31).

    For example::

        import torch
        from tree_attention.patterns import random_blocks

        slots = torch.tensor([[9]])  # one query, at slot 9
        print(random_blocks(slots, 3, block=2, seed=0).shape)  # torch.Size([1, 1, 3, 2])

    Source: random attention, BigBird (arXiv:2007.14062), section 2 and appendix D.
    """
    slots, count = checked_slots("random_blocks", slots), _size("random_blocks", "count", count)
    block = _size("random_blocks", "block", block)
    seed = integer("random_blocks", "seed", seed, 0, 2**31 - 1)
    own = slots[..., None].clamp(min=0) // block
    draws = torch.arange(count, device=slots.device)
    begins = _hashed(_hashed(own + (seed << 32)) + draws) % (own + 1) * block
    return _ranges(slots, begins, begins + block)


def by_head(
    q: Tensor, k: Tensor, v: Tensor, key_ranges: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of `lean_decode` and `tree_decode` with which each kv head has its own ranges.

    Each kv head becomes a sequence with one kv head::

        halves = [window(slots, 128)] * 4 + [dilated(slots, 1024, dilation=128)] * 4
        o, lse = lean_decode(*by_head(q, k, v, halves))
        o, lse = o.view(*q.shape[:3], -1), lse.view(q.shape[:3])

    The queries of a kv head share its ranges. Keys and values are not copied if the heads of all
    sequences have one stride, as in a slice of a cache by tokens. Pages and options with
    an axis of heads do not fit sequences of one head.

    Args:
        q: `[batch, num_heads_q, seqlen_q, head_dim]`.
        k, v: `[batch, num_heads_kv, seqlen_k, head_dim]`.
        key_ranges: for each kv head int32 `[batch, seqlen_q, num_ranges, 2]`; numbers of ranges may
            differ.

    Returns:
        q `[batch * num_heads_kv, num_heads_q / num_heads_kv, seqlen_q, head_dim]`, k and v
        `[batch * num_heads_kv, 1, seqlen_k, head_dim]`, and their key_ranges.

    Raises:
        ValueError: there is not one tensor of ranges for each kv head, or one has another shape.

    For example::

        import torch
        from tree_attention import lean_decode
        from tree_attention.patterns import by_head, first, window

        q = torch.randn(1, 8, 1, 64)  # [batch, num_heads_q, seqlen_q, head_dim]
        k, v = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)  # 100 keys of 2 kv heads
        slots = torch.tensor([[99]])
        o, lse = lean_decode(*by_head(q, k, v, [window(slots, 10), first(slots, 10)]))
        print(o.view(q.shape).shape)  # torch.Size([1, 8, 1, 64])

    Source: half of the heads each, Sparse Transformers (arXiv:1904.10509), section 4.3.
    """
    check_tensors("by_head", q=q, k=k, v=v)
    if len(key_ranges) != k.shape[1]:
        raise ValueError(
            f"by_head: key_ranges must be of {k.shape[1]} kv heads, got {len(key_ranges)}"
        )
    for ranges in key_ranges:
        check_tensors("by_head", key_ranges=ranges)
        is_right = ranges.dim() == 4 and ranges.shape == (len(q), q.shape[2], ranges.shape[2], 2)
        wanted = f"[{q.shape[0]}, {q.shape[2]}, num_ranges, 2]"
        _check_integers("by_head", "key_ranges", ranges, is_right, wanted)
    most = max(ranges.shape[2] for ranges in key_ranges)
    padded = [F.pad(ranges, (0, 0, 0, most - ranges.shape[2])) for ranges in key_ranges]
    return (
        q.unflatten(1, (k.shape[1], -1)).flatten(0, 1),
        k.flatten(0, 1)[:, None],
        v.flatten(0, 1)[:, None],
        torch.stack(padded, dim=1).flatten(0, 1),
    )


def by_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    lengths: Tensor | None = None,
    *,
    block: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments of `lean_decode` and `tree_decode` with which each query sees chosen keys.

    Each query of each kv head becomes a sequence whose pages are the chosen rows of the cache, in
    place: no key is copied. ::

        q1, k1, v1, key_ranges, page_table = by_rows(q, k, v, rows)
        o, lse = lean_decode(q1, k1, v1, key_ranges, page_table=page_table)
        o = o.view(batch, num_heads_kv, seqlen_q, -1, head_dim_v).transpose(2, 3).flatten(1, 2)
        lse = lse.view(batch, num_heads_kv, seqlen_q, -1).transpose(2, 3).flatten(1, 2)

    Args:
        q: `[batch, num_heads_q, seqlen_q, head_dim]`.
        k, v: `[batch, num_heads_kv, seqlen_k, head_dim]`, any strides with a contiguous last axis.
        rows: int32 `[batch, 1 or num_heads_kv, seqlen_q, n]`: the keys that a query sees, or blocks
            of `block` keys, in ascending order and then -1; `ShardLayout.local_rows` gives the rows
            that a rank holds. This is checked on the CPU.
        lengths: integers `[batch, seqlen_q]`: a query sees of its rows and blocks the keys below
            it. None: all.
        block: keys of a block.

    Returns:
        q `[batch * num_heads_kv * seqlen_q, num_heads_q / num_heads_kv, 1, head_dim]`, pages of k
        and v, int32 key_ranges and int32 page_table. Sequences are in the order of (batch, kv head,
        query).

    Raises:
        ValueError: a tensor has another shape or dtype, rows are not ascending, or one is not in
            the cache.
        TypeError: an argument is no tensor, or block no integer.

    For example::

        import torch
        from tree_attention import lean_decode
        from tree_attention.patterns import by_rows

        q = torch.randn(1, 8, 1, 64)  # [batch, num_heads_q, seqlen_q, head_dim]
        k, v = torch.randn(1, 1, 100, 64), torch.randn(1, 1, 100, 64)  # 100 keys of 1 kv head
        rows = torch.tensor([[[[3, 50, 99, -1]]]], dtype=torch.int32)
        q1, k1, v1, key_ranges, page_table = by_rows(q, k, v, rows)
        o, lse = lean_decode(q1, k1, v1, key_ranges, page_table=page_table)
        chosen, _ = lean_decode(q, k[:, :, [3, 50, 99]], v[:, :, [3, 50, 99]])
        print(torch.allclose(o, chosen, atol=1e-6))  # True
    """
    check_tensors("by_rows", q=q, k=k, v=v, rows=rows)
    block = _size("by_rows", "block", block)
    _check_cache(q, k, v)
    batch, num_heads, seqlen_k = k.shape[:3]
    seqlen_q = q.shape[2]
    _check_rows(rows, batch, num_heads, seqlen_q, -(-seqlen_k // block))
    limit: int | Tensor = seqlen_k
    if lengths is not None:
        check_tensors("by_rows", lengths=lengths)
        is_right = lengths.shape == (batch, seqlen_q)
        _check_integers("by_rows", "lengths", lengths, is_right, f"[{batch}, {seqlen_q}]")
        limit = lengths.long().clamp(0, seqlen_k)[:, None, :, None]
    rows = rows.expand(batch, num_heads, seqlen_q, rows.shape[3])
    is_none = rows < 0
    if block == 1 and lengths is None:
        ends = is_none.logical_not().sum(-1, dtype=torch.int32)
    else:
        ends = (limit - rows * block).clamp(0, block).masked_fill(is_none, 0)
        ends = ends.sum(-1, dtype=torch.int32)
    # The last block may not be whole: pages are then parts of blocks.
    size = _gcd(block, seqlen_k % block)
    factors = _page_factors(k, v)
    # Int32, as all rows in memory are below 2^31. The numbers of no row are never looked up.
    numbers = rows * (block * factors[2])
    if size < block:
        parts = torch.arange(0, block, size, dtype=torch.int32, device=rows.device) * factors[2]
        numbers = (numbers[..., None] + parts).flatten(-2)
    for axis, (count, factor) in enumerate(zip((batch, num_heads), factors, strict=False)):
        if count > 1:
            firsts = torch.arange(count, dtype=torch.int32, device=rows.device) * factor
            numbers = numbers + firsts.view(-1, *(1,) * (3 - axis))
    return (
        q.unflatten(1, (num_heads, -1)).transpose(2, 3).flatten(0, 2)[:, :, None],
        _pages(k, size, factors),
        _pages(v, size, factors),
        F.pad(ends.reshape(-1, 1, 1), (1, 0)),
        numbers.flatten(0, 2).contiguous(),
    )


def _check_cache(q: Tensor, k: Tensor, v: Tensor) -> None:
    axes = "[batch, heads, tokens, head_dim]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"by_rows: {name} must have shape {axes}, got {list(x.shape)}")
        if x.shape[3] > 1 and x.stride(3) != 1:
            raise ValueError(
                f"by_rows: {name} must have a contiguous last axis, got stride {x.stride(3)}"
            )
    if v.shape[:3] != k.shape[:3] or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"by_rows: k and v must have q's batch and the same heads and tokens, got q "
            f"{list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"by_rows: num_heads_q must be a multiple of num_heads_kv, got {q.shape[1]} and "
            f"{k.shape[1]}"
        )


def _check_rows(rows: Tensor, batch: int, num_heads: int, seqlen_q: int, end: int) -> None:
    is_right = rows.dim() == 4 and rows.shape[1] in (1, num_heads)
    is_right = is_right and (rows.shape[0], rows.shape[2]) == (batch, seqlen_q)
    if not is_right or rows.dtype != torch.int32:
        heads = "1" if num_heads == 1 else f"1 or {num_heads}"
        raise ValueError(
            f"by_rows: rows must be int32 of shape [{batch}, {heads}, {seqlen_q}, n], got "
            f"{rows.dtype} of shape {list(rows.shape)}"
        )
    if rows.device.type != "cpu" or rows.numel() == 0 or torch.compiler.is_compiling():
        return
    least, largest = map(int, rows.aminmax())
    if largest >= end:
        raise ValueError(f"by_rows: rows must be below {end}, as k has them, got {largest}")
    # With the sign inverted -1 is the largest integer.
    inverted = rows ^ torch.iinfo(torch.int32).min
    is_ascending = (inverted[..., 1:] > inverted[..., :-1]) | (rows[..., 1:] == -1)
    if least < -1 or not bool(is_ascending.all()):
        raise ValueError(
            "by_rows: rows must be in ascending order, each once, and then -1; "
            "ShardLayout.local_rows sorts them"
        )


def _page_factors(k: Tensor, v: Tensor) -> list[int]:
    """Numbers that a sequence, a kv head and a row add to a page's, the same for k and v."""
    factors = [_factors(x) for x in (k, v)]
    if factors[0] != factors[1]:
        raise ValueError(
            f"by_rows: v must lie in memory as k does, got strides {list(k.stride())} of k and "
            f"{list(v.stride())} of v; v.contiguous() and k.contiguous() do"
        )
    number = sum(f * (n - 1) for f, n in zip(factors[0], k.shape, strict=False))
    if number >= 2**31:
        raise ValueError(f"by_rows: k must have below 2^31 rows in memory, got {number}")
    return factors[0]


def _factors(x: Tensor) -> list[int]:
    unit = _unit(x)
    return [stride // unit for stride in _strides(x)]


def _strides(x: Tensor) -> list[int]:
    """Strides of the first three axes, 0 for an axis of one element."""
    return [stride if n > 1 else 0 for stride, n in zip(x.stride()[:3], x.shape[:3], strict=True)]


def _unit(x: Tensor) -> int:
    return _gcd(*_strides(x)) or 1


def _gcd(*numbers: int) -> int:
    """As `math.gcd`, of sizes that may be symbols of a compiled graph."""
    found = 0
    for number in numbers:
        while number:
            found, number = number, found % number
    return found


def pages_of(x: Tensor, size: int) -> Tensor:
    """The pages of `size` rows that `by_rows` makes of a cache, for the scales of its keys."""
    return _pages(x, size, _factors(x))


def _pages(x: Tensor, size: int, factors: list[int]) -> Tensor:
    """The rows of a cache as pages of `size` rows, one kv head each, which may overlap."""
    batch, num_heads, seqlen_k, head_dim = x.shape
    last = (batch - 1, num_heads - 1, seqlen_k - size)
    number = sum(f * n for f, n in zip(factors, last, strict=True))
    num_pages = number + 1 if x.numel() else 0
    strides = (_unit(x), head_dim, x.stride(2), 1)
    return x.as_strided((num_pages, 1, size, head_dim), strides)


def local(key_ranges: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    """The part of ranges of global slots that a rank holds, as ranges of its local slots.

    Args:
        key_ranges: int32 `[..., 2]`.
        layout: which rank holds which slot.

    Returns:
        int32 of the same shape.

    For example::

        import torch
        from tree_attention import BlockCyclic
        from tree_attention.patterns import local, window

        key_ranges = window(torch.tensor([[9]]), 4)  # slots 6 to 9, of which rank 0 has 8 and 9
        print(local(key_ranges, BlockCyclic(2, block=4), 0).tolist())  # [[[[4, 6]]]]
    """
    check_tensors("local", key_ranges=key_ranges)
    begin, end = layout.local_range(rank, key_ranges[..., 0], key_ranges[..., 1])
    return torch.stack([begin, end], dim=-1).int()


def page_lists(
    page_ranges: Tensor, lengths: Tensor, page_table: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """A page table that names only the pages which a sequence sees, and one range for each query.

    The functions above give ranges of pages where they are asked for pages in place of slots::

        pages = slots[:, -1:] // page_size
        page_ranges = torch.cat(
            [first(pages, 1), window(pages, 3), random_blocks(pages, 60, block=1, seed=0)], dim=2
        )
        table, key_ranges = page_lists(page_ranges, slots + 1, page_table, page_size)
        o, lse = lean_decode(q, k_pages, v_pages, key_ranges, page_table=table)

    A pattern can be listed if it consists of whole pages which are the same for all queries of a
    sequence in the call. Of these pages a query sees the slots up to its own, so its last page may
    be partial. Anything else takes ranges. The list keeps no positions: a call with `alibi_slopes`
    takes ranges too.

    Where a cache is split over ranks at multiples of the page size, `local` with a layout of pages
    gives each rank its `page_ranges`, and `layout.count(rank, slots + 1)` its `lengths`.

    Args:
        page_ranges: integers `[batch, 1, num_ranges, 2]`: half-open ranges of pages, which are
            counted along the page table and may overlap.
        lengths: integers `[batch, seqlen_q]`: how many slots there are up to each query's own.
        page_table: int32 `[batch, pages]` or `[batch, num_heads_kv, pages]`.
        page_size: number of slots of a page.

    Returns:
        The `page_table`, of the same shape, with the pages that are seen in front and in their
        order, and the `key_ranges`, int32 `[batch, seqlen_q, 2]`.

    Raises:
        ValueError: a tensor has another shape or no integers, or `page_size` is below 1.

    For example::

        import torch
        from tree_attention.patterns import page_lists, window

        page_table, slots = torch.tensor([[7, 3, 5, 1]], dtype=torch.int32), torch.tensor([[13]])
        table, key_ranges = page_lists(window(slots // 4, 2), slots + 1, page_table, 4)
        print(table.tolist(), key_ranges.tolist())  # [[5, 1, 7, 3]] [[[0, 6]]]
    """
    page_size = _size("page_lists", "page_size", page_size)
    check_tensors("page_lists", page_ranges=page_ranges, lengths=lengths, page_table=page_table)
    check = partial(_check_integers, "page_lists")
    is_table = page_table.dim() in (2, 3)
    check("page_table", page_table, is_table, "[batch, pages] or [batch, num_heads_kv, pages]")
    batch, pages = page_table.shape[0], page_table.shape[-1]
    is_right = page_ranges.shape == (batch, 1, *page_ranges.shape[2:3], 2)
    wanted = f"[{batch}, 1, num_ranges, 2], as all queries of a sequence see the same pages"
    check("page_ranges", page_ranges, is_right, wanted)
    is_right = lengths.dim() == 2 and lengths.shape[0] == batch
    check("lengths", lengths, is_right, f"[{batch}, seqlen_q]")
    page = torch.arange(pages, device=page_table.device)
    begin, end = page_ranges[:, 0].split(1, dim=-1)
    is_seen = ((begin <= page) & (page < end)).any(1)  # [batch, pages]
    order = (~is_seen).byte().argsort(dim=1, stable=True)
    if page_table.dim() == 3:
        order = order[:, None].expand_as(page_table)
    table = page_table.gather(-1, order)
    # Number of full pages seen before the query's last page, and whether the last is seen.
    lengths = lengths.long().clamp(0, pages * page_size)
    seen_before = F.pad(is_seen.cumsum(1), (1, 0)).gather(1, lengths // page_size)
    last_is_seen = F.pad(is_seen, (0, 1)).gather(1, lengths // page_size)
    ends = seen_before * page_size + last_is_seen * (lengths % page_size)
    return table, torch.stack([torch.zeros_like(ends), ends], dim=-1).int()


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


def checked_slots(function: str, slots: Tensor) -> Tensor:
    """Returns the slots in int64, in which no sum with a size overflows."""
    check_tensors(function, slots=slots)
    _check_integers(function, "slots", slots, slots.dim() == 2, "[batch, seqlen_q]")
    if slots.device.type == "cpu" and slots.numel() and not torch.compiler.is_compiling():
        largest = int(slots.max())
        if largest >= 2**31:
            raise ValueError(
                f"{function}: slots must be below 2^31, as key_ranges are int32, got {largest}; "
                "give the index of each query's token in its cache"
            )
    return slots.long()


def _size(function: str, name: str, size: int) -> int:
    """The argument as an integer: slots minus a float would be float32, which is inexact."""
    return min(integer(function, name, size, 1), 2**62)  # more than any cache has


def _check_integers(function: str, name: str, x: Tensor, is_right: bool, shape: str) -> None:
    if not is_right or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(
            f"{function}: {name} must be integers of shape {shape}, got {x.dtype} of shape "
            f"{list(x.shape)}"
        )
