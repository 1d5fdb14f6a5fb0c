# SPDX-License-Identifier: BSD-3-Clause
"""Ring decoding the other way round: queries and their states travel, keys and values stay."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Communicator, get_communicator
from .exchange.state import Message
from .ops import lean_decode, merge_states


def ring_pass_q_decode(
    q: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    key_ranges: Tensor | None = None,
    *,
    group: dist.ProcessGroup | Communicator | None = None,
    timeout: float | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_layout: Sequence[int] = (0, 1, 1),
    page_table: Tensor | None = None,
    num_workers: int = 0,
) -> tuple[Tensor, Tensor]:
    """`tree_decode` by a ring of queries: each rank begins with a part of them and passes it on.

    Equivalent PyTorch, with the shards of all ranks in one place::

        k, v = torch.cat(k_shards, 2), torch.cat(v_shards, 2)
        o, lse = lean_decode(q, k, v, key_ranges_of_the_whole, ...)

    The sequences, or the key heads if there are more of them, are dealt to the ranks. In each of
    `world_size - 1` hops a rank attends to its own keys with the part that it has, while the next
    part's queries and that part's state so far are on their way; then it merges and passes on. An
    all-gather gives everybody all results. Bytes do not depend on the context, hops do on the
    ranks.

    Args:
        timeout: seconds in which each hop returns or raises, 30 unless the communicator says
            otherwise.
        Everything else: as in `tree_decode`, local to this rank where it is there. Ranges of keys
            stay with the keys: only queries and states travel.

    Returns:
        o and lse as `tree_decode` does, with the same bits on every rank, which are not those of
        `tree_decode`: the states of a part are merged in the order of its travel.

    Raises:
        RuntimeError: `lean_decode` refuses an argument. Nothing was sent.
        ExchangeError: a rank was lost, stalled, or called with other arguments.

    Source: Context Parallelism for Scalable Million-Token Inference (arXiv:2411.01783), pass-Q.
    """
    comm = get_communicator(group)
    is_local = comm.world_size == 1 or q.dim() != 4 or v_local.dim() != 4

    def attend(
        part: "_Part", queries: Tensor, ranges: Tensor | None, out: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        def of_sequences(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[part.sequences]

        table = of_sequences(page_table)
        if table is not None and table.dim() == 3:
            table = table[:, part.heads_kv]
        rows = part.sequences if page_table is None else _ALL  # pages are of any sequence
        return lean_decode(
            queries,
            k_local[rows, part.heads_kv],
            v_local[rows, part.heads_kv],
            of_sequences(ranges),
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=None if alibi_slopes is None else alibi_slopes[part.heads_q],
            query_positions=of_sequences(query_positions),
            key_layout=key_layout,
            page_table=table,
            num_workers=num_workers,
            out=out,
        )

    try:
        if is_local:
            return attend(_EVERYTHING, q, key_ranges, None)
        state = comm.state((*q.shape[:3], v_local.shape[3]), q.device)
        no_keys = (
            q.new_zeros((q.shape[0], q.shape[2], 2), dtype=torch.int32)
            if key_ranges is None
            else torch.zeros_like(key_ranges)
        )
        # Refuses bad arguments before anything is sent; without keys it costs no more than that.
        attend(_EVERYTHING, q, no_keys, (state.o, state.lse))
    except BaseException:
        comm.give_up_call()
        raise

    seconds = comm.timeout if timeout is None else timeout

    def run(deadline: float) -> tuple[Tensor, Tensor]:
        link, rank, world_size = comm.link, comm.rank, comm.world_size
        transport = link.transport_device(q.device)
        parts = _deal(q, k_local.shape[1], world_size)
        head_dim_v = v_local.shape[3]
        states = [Message(part.shape(q)[:3], head_dim_v, torch.float32) for part in parts]
        results = [Message(message.shape, head_dim_v, q.dtype) for message in states]
        query_bytes = max(math.prod(part.shape(q)) for part in parts) * q.dtype.itemsize
        state_bytes = max(message.num_bytes for message in states)
        result_bytes = max(message.num_bytes for message in results)

        def buffer(name: str, num_bytes: int, device: torch.device) -> Tensor:
            return state.arena.bytes(f"{name} of a part", num_bytes, device)

        # Two, as one is received while the other is read and sent.
        queries = [buffer(f"queries {i}", query_bytes, transport) for i in range(2)]
        leaving = buffer("state, leaving", state_bytes, transport)
        arriving = buffer("state, arriving", state_bytes, transport)
        pair = buffer("pair of states", 2 * state_bytes, q.device).view(2, state_bytes)
        merged = buffer("merged state", state_bytes, q.device)
        result = buffer("result", result_bytes, q.device)
        gathered = buffer("results", world_size * result_bytes, q.device)

        def shift(receive: Tensor, send: Tensor, tag: int) -> list[dist.Work]:
            some = ([x] if x.numel() else [] for x in (receive, send))
            return link.start_shift(next(some), next(some), tag)

        def queries_of(index: int, hop: int) -> Tensor:
            shape = parts[index].shape(q)
            raw = queries[hop % 2][: math.prod(shape) * q.dtype.itemsize]
            return raw.view(q.dtype).view(shape)

        own = parts[rank]
        queries_of(rank, 0).copy_(q[own.sequences, own.heads_q])
        pending: list[dist.Work] = []
        for hop in range(world_size):
            index = (rank - hop) % world_size  # of the part that is here
            deadline = time.monotonic() + seconds
            link.finish(pending, transport, deadline)
            here = queries_of(index, hop)
            if hop < world_size - 1:
                following = queries_of(index - 1, hop + 1)
                pending = shift(_as_bytes(following), _as_bytes(here), tag=0)
            size = states[index].num_bytes
            if hop > 0:
                sent = states[(index + 1) % world_size].num_bytes
                leaving[:sent].copy_(merged[:sent])
                works = shift(arriving[:size], leaving[:sent], tag=1)
            both = pair[:, :size]
            out = states[index].views(merged[:size] if hop == 0 else both[1])
            if size:
                attend(parts[index], here.to(q.device), key_ranges, out)
            if hop > 0:
                link.finish(works, transport, deadline)
                both[0].copy_(arriving[:size])
                is_last = hop == world_size - 1
                target = results[index].views(result[: results[index].num_bytes])
                if size:
                    merged_views = target if is_last else states[index].views(merged[:size])
                    merge_states(*states[index].views(both), out=merged_views)

        link.all_gather(gathered, result, time.monotonic() + seconds)
        o = q.new_empty(state.o.shape)
        lse = torch.empty_like(state.lse)
        for from_rank, message in enumerate(gathered.view(world_size, -1)):
            index = (from_rank + 1) % world_size  # of the part that ended its journey there
            part, layout = parts[index], results[index]
            o_part, lse_part = layout.views(message[: layout.num_bytes])
            o[part.sequences, part.heads_q] = o_part
            lse[part.sequences, part.heads_q] = lse_part
        return o, lse

    signature = (
        ("call", "ring_pass_q_decode"),
        ("batch, num_heads_q, seqlen_q, head_dim", q.shape),
        ("dtype", q.dtype),
        ("device", q.device.type),
        ("num_heads_kv, head_dim of v", (k_local.shape[1], v_local.shape[3])),
        ("softmax_scale", softmax_scale),
        ("softcap", softcap),
        ("alibi_slopes", alibi_slopes is not None),
    )
    return comm.call(signature, run, timeout)


@dataclass(frozen=True)
class _Part:
    """Some sequences, or some key heads with their query heads, of all."""

    sequences: slice
    heads_kv: slice
    heads_q: slice

    def shape(self, q: Tensor) -> tuple[int, int, int, int]:
        batch, num_heads, seqlen_q, head_dim = q.shape
        counts = (len(range(n)[s]) for n, s in ((batch, self.sequences), (num_heads, self.heads_q)))
        return (*counts, seqlen_q, head_dim)  # type: ignore[return-value]


_ALL = slice(None)
_EVERYTHING = _Part(_ALL, _ALL, _ALL)


def _deal(q: Tensor, num_heads_kv: int, world_size: int) -> list[_Part]:
    """A part for each rank, as `torch.chunk` deals; the last ones may be empty."""
    batch, num_heads_q = q.shape[:2]
    count = max(batch, num_heads_kv)
    size = -(-count // world_size)
    bounds = [(min(i * size, count), min((i + 1) * size, count)) for i in range(world_size)]
    if batch >= num_heads_kv:
        return [_Part(slice(begin, end), _ALL, _ALL) for begin, end in bounds]
    group = num_heads_q // num_heads_kv
    return [_Part(_ALL, slice(b, e), slice(b * group, e * group)) for b, e in bounds]


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
