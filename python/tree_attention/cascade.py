# SPDX-License-Identifier: BSD-3-Clause
"""Attention over pages of which several sequences begin with the same, each read once.

Sequences whose page tables begin with the same ids have the same keys there, as of a common prompt
or document. Their queries are queries of one state over these keys: the pages are one call with all
their queries as those of one sequence, and what each sequence has for itself is another.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ._numbers import as_integers, integer, shown
from .ops import check_decode, lean_decode, merge_states
from .options import AttentionOptions, check_tensors, takes_attention_options, with_numbers

# The least number of keys that are not read again, in all sequences of a group but one: what is
# below costs more in a call and a merge of its own, a quarter of a millisecond with 32 heads of 128
# in bfloat16 on a core with AVX-512 (benchmarks/cascade.py).
_LEAST_KEYS_SAVED = 4096


class PageGroup(NamedTuple):
    """Sequences that have the pages [begin, end) of their tables in common."""

    rows: tuple[int, ...]
    begin: int
    end: int


def page_groups(
    page_table: Tensor, num_pages: Sequence[int], page_size: int
) -> tuple[PageGroup, ...]:
    """The pages that sequences begin with in common, and that are worth a call of their own.

    After a group come the groups of its sequences that have further pages in common, and so on.

    Args:
        page_table: integers `[batch, pages]` or `[batch, num_heads_kv, pages]`, on the CPU.
        num_pages: of each sequence, the pages in use; later entries are not looked at.
        page_size: the keys of a page.

    Raises:
        TypeError, ValueError: an argument is no such tensor or number, or on the GPU.

    For example::

        import torch
        from tree_attention import page_groups

        page_table = torch.tensor([[*range(64), 64], [*range(64), 65]])
        ((rows, begin, end),) = page_groups(page_table, [65, 65], page_size=64)
        print(rows, begin, end)  # (0, 1) 0 64
    """
    page_size = integer("page_groups", "page_size", page_size, 1)
    numbers = _checked_numbers(page_table, num_pages)
    # With a table for each head, two pages count as the same if all heads have the same ids there.
    by_page = page_table.transpose(1, -1).flatten(0, 1) if page_table.dim() == 3 else page_table
    if page_table.dim() == 3:
        _, by_page = by_page.unique(dim=0, return_inverse=True)
        by_page = by_page.view(len(page_table), -1)
    tables = [row[:n] for row, n in zip(by_page.tolist(), numbers, strict=True)]
    found, waiting = list[PageGroup](), [(list(range(len(tables))), 0)]
    while waiting:
        rows, begin = waiting.pop()
        for same in _by_page(tables, rows, begin):
            first, *others = (tables[row] for row in same)
            end = min(map(len, (first, *others)))
            for other in others:
                if other[begin:end] != first[begin:end]:
                    end = next(i for i in range(begin, end) if other[i] != first[i])
            if (end - begin) * page_size * (len(same) - 1) >= _LEAST_KEYS_SAVED:
                found.append(PageGroup(tuple(same), begin, end))
                waiting.append((same, end))
            else:
                # Fewer of them may have a longer run in common, which pays. It is from the same
                # beginning: a sequence reads all before its first group by itself.
                waiting += [(fewer, begin) for fewer in _by_page(tables, same, end)]
    return tuple(found)


def _checked_numbers(page_table: Tensor, num_pages: Sequence[int]) -> list[int]:
    check_tensors("page_groups", page_table=page_table)
    is_integer = not (page_table.is_floating_point() or page_table.is_complex())
    if page_table.dim() not in (2, 3) or not is_integer or page_table.device.type != "cpu":
        raise ValueError(
            "page_groups: page_table must be integers [batch, pages] or [batch, num_heads_kv, "
            f"pages] on the CPU, got {page_table.dtype} of shape {list(page_table.shape)} on "
            f"{page_table.device}"
        )
    batch, pages = len(page_table), page_table.shape[-1]
    numbers = as_integers(num_pages)
    if numbers is None or len(numbers) != batch or not all(0 <= n <= pages for n in numbers):
        error = TypeError if numbers is None else ValueError
        raise error(
            f"page_groups: num_pages must be an integer from 0 to {pages} for each of {batch} "
            f"sequences, got {shown(num_pages)}"
        )
    return numbers


def _by_page(tables: Sequence[Sequence[int]], rows: Sequence[int], place: int) -> list[list[int]]:
    """The sequences that have the same page at a place, if several do."""
    by_id = dict[int, list[int]]()
    for row in rows:
        if place < len(tables[row]):
            by_id.setdefault(tables[row][place], []).append(row)
    return [same for same in by_id.values() if len(same) > 1]


@takes_attention_options
def cascade_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    groups: Sequence[PageGroup] | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]:
    """`lean_decode` with pages, which reads those that sequences begin with in common once.

    Equivalent PyTorch, up to rounding::

        o, lse = lean_decode(q, k, v, key_ranges, page_table=page_table, ...)

    The groups, and groups within groups, are found from the page table. Where they save little, it
    is `lean_decode`. Bits depend on the groups, that is on the rest of the batch.

    Args:
        q, k, v, key_ranges, out_dtype: see `lean_decode`; `page_table` is required.
        groups: what `page_groups` returned for this page table. None: it is looked for on the
            CPU; on CUDA, where the host does not read the table, this is then `lean_decode`.

    Returns:
        o and lse as of `lean_decode`.

    Raises:
        ValueError: there is no page_table, num_workers is -1, whose bits must not depend on the
            rest of the batch, groups are not of this page table (of its ids on the CPU alone), or
            `lean_decode` refuses an argument.
        TypeError: groups are no `PageGroup`s, or as in `lean_decode`.
        RuntimeError: as in `lean_decode`.

    For example::

        import torch
        from tree_attention import cascade_decode

        q = torch.randn(4, 8, 1, 64)  # [batch, num_heads_q, seqlen_q, head_dim]
        k, v = torch.randn(68, 2, 32, 64), torch.randn(68, 2, 32, 64)  # pages of 32 keys
        common = torch.arange(64).expand(4, 64)  # of all sequences; then each has a page
        page_table = torch.cat((common, torch.arange(64, 68)[:, None]), dim=1).int()
        o, lse = cascade_decode(q, k, v, page_table=page_table)
        print(o.shape, lse.shape)  # torch.Size([4, 8, 1, 64]) torch.Size([4, 8, 1])

    Source: cascade inference (https://flashinfer.ai/2024/02/02/cascade-inference.html), with the
    merge of Tree Attention, Algorithm 3.
    """
    table = options.get("page_table")
    if table is None:
        raise ValueError(
            "cascade_decode: page_table is required, as it says which keys sequences have in common"
        )
    options = with_numbers("cascade_decode", options)
    if options.get("num_workers") == -1:
        raise ValueError(
            "cascade_decode: num_workers must not be -1, by which no bit depends on the rest of "
            "the batch, as bits do here; use lean_decode"
        )
    is_traced = torch.compiler.is_compiling()
    if not is_traced:
        check_decode(q, k, v, key_ranges, out_dtype=out_dtype, **options)
        if groups is not None:
            _check_groups(groups, table)
    # Positions of keys in another block of a layout are no shift of those in the first.
    can_shift = options.get("alibi_slopes") is None or "key_layout" not in options
    if groups is None and not is_traced and q.device.type == "cpu":
        groups = _groups_of(k, key_ranges, table)
    if not groups or not can_shift:
        return lean_decode(q, k, v, key_ranges, out_dtype=out_dtype, **options)
    return _in_groups(q, k, v, key_ranges, table, out_dtype or q.dtype, groups, options)


def _check_groups(groups: object, table: Tensor) -> None:
    """Refuses what `page_groups` does not return for the table, as groups of an older one."""
    if not isinstance(groups, Sequence) or not all(isinstance(x, PageGroup) for x in groups):
        raise TypeError(
            "cascade_decode: groups must be what page_groups returned, or None, got "
            f"{shown(groups)}"
        )
    ends = dict.fromkeys(range(len(table)), 0)
    for group in groups:
        rows, (begin, end) = as_integers(group.rows) or [], as_integers(group[1:]) or (0, 0)
        is_right = 0 < len(rows) == len({*rows}) and begin < end <= table.shape[-1]
        # Each sequence's first group begins with its first page, and the next one where it ends.
        is_right = is_right and all(ends.get(row) == begin for row in rows)
        if is_right and table.device.type == "cpu":
            common = table[..., begin:end]
            is_right = all(torch.equal(common[row], common[rows[0]]) for row in rows[1:])
        if not is_right:
            raise ValueError(
                "cascade_decode: groups must be those that page_groups finds in page_table, of "
                f"shape {list(table.shape)}, got {shown(group)}, whose sequences have not these "
                "pages in common; call page_groups again where a table has changed"
            )
        ends.update(dict.fromkeys(rows, end))


def _groups_of(k: Tensor, key_ranges: Tensor | None, table: Tensor) -> tuple[PageGroup, ...]:
    page_size, (batch, *_, pages) = k.shape[2], table.shape
    num_pages = [pages] * batch
    if key_ranges is not None and key_ranges.numel():
        ends = key_ranges[..., 1].where(key_ranges[..., 0] < key_ranges[..., 1], 0)
        ends = ends.flatten(1).amax(1).clamp(0, pages * page_size)
        num_pages = (-(-ends // page_size)).tolist()
    return page_groups(table, num_pages, page_size)


def _in_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor | None,
    table: Tensor,
    out_dtype: torch.dtype,
    groups: Sequence[PageGroup],
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    (batch, num_heads_q, seqlen_q, _), page_size = q.shape, k.shape[2]
    if key_ranges is None:
        everything = torch.tensor([0, table.shape[-1] * page_size], device=q.device).int()
        key_ranges = everything.expand(batch, seqlen_q, 2)
    own_begin, depth = [0] * batch, [0] * batch
    for group in groups:
        for row in group.rows:
            own_begin[row], depth[row] = group.end, depth[row] + 1
    # Of each sequence, a state for each group that it is in, and one for what is its own.
    shape = 1 + max(depth), batch, num_heads_q, seqlen_q
    o = q.new_empty((*shape, v.shape[3]), dtype=torch.float32)
    lse = q.new_full(shape, -torch.inf, dtype=torch.float32)
    begins = torch.tensor(own_begin, device=q.device).mul_(page_size)
    own = key_ranges.maximum(begins.view(-1, *[1] * (key_ranges.dim() - 1))).int()
    lean_decode(q, k, v, own, out=(o[0], lse[0]), **options)
    seen = [0] * batch
    for group in groups:
        rows = torch.tensor(group.rows, device=q.device)
        first, size = group.begin * page_size, (group.end - group.begin) * page_size
        ranges = key_ranges[rows].clamp(first, first + size) - first
        pages = table[group.rows[0], ..., group.begin : group.end][None]
        given: AttentionOptions = {**options, "page_table": pages}
        positions = options.get("query_positions")
        if positions is not None:
            given["query_positions"] = positions[rows] - first
        state = attend_as_one(q[rows], k, v, ranges, torch.float32, given)
        levels = torch.tensor([seen[row] + 1 for row in group.rows], device=q.device)
        for parts, x in zip((o, lse), state, strict=True):
            parts[levels, rows] = x
        for row in group.rows:
            seen[row] += 1
    return merge_states(o, lse, out_dtype=out_dtype)


def attend_as_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor,
    out_dtype: torch.dtype,
    options: Mapping[str, Any],
) -> list[Tensor]:
    """`lean_decode` of all rows of q, as queries of the one sequence that k and v are."""
    rows, options = (q.shape[0], q.shape[2]), dict(options)
    if (positions := options.get("query_positions")) is not None:
        options["query_positions"] = positions.flatten()[None]
    # A view, where each row has one token.
    queries, ranges = q.transpose(0, 1).flatten(1, 2)[None], key_ranges.flatten(0, 1)[None]
    state = lean_decode(queries, k, v, ranges, out_dtype=out_dtype, **options)
    return [x[0].unflatten(1, rows).transpose(0, 1) for x in state]
