# SPDX-License-Identifier: BSD-3-Clause
"""Ring decoding the other way round: queries and their states travel, keys and values stay."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from ..exchange import Arena, Communicator, StateLayout, get_communicator
from ..ops import (
    AttentionOptions,
    check_option_names,
    check_tensors,
    lean_decode,
    merge_states,
    queries_of,
    ranges_without_keys,
    takes_attention_options,
)
from .common import aligned, signature_of


@takes_attention_options
def ring_pass_q_decode(
    q: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    key_ranges: Tensor | None = None,
    *,
    group: dist.ProcessGroup | Communicator | None = None,
    timeout: float | timedelta | None = None,
    **options: Unpack[AttentionOptions],
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
        TypeError: q, k_local or v_local is no tensor, or there is no such keyword argument.
        ExchangeError: a rank was lost, stalled, or called with other arguments.

    Source: Context Parallelism for Scalable Million-Token Inference (arXiv:2411.01783), pass-Q.
    """
    comm = get_communicator(group)

    def attend(part: "_Part", queries: Tensor, out: tuple[Tensor, Tensor]) -> None:
        def of_sequences(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[part.sequences]

        table, slopes = of_sequences(options.get("page_table")), options.get("alibi_slopes")
        rows = part.sequences if table is None else _ALL  # pages belong to no sequence

        def of_keys(x: _OptionalTensor) -> _OptionalTensor:
            return None if x is None else x[rows, part.heads_kv]

        if table is not None and table.dim() == 3:
            table = table[:, part.heads_kv]
        changed: AttentionOptions = {
            **options,
            "alibi_slopes": None if slopes is None else slopes[part.heads_q],
            "query_positions": of_sequences(options.get("query_positions")),
            "page_table": table,
            "k_scale": of_keys(options.get("k_scale")),
            "v_scale": of_keys(options.get("v_scale")),
        }
        k, v = of_keys(k_local), of_keys(v_local)
        lean_decode(queries, k, v, of_sequences(key_ranges), out=out, **changed)

    with comm.before_call():
        check_tensors("ring_pass_q_decode", q=q, k_local=k_local, v_local=v_local)
        check_option_names("ring_pass_q_decode", options)
        seconds = comm.seconds_of("ring_pass_q_decode", timeout)
        # lean_decode refuses tensors of other dimensions.
        if comm.world_size == 1 or any(x.dim() != 4 for x in (q, k_local, v_local)):
            return lean_decode(q, k_local, v_local, key_ranges, **options)
    with comm.turn("ring_pass_q_decode"), comm.before_call():
        state = comm.state((*q.shape[:3], v_local.shape[3]), q.device)
        no_keys = ranges_without_keys(q, key_ranges)
        # Refuses bad arguments before anything is sent; without keys it costs no more than that.
        lean_decode(q, k_local, v_local, no_keys, out=(state.o, state.lse), **options)

    # The door, which is kept, shall not keep the arguments.
    shape, dtype, device = q.shape, q.dtype, q.device
    num_heads_kv, head_dim_v = k_local.shape[1], v_local.shape[3]

    def travel(q: Tensor, attend: Callable[..., object]) -> tuple[Tensor, Tensor]:
        link, rank, world_size = comm.link, comm.rank, comm.world_size
        o, lse = q.new_empty(state.o.shape), torch.empty_like(state.lse)
        if state.layout.num_bytes == 0:
            return o, lse
        transport = link.transport_device(q.device)
        parts = _deal(q, num_heads_kv, world_size)
        states = [StateLayout(p.shape(q)[:3], head_dim_v, torch.float32) for p in parts]
        results = [replace(layout, dtype=q.dtype) for layout in states]
        room = _Room(state.arena, max(layout.num_bytes for layout in states))
        query_bytes = max(math.prod(part.shape(q)) for part in parts) * q.dtype.itemsize
        # Two, as one is received while the other is read and sent.
        queries = [room.named(f"queries {i}", transport, query_bytes) for i in range(2)]
        leaving, arriving = (room.named(name, transport) for name in ("leaving", "arriving"))
        merged, pair = room.named("merged", q.device), room.pair(q.device)
        result = room.named("result", q.device, max(layout.message_bytes for layout in results))

        def queries_of(index: int, hop: int) -> Tensor:
            shape = parts[index].shape(q)
            memory = queries[hop % 2][: math.prod(shape) * q.dtype.itemsize]
            return memory.view(q.dtype).view(shape)

        def shift(receive: Tensor, send: Tensor, tag: int) -> list[dist.Work]:
            some = ([x] if x.numel() else [] for x in (receive, send))
            return link.start_shift(next(some), next(some), tag)

        own = parts[rank]
        queries_of(rank, 0).copy_(q[own.sequences, own.heads_q])
        coming: list[dist.Work] = []
        for hop in range(world_size):
            index = (rank - hop) % world_size  # of the part that is here
            state_here, here = states[index], queries_of(index, hop)
            size = state_here.num_bytes
            deadline = time.monotonic() + seconds
            link.finish(coming, transport, deadline)
            if hop < world_size - 1:
                coming = shift(queries_of(index - 1, hop + 1).flatten(), here.flatten(), tag=0)
            if hop == 0:
                if size:
                    attend(own, here.to(q.device), state_here.views(merged[:size]))
                continue
            size_sent = states[(index + 1) % world_size].num_bytes
            leaving[:size_sent].copy_(merged[:size_sent])
            works = shift(arriving[:size], leaving[:size_sent], tag=1)
            both = pair[:, :size]
            if size:
                attend(parts[index], here.to(q.device), state_here.views(both[1]))
            link.finish(works, transport, deadline)
            both[0].copy_(arriving[:size])
            if hop == world_size - 1:
                out = results[index].views(result[: results[index].num_bytes])
            else:
                out = state_here.views(merged[:size])
            if size:
                merge_states(*state_here.views(both), out=out)

        gathered = room.named("results", q.device, world_size * result.numel()).view(world_size, -1)
        link.gather(gathered, result, q.device).run(time.monotonic() + seconds)
        for last_rank, memory in enumerate(gathered):
            index = (last_rank + 1) % world_size  # of the part that ended its journey there
            place = parts[index].sequences, parts[index].heads_q
            o[place], lse[place] = results[index].views(memory[: results[index].num_bytes])
        return o, lse

    signature = signature_of(q, v_local, options)
    return comm.call(
        "ring_pass_q_decode",
        signature,
        lambda deadline: travel(q, attend),
        seconds,
        device,
        door=lambda deadline: travel(
            torch.empty(shape, dtype=dtype, device=device), lambda *arguments: None
        ),
        queries=queries_of(q, options),
    )


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
_OptionalTensor = TypeVar("_OptionalTensor", Tensor, Tensor | None)


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


@dataclass(frozen=True)
class _Room:
    """Memory for the states of parts."""

    arena: Arena
    state_bytes: int

    def named(self, name: str, device: torch.device, num_bytes: int | None = None) -> Tensor:
        num_bytes = self.state_bytes if num_bytes is None else num_bytes
        return self.arena.bytes(f"{name} of a part", num_bytes, device)

    def pair(self, device: torch.device) -> Tensor:
        """Two in a row, at addresses that any vector store can take."""
        stride = aligned(self.state_bytes)
        return self.named("pair", device, 2 * stride).view(2, stride)
