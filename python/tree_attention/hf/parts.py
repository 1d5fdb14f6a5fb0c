# SPDX-License-Identifier: BSD-3-Clause
"""Attention to keys in several parts, with one call of `lean_decode` for each part.

If rows share a document, one call attends to the document for all rows, as if they were queries of
one sequence, and another call attends to the keys that each row has for itself.

Keys that lie on the host, in pages, are parts of their own. A few queries of a GPU go to them: the
host attends while the device attends to its own keys. For many queries the keys come to the device.

After a hole of a padding mask, ALiBi counts tokens and not slots: the keys before it are nearer by
its length than their slots say, so they are a call with other positions of the queries.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cascade import attend_as_one
from ..ops import lean_decode, merge_states
from .masks import KeyRanges

# With more rows of queries than this for each head of keys, keys come from the host to the device.
# A CPU of 2 TFLOP/s that reads each byte of bfloat16 keys for so many rows is as fast as a bus of
# 30 GB/s: two operations for each row and element of two bytes.
_MOST_ROWS_ON_HOST = 64
# Pages of each sequence that come at a time.
_PAGES_AT_A_TIME = 16


class Part(NamedTuple):
    """Keys that all queries see in one call; the ranges are in these keys."""

    keys: Tensor
    values: Tensor
    ranges: Tensor  # int32 [batch, seqlen_q, (2,) 2]
    options: Mapping[str, Any]  # of lean_decode
    is_common: bool = False  # whether all rows see the keys of one sequence

    def of(self, tokens: slice) -> "Part":
        """The part for some of the queries."""
        options = dict(self.options)
        if "query_positions" in options:
            options["query_positions"] = options["query_positions"][:, tokens]
        return self._replace(ranges=self.ranges[:, tokens], options=options)


def parts_of(
    keys: Tensor, values: Tensor, local: Tensor, options: Mapping[str, Any], ranges: KeyRanges
) -> list[Part]:
    """The parts of some keys; queries see their `local` ranges."""
    if "alibi_slopes" not in options:
        return [Part(keys, values, local, options)]
    positions = ranges.positions
    if ranges.skipped is None:
        return [Part(keys, values, local, {**options, "query_positions": positions})]
    both = (local[:, :, 0], positions - ranges.skipped), (local[:, :, 1], positions)
    return [Part(keys, values, own, {**options, "query_positions": x}) for own, x in both]


def attend_to_parts(
    query: Tensor,
    parts: Sequence[Part],
    out_dtype: torch.dtype,
    result_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The state of queries `[batch, num_heads_q, seqlen_q, head_dim]` over all parts. It becomes a
    result in `result_dtype` once ranks have merged it, or is one in `out_dtype`."""
    result_dtype = result_dtype or out_dtype
    if len(parts) == 1:
        return _attend(query, parts[0], out_dtype, result_dtype)
    if any(part.keys.device != query.device for part in parts):
        return _attend_to_both(query, parts, out_dtype, result_dtype)
    states = (_attend(query, part, torch.float32, result_dtype) for part in parts)
    o, lse = zip(*states, strict=True)
    return merge_states(torch.stack(o), torch.stack(lse), out_dtype=out_dtype)


def _attend(
    query: Tensor, part: Part, out_dtype: torch.dtype, result_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    keys, values, ranges, options, is_common = part
    options = {**options, "out_dtype": out_dtype, "result_dtype": result_dtype}
    if not is_common:
        return lean_decode(query, keys, values, ranges, **options)
    o, lse = attend_as_one(query, keys, values, ranges, options)
    return o, lse


def _attend_to_both(
    query: Tensor, parts: Sequence[Part], out_dtype: torch.dtype, result_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The state over parts on the device of the queries, and parts on the host."""
    near = [part for part in parts if part.keys.device == query.device]
    far = [part for part in parts if part.keys.device != query.device]
    num_rows = query.shape[2] * (query.shape[1] // far[0].keys.shape[1])
    if num_rows <= _MOST_ROWS_ON_HOST:
        finish = _begin_on_host(query, far, result_dtype)
        states = [_attend(query, part, torch.float32, result_dtype) for part in near]
        return _merged([*states, finish()], out_dtype)
    state, *others = [_attend(query, part, torch.float32, result_dtype) for part in near]
    for part in far:
        for piece in _brought(part, query.device):
            state = _merged(
                [state, _attend(query, piece, torch.float32, result_dtype)], torch.float32
            )
    return _merged([state, *others], out_dtype)


def _merged(
    states: Sequence[tuple[Tensor, Tensor]], out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    o, lse = zip(*states, strict=True)
    return merge_states(torch.stack(o), torch.stack(lse), out_dtype=out_dtype)


def _begin_on_host(
    query: Tensor, parts: Sequence[Part], result_dtype: torch.dtype
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Begins to copy the queries to the host. The function that it returns attends there, and
    returns the state on the device of the queries."""
    host = parts[0].keys.device
    there = query.to(host, non_blocking=True)
    parts = [_moved(part, host) for part in parts]
    has_come = torch.cuda.current_stream(query.device).record_event()

    def finish() -> tuple[Tensor, Tensor]:
        has_come.synchronize()
        o, lse = _merged(
            [_attend(there, part, torch.float32, result_dtype) for part in parts], torch.float32
        )
        # Page-locked, or the host would wait for the device.
        state = torch.empty((*lse.shape, o.shape[3] + 1), dtype=torch.float32, pin_memory=True)
        state[..., :-1], state[..., -1] = o, lse
        state = state.to(query.device, non_blocking=True)
        return state[..., :-1], state[..., -1]

    return finish


def _brought(part: Part, device: torch.device) -> Iterator[Part]:
    """A part in pages on the host as parts of some pages on the device."""
    table, page_size = part.options["page_table"], part.keys.shape[2]
    for begin in range(0, table.shape[1], _PAGES_AT_A_TIME):
        pages = table[:, begin : begin + _PAGES_AT_A_TIME]
        first, end = int(pages.min()), int(pages.max()) + 1
        options = {
            name: x[first:end] if name in ("k_scale", "v_scale") else x
            for name, x in part.options.items()
        }
        options["page_table"] = pages - first
        if "key_layout" in options:
            start, block, stride = options["key_layout"]
            options["key_layout"] = start + begin * page_size // block * stride, block, stride
        moved = Part(part.keys[first:end], part.values[first:end], part.ranges, options)
        moved = _moved(moved, device)
        ranges = moved.ranges - begin * page_size
        keys, values = (x.to(device, non_blocking=True) for x in (moved.keys, moved.values))
        yield moved._replace(keys=keys, values=values, ranges=ranges)


def _moved(part: Part, device: torch.device) -> Part:
    """The part with all but its keys and values on a device, when the copies have come."""

    def to(x: Any) -> Any:
        return x.to(device, non_blocking=True) if isinstance(x, Tensor) else x

    options = {name: to(x) for name, x in part.options.items()}
    return part._replace(ranges=to(part.ranges), options=options)
