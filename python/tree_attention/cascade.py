# SPDX-License-Identifier: BSD-3-Clause
"""Attention over pages. Pages with which several sequences begin are read once for all of them.

Sequences whose page tables begin with the same ids have the same keys there, for example those of a
common prompt or document. One call attends to these pages, and takes the queries of all sequences
as if they were queries of one. Another call attends to the pages that each sequence has alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ._numbers import MAX_INTEGER, as_integers, boolean, integer, shown
from .ops import _check_devices, _check_kinds, lean_decode
from .options import AttentionOptions, check_tensors, takes_attention_options, with_numbers

_ops = torch.ops.tree_attention
_cascade_decode, _page_groups = _ops.cascade_decode.default, _ops.page_groups.default

# For tests: the keys that a group has to save, instead of what it costs (csrc/args/cascade.cpp).
_LEAST_KEYS_SAVED: int | None = None


class PageGroup(NamedTuple):
    """Sequences that have the pages [begin, end) of their tables in common."""

    rows: tuple[int, ...]
    begin: int
    end: int


def page_groups(
    page_table: Tensor,
    num_pages: Sequence[int],
    page_size: int,
    *,
    num_heads_q: int = 32,
    num_heads_kv: int = 8,
    head_dim: int = 128,
    has_8_bits: bool = False,
) -> tuple[PageGroup, ...]:
    """The pages that sequences begin with in common, and that are worth a call of their own.

    After a group come the groups of its sequences that have further pages in common, and so on.

    Args:
        page_table: integers `[batch, pages]` or `[batch, num_heads_kv, pages]`, on the CPU.
        num_pages: of each sequence, the pages in use; later entries are not looked at.
        page_size: the keys of a page.
        num_heads_q, num_heads_kv, head_dim, has_8_bits: of the queries and pages, which say what
            reading a page takes and therefore from how many on a call of their own pays.

    Raises:
        TypeError, ValueError: an argument is no such tensor or number, or on the GPU.

    For example::

        import torch
        from tree_attention import page_groups

        page_table = torch.tensor([[*range(64), 64], [*range(64), 65]])
        ((rows, begin, end),) = page_groups(page_table, [65, 65], page_size=64)
        print(rows, begin, end)  # (0, 1) 0 64
    """
    sizes = {
        "page_size": page_size,
        "num_heads_q": num_heads_q,
        "num_heads_kv": num_heads_kv,
        "head_dim": head_dim,
    }
    found = [integer("page_groups", name, size, 1) for name, size in sizes.items()]
    found.append(boolean("page_groups", "has_8_bits", has_8_bits))
    numbers = _checked_numbers(page_table, num_pages)
    return tuple(_unpacked(_page_groups(page_table, numbers, *found, _LEAST_KEYS_SAVED)))


def _unpacked(numbers: Sequence[int]) -> Iterator[PageGroup]:
    """The groups of numbers: of each how many rows, the rows, begin and end."""
    place = 0
    while place < len(numbers):
        last = place + 1 + numbers[place]
        yield PageGroup(tuple(numbers[place + 1 : last]), numbers[last], numbers[last + 1])
        place = last + 2


def _packed(groups: object) -> list[int]:
    """The numbers of groups that a caller gives."""
    numbers: list[int] = []
    for group in groups if isinstance(groups, Sequence) else (None,):
        rows, ends = None, None
        if isinstance(group, PageGroup):
            rows, ends = as_integers(group.rows), as_integers(group[1:])
        if rows is None or ends is None or any(abs(x) > MAX_INTEGER for x in (*rows, *ends)):
            raise TypeError(
                "cascade_decode: groups must be what page_groups returned, or None, got "
                f"{shown(groups)}"
            )
        numbers += [len(rows), *rows, *ends]
    return numbers


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
        groups: what `page_groups` returned for this page table. None: those that pay are looked
            for on the CPU; on CUDA, where the host does not read the table, this is then
            `lean_decode`.

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
    options = with_numbers("cascade_decode", options)
    numbers = None if groups is None else _packed(groups)
    try:
        result: tuple[Tensor, Tensor] = _cascade_decode(
            *(q, k, v, key_ranges),
            out_dtype=out_dtype,
            groups=numbers,
            least_keys_saved=_LEAST_KEYS_SAVED,
            **options,
        )
    except (RuntimeError, TypeError, ValueError):
        _check_kinds("cascade_decode", q, k, v, options, out_dtype, key_ranges=key_ranges)
        raise
    return result


@torch.library.register_fake("tree_attention::cascade_decode")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    groups: Sequence[int] | None = None,
    least_keys_saved: int | None = None,
    **options: object,
) -> tuple[Tensor, Tensor]:
    _check_devices("cascade_decode", "q's", q.device, k=k, v=v, key_ranges=key_ranges, **options)
    o = q.new_empty((*q.shape[:3], v.shape[3]), dtype=out_dtype or q.dtype)
    return o, q.new_empty(q.shape[:3], dtype=torch.float32)


def attend_as_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor,
    options: Mapping[str, Any],
) -> list[Tensor]:
    """`lean_decode` of all rows of q, as queries of the one sequence that k and v are."""
    rows, options = (q.shape[0], q.shape[2]), dict(options)
    if (positions := options.get("query_positions")) is not None:
        options["query_positions"] = positions.flatten()[None]
    # A view, where each row has one token.
    queries, ranges = q.transpose(0, 1).flatten(1, 2)[None], key_ranges.flatten(0, 1)[None]
    state = lean_decode(queries, k, v, ranges, **options)
    return [x[0].unflatten(1, rows).transpose(0, 1) for x in state]
