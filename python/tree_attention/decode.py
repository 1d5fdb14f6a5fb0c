# SPDX-License-Identifier: BSD-3-Clause
"""Tree decoding: every rank attends to the keys it holds, then the partial states are merged."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Communicator, Options, check_options, get_communicator
from .exchange.chunks import Attention, Chunks, attention_seconds, speed_of
from .exchange.state import Message
from .ops import lean_decode

# Which axis of an argument of lean_decode runs over sequences, and which over heads.
_AXES = {
    "q": (0, 1),
    "k": (0, 1),
    "v": (0, 1),
    "key_ranges": (0, None),
    "alibi_slopes": (None, 0),
    "query_positions": (0, None),
    "page_table": (0, 1),
}


def tree_decode(
    q: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    key_ranges: Tensor | None = None,
    *,
    group: dist.ProcessGroup | Communicator | None = None,
    strategy: str = "auto",
    payload_dtype: torch.dtype = torch.float32,
    head_sharded: bool = False,
    overlap: bool | None = None,
    explain: bool = False,
    timeout: float | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_layout: Sequence[int] = (0, 1, 1),
    page_table: Tensor | None = None,
    num_workers: int = 0,
) -> tuple[Tensor, Tensor]:
    """Exact attention over keys and values that are split over ranks and stay where they are.

    Equivalent PyTorch, with the shards of all ranks in one place::

        k, v = torch.cat(k_shards, 2), torch.cat(v_shards, 2)
        o, lse = lean_decode(q, k, v, key_ranges_of_the_whole, ...)

    Collective: all ranks call with the same q and the same options, each with its own shard.

    Args:
        q: `[batch, num_heads_q, seqlen_q, head_dim]`, the same on every rank.
        k_local, v_local: this rank's keys and values; shards may differ in length and be empty.
        key_ranges: int32 `[batch, seqlen_q, 2]` in *local* keys, as `ShardLayout.local_range` gives
            them. None: all keys of the shard.
        group: process group or `Communicator`, default the world. Without torch.distributed this
            is `lean_decode`.
        strategy: "auto" or one of `strategies()`. "auto" takes the one that is predicted to be
            fastest, among those that give the same bits.
        payload_dtype: of the `o` that ranks send each other: float32, or bfloat16 to send half as
            much and round every rank's part once.
        head_sharded: return to each rank the heads `torch.chunk` would give it, for models whose
            next layer is split by heads.
        overlap: exchange a part of the sequences, or heads, while the next part computes. None:
            where that is predicted to be faster, the same on all ranks. The bits are the same.
        explain: print on rank 0 what each strategy was predicted to take, and overlapping.
        timeout: seconds in which an exchange returns or raises, 30 unless the communicator says
            otherwise. Overlapped, each part has as many.
        key_layout: of this rank's shard, as `ShardLayout.key_layout` gives it.
        softmax_scale, softcap, alibi_slopes, query_positions, page_table, num_workers: as in
            `lean_decode`; page_table is this rank's.

    Returns:
        o: `[batch, num_heads_q, seqlen_q, head_dim]` in q's dtype, merged in float32 and rounded
        once. lse: float32 `[batch, num_heads_q, seqlen_q]`, natural logarithm. Both with the same
        bits on every rank; `(0, -inf)` for a query that sees no key on any rank. With head_sharded
        this rank's heads of them.

    Raises:
        ValueError: no such strategy, or options it has not.
        RuntimeError: `lean_decode` refuses an argument. Nothing was sent; or, if it is a page id
            of a later part, overlapped, this is a lost rank.
        ExchangeError: a rank was lost, stalled, or called with other arguments.

    Source: Tree Attention (arXiv:2408.04093), Algorithm 3.
    """
    arguments = {
        "q": q,
        "k": k_local,
        "v": v_local,
        "key_ranges": key_ranges,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "query_positions": query_positions,
        "key_layout": key_layout,
        "page_table": page_table,
        "num_workers": num_workers,
    }
    options = Options(strategy, q.dtype, payload_dtype, head_sharded)
    comm = get_communicator(group)
    return decode_shard(comm, arguments, options, overlap, explain, timeout)


def decode_shard(
    comm: Communicator,
    arguments: dict[str, Any],
    options: Options,
    overlap: bool | None = None,
    explain: bool = False,
    timeout: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`tree_decode` with the arguments of `lean_decode` by name, and any dtype of the result."""
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    arguments = dict.fromkeys(_AXES) | arguments
    # lean_decode refuses tensors of other dimensions.
    is_local = comm.world_size == 1 or any(x.dim() != 4 for x in (q, k, v))
    with comm.before_call():
        check_options(options.strategy, options.payload_dtype, options.head_sharded)
        if is_local:
            return lean_decode(**arguments, out_dtype=options.out_dtype)
        attention = _attention(arguments, options)
    signature = (
        ("call", "tree_decode"),
        ("num_heads_kv", k.shape[1]),
        ("head_dim", q.shape[3]),
        ("softmax_scale", arguments.get("softmax_scale")),
        ("softcap", arguments.get("softcap", 0.0)),
        ("alibi_slopes", arguments["alibi_slopes"] is not None),
    )
    return comm.attend(
        attention,
        (*q.shape[:3], v.shape[3]),
        q.device,
        options,
        overlap=overlap,
        explain=explain,
        timeout=timeout,
        signature=signature,
    )


def _attention(arguments: dict[str, Any], options: Options) -> Attention:
    """What this rank computes, at once or in the parts that may be exchanged."""
    q, k, v, table = (arguments[name] for name in ("q", "k", "v", "page_table"))
    message = Message(tuple(q.shape[:3]), v.shape[3], options.payload_dtype)
    chunks = Chunks.of(message, k.shape[1])
    num_keys = k.shape[2] if table is None else k.shape[2] * table.shape[-1:].numel()
    seconds = attention_seconds(q, k, v, num_keys)
    axes = _chunked_axes(arguments, chunks)
    # Also where chunks do not fit, which is the caller's mistake: lean_decode tells of it.
    is_chunked = axes is not None and seconds >= len(chunks) * speed_of(q.device).min_seconds

    def run(index: int | None, out: tuple[Tensor, Tensor]) -> None:
        changed = {}
        if index is not None and axes is not None:
            changed = {name: chunks.part(arguments[name], index, axes[name]) for name in axes}
        lean_decode(**(arguments | changed), out=out)

    return Attention(run, chunks, is_chunked, seconds)


def _chunked_axes(arguments: dict[str, Any], chunks: Chunks) -> dict[str, int] | None:
    """Along which axis of which arguments chunks run, if all are as long as they should be."""
    batch, num_heads_q = arguments["q"].shape[:2]
    num_heads_kv = arguments["k"].shape[1]
    lengths = {"q": num_heads_q, "alibi_slopes": num_heads_q}
    table = arguments["page_table"]
    result = {}
    for name, axes in _AXES.items():
        axis, x = axes[chunks.axis], arguments[name]
        if axis is None or x is None:
            continue
        if table is not None and (
            (name in ("k", "v") and chunks.axis == 0)  # pages are nobody's
            or (name == "page_table" and chunks.axis == 1 and x.dim() == 2)  # and of all heads
        ):
            continue
        length = batch if chunks.axis == 0 else lengths.get(name, num_heads_kv)
        if x.dim() <= axis or x.shape[axis] != length:
            return None
        result[name] = axis
    return result if len(chunks) > 1 else None
