# SPDX-License-Identifier: BSD-3-Clause
"""Attention where a prompt's tokens are split: queries travel to keys, or keys to queries.

Every rank has the queries of its own tokens, and the keys and values of its own slots. There are
two ways to bring them together:

- pass-Q: each rank gets all queries, attends with its own keys and sends partial states back.
- pass-KV: each rank gets all keys and values that any query sees, and attends with its own queries.

Either way a query has one state for each rank's keys, and these are merged in rank order. All ranks
of p together send, in bytes,

    pass-Q:  (p - 1) * batch * tokens * num_heads_q * (head_dim * itemsize + 4 * (head_dim_v + 1))
    pass-KV: (p - 1) * batch * visible slots * num_heads_kv * (head_dim + head_dim_v) * itemsize

and the way with the smaller number is taken, the same on all ranks. Both at once, pass-Q for the
slots before the chunk and pass-KV for the slots of the chunk, would send all queries and states as
pass-Q does, and keys and values on top.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...exchange import StateLayout
from ...ops import lean_decode, merge_states
from ..cache.growing import TreeCacheLayer
from ..cache.token_split import TokenSplit
from ..masks import KeyRanges

# What a layer holds at a time of the states of all ranks, or of their keys and values.
_MAX_PIECE_BYTES = 32 << 20
# Keys and values begin at a multiple of so many bytes, as the kernels for CUDA need it.
_ALIGNMENT = 16

# Some heads and tokens of this rank's queries, and their states over each rank's keys:
# o [world_size, batch, heads, tokens, head_dim_v] and lse.
_Piece = tuple[slice, slice, Tensor, Tensor]


def attend_split(
    split: TokenSplit,
    query: Tensor,
    layer: TreeCacheLayer,
    ranges: KeyRanges,
    out_dtype: torch.dtype,
    keywords: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's tokens `[batch, num_heads_q, tokens, head_dim]` to all ranks' keys:
    `o` in `out_dtype` and the float32 `lse`."""
    shape = (*query.shape[:3], layer.head_dim_v)
    o = query.new_empty(shape, dtype=out_dtype)
    lse = query.new_empty(shape[:3], dtype=torch.float32)
    way = _pass_queries if _passes_queries(split, query, layer, ranges) else _pass_keys
    if split.is_idle:  # and helps the other ranks with their tokens
        for _ in way(split, query[:, :, :0], layer, ranges, keywords):
            pass
        return o.zero_(), lse.zero_()
    for heads, tokens, o_parts, lse_parts in way(split, query, layer, ranges, keywords):
        merged = merge_states(o_parts, lse_parts, out_dtype=out_dtype)
        o[:, heads, tokens], lse[:, heads, tokens] = merged
    return o, lse


def _passes_queries(
    split: TokenSplit, query: Tensor, layer: TreeCacheLayer, ranges: KeyRanges
) -> bool:
    """True where pass-Q sends less than pass-KV, by the bytes of one sequence to one rank."""
    _, num_heads_q, _, head_dim = query.shape
    state_bytes = 4 * (layer.head_dim_v + 1)
    query_bytes = split.length * num_heads_q * (head_dim * query.itemsize + state_bytes)
    return query_bytes < (split.end - _first(split, ranges)) * _bytes_per_slot(layer.buffers())


def _first(split: TokenSplit, ranges: KeyRanges) -> int:
    """The first slot that any query sees, or the chunk's end where that is beyond it."""
    return min(ranges.first, split.end)  # a mask for slots to come may hide the whole chunk


def _pass_queries(
    split: TokenSplit,
    query: Tensor,
    layer: TreeCacheLayer,
    ranges: KeyRanges,
    keywords: Mapping[str, Any],
) -> Iterator[_Piece]:
    rank, ranks = split.shard.rank, range(split.shard.world_size)
    others = [r for r in ranks if r != rank]
    batch, num_heads_q, _, head_dim = query.shape
    head_dim_v = layer.head_dim_v
    keys, values, scales = layer.operands(layer.buffers())
    held = ranges.local(split.shard.layout, rank, layer.dropped)
    step = _tokens_of_piece(split, query, layer)
    for begin in range(0, max(map(len, split.tokens)), step):
        tokens = slice(begin, begin + step)
        counts = [len(indices[tokens]) for indices in split.tokens]
        own = query[:, :, tokens].contiguous()
        queries = {
            r: split.room(f"queries of {r}", (batch, num_heads_q, counts[r], head_dim), own.dtype)
            for r in others
        }
        split.exchange(queries, dict.fromkeys(others, own))
        layouts = [StateLayout((batch, num_heads_q, n), head_dim_v, torch.float32) for n in counts]
        parts = split.room("states", (len(ranks), layouts[rank].num_bytes), torch.uint8)
        sent = {
            r: split.room(f"states of {r}", (layouts[r].num_bytes,), torch.uint8) for r in others
        }
        for r in ranks:
            lean_decode(
                queries.get(r, own),
                keys,
                values,
                held[:, split.tokens[r][tokens]],
                out=layouts[r].views(sent.get(r, parts[rank])),
                **scales,
                **keywords,
            )
        split.exchange({r: parts[r] for r in others}, sent)
        yield slice(None), tokens, *layouts[rank].views(parts)


def _pass_keys(
    split: TokenSplit,
    query: Tensor,
    layer: TreeCacheLayer,
    ranges: KeyRanges,
    keywords: Mapping[str, Any],
) -> Iterator[_Piece]:
    shard, rank, ranks = split.shard, split.shard.rank, range(split.shard.world_size)
    batch, num_heads_q, num_tokens, _ = query.shape
    num_heads_kv, head_dim_v = layer.key_rows.shape[1], layer.head_dim_v
    buffers = layer.buffers()
    # The local slots of each rank that any query sees.
    first = _first(split, ranges)
    begins = [shard.layout.count(r, first) for r in ranks]
    counts = [shard.layout.count(r, split.end) - begins[r] for r in ranks]
    head_bytes = batch * (split.end - first) * _bytes_per_slot(buffers) // num_heads_kv
    head_step = max(1, _MAX_PIECE_BYTES // max(1, head_bytes))
    token_step = _tokens_of_piece(split, query, layer)
    group = num_heads_q // num_heads_kv
    for head in range(0, num_heads_kv, head_step):
        parts = {name: x[:, head : head + head_step] for name, x in buffers.items()}
        heads = slice(head * group, min(head + head_step, num_heads_kv) * group)
        sizes = [sum(_num_bytes(x, count) for x in parts.values()) for count in counts]
        gathered = {r: split.room(f"keys of {r}", (sizes[r],), torch.uint8) for r in ranks}
        for name, x in _views(gathered[rank], parts, counts[rank]).items():
            x.copy_(parts[name].narrow(2, begins[rank] - layer.dropped, counts[rank]))
        others = {r: x for r, x in gathered.items() if r != rank}
        split.exchange(others, dict.fromkeys(others, gathered[rank]))
        operands = {r: layer.operands(_views(x, parts, counts[r])) for r, x in gathered.items()}
        for token in range(0, num_tokens, token_step):
            tokens = slice(token, token + token_step)
            q = query[:, heads, tokens]
            layout = StateLayout(tuple(q.shape[:3]), head_dim_v, torch.float32)
            states = split.room("states", (len(ranks), layout.num_bytes), torch.uint8)
            o_parts, lse_parts = layout.views(states)
            for r in ranks:
                keys, values, scales = operands[r]
                lean_decode(
                    q,
                    keys,
                    values,
                    ranges.local(shard.layout, r, begins[r])[:, split.tokens[rank][tokens]],
                    out=(o_parts[r], lse_parts[r]),
                    **scales,
                    **keywords,
                )
            yield heads, tokens, o_parts, lse_parts


def _views(block: Tensor, buffers: Mapping[str, Tensor], num_slots: int) -> dict[str, Tensor]:
    """Parts of a block of bytes with room for so many slots of each buffer."""
    views = {}
    for name, x in buffers.items():
        shape = (*x.shape[:2], num_slots, *x.shape[3:])
        views[name] = block[: math.prod(shape) * x.itemsize].view(x.dtype).view(shape)
        block = block[_num_bytes(x, num_slots) :]
    return views


def _num_bytes(x: Tensor, num_slots: int) -> int:
    """Size in bytes of so many slots of a buffer, up to where another one may begin."""
    num_bytes = x.itemsize * num_slots * math.prod((*x.shape[:2], *x.shape[3:]))
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _bytes_per_slot(buffers: Mapping[str, Tensor]) -> int:
    """Size in bytes of the keys and values of one sequence in one slot."""
    return sum(x.itemsize * x.shape[1] * math.prod(x.shape[3:]) for x in buffers.values())


def _tokens_of_piece(split: TokenSplit, query: Tensor, layer: TreeCacheLayer) -> int:
    """Number of a rank's tokens in a piece: states over all ranks' keys are sent piece by piece."""
    row_bytes = 4 * (layer.head_dim_v + 1)
    num_bytes = split.shard.world_size * query.shape[0] * query.shape[1] * row_bytes
    return max(1, _MAX_PIECE_BYTES // num_bytes)
