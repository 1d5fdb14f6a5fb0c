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

from ..exchange import Communicator, State, StateLayout, get_communicator
from ..ops import check_q_k_v, lean_decode, merge_states, ranges_without_keys
from ..options import AttentionOptions, queries_of, takes_attention_options
from .ring import aligned, signature_of


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

    Equivalent PyTorch: as of `tree_decode`.

    The sequences, or the key heads if there are more of them, are split over the ranks. In each of
    `world_size - 1` hops a rank attends to its own keys with the part that it has, while the next
    part's queries and state so far are on their way; then it merges and passes on. An all-gather
    gives every rank all results. Bytes do not depend on the context; hops are as many as ranks.

    Args:
        timeout: seconds in which each hop returns or raises, by default the communicator's.
        Everything else, and what is raised: as in `tree_decode`. Ranges of keys stay with the keys:
            only queries and states travel.

    Returns:
        o and lse as `tree_decode` does, with the same bits on every rank, but other ones than
        `tree_decode`'s: the states of a part are merged in the order of its travel.

    Source: Context Parallelism for Scalable Million-Token Inference (arXiv:2411.01783), pass-Q.
    """
    comm = get_communicator(group)
    with comm.begin("ring_pass_q_decode", timeout) as call:
        check_q_k_v("ring_pass_q_decode", q, k_local, v_local, options)
        if comm.world_size == 1:
            return lean_decode(q, k_local, v_local, key_ranges, **options)
        state = comm.state((*q.shape[:3], v_local.shape[3]), q.device)
        no_keys = ranges_without_keys(q, key_ranges)
        # Refuses bad arguments before anything is sent; without keys it costs no more than that.
        lean_decode(q, k_local, v_local, no_keys, out=(state.o, state.lse), **options)

        def attend(part: _Part, queries: Tensor, out: tuple[Tensor, Tensor]) -> None:
            k, v, ranges, changed = part.of(k_local, v_local, key_ranges, options)
            lean_decode(queries, k, v, ranges, out=out, **changed)

        ring = _PassQ(comm, state, q, k_local.shape[1], call.seconds)
        shape, dtype, device = q.shape, q.dtype, q.device  # as a door shall not keep q
        return call.run(
            signature_of(q, v_local, options),
            lambda deadline: ring.run(q, attend),
            device,
            door=lambda deadline: ring.run(
                torch.empty(shape, dtype=dtype, device=device), lambda *arguments: None
            ),
            queries=queries_of(q, options),
        )


# Attends to this rank's keys with a part's queries, into the part's (o, lse).
_Attend = Callable[["_Part", Tensor, tuple[Tensor, Tensor]], object]


class _PassQ:
    """One pass of all parts around the ranks, in memory of the communicator."""

    def __init__(
        self, comm: Communicator, state: State, q: Tensor, num_heads_kv: int, seconds: float
    ) -> None:
        self.link, self.state, self.seconds = comm.link, state, seconds
        self.device, self.transport = q.device, comm.link.transport_device(q.device)
        self.dtype, head_dim = q.dtype, state.layout.head_dim
        self.parts = _deal(q, num_heads_kv, comm.world_size)
        self.shapes = [part.shape(q) for part in self.parts]
        self.states = [StateLayout(shape[:3], head_dim, torch.float32) for shape in self.shapes]
        self.results = [replace(layout, dtype=q.dtype) for layout in self.states]
        state_bytes = aligned(max(layout.num_bytes for layout in self.states))
        query_bytes = max(map(math.prod, self.shapes)) * q.dtype.itemsize
        # Two, as one is received while the other is read and sent.
        self.travelling = [self.room(f"queries {i}", query_bytes, self.transport) for i in range(2)]
        self.leaving = self.room("leaving", state_bytes, self.transport)
        self.arriving = self.room("arriving", state_bytes, self.transport)
        self.merged = self.room("merged", state_bytes, q.device)
        self.pair = self.room("pair", 2 * state_bytes, q.device).view(2, state_bytes)
        result_bytes = max(layout.message_bytes for layout in self.results)
        self.result = self.room("result", result_bytes, q.device)

    def room(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        return self.state.arena.bytes(f"{name} of a part", num_bytes, device)

    def queries(self, index: int, hop: int) -> Tensor:
        """Memory of a part's queries, on the way to this rank or from it."""
        num_bytes = math.prod(self.shapes[index]) * self.dtype.itemsize
        return self.travelling[hop % 2][:num_bytes].view(self.dtype).view(self.shapes[index])

    def run(self, q: Tensor, attend: _Attend) -> tuple[Tensor, Tensor]:
        """All results, on every rank; each hop has `seconds`."""
        o, lse = q.new_empty(self.state.o.shape), torch.empty_like(self.state.lse)
        if self.state.layout.num_bytes == 0:
            return o, lse
        link, world_size = self.link, self.link.world_size
        self.queries(link.rank, 0).copy_(q[self.parts[link.rank].place])
        coming: list[dist.Work] = []
        for hop in range(world_size):
            index = (link.rank - hop) % world_size  # of the part that is here
            here = self.queries(index, hop)
            deadline = time.monotonic() + self.seconds
            link.finish(coming, self.transport, deadline)
            if hop < world_size - 1:
                following = self.queries(index - 1, hop + 1)
                coming = self.shift(following.flatten(), here.flatten(), tag=0)
            if hop == 0:
                self.attend(attend, index, here, self.states[index].views(self.merged))
            else:
                self.merge_in(attend, index, here, deadline, is_last=hop == world_size - 1)
        gathered = self.room("results", world_size * self.result.numel(), q.device)
        gathered = gathered.view(world_size, -1)
        gather = link.gather(gathered, self.result, q.device)
        gather.run(time.monotonic() + self.seconds)
        for last_rank, message in enumerate(gathered):
            index = (last_rank + 1) % world_size  # of the part that ended its journey there
            place = self.parts[index].place
            o[place], lse[place] = self.results[index].views(message)
        return o, lse

    def attend(
        self, attend: _Attend, index: int, queries: Tensor, out: tuple[Tensor, Tensor]
    ) -> None:
        if self.states[index].num_bytes:
            attend(self.parts[index], queries.to(self.device), out)

    def merge_in(
        self, attend: _Attend, index: int, queries: Tensor, deadline: float, is_last: bool
    ) -> None:
        """Passes the last part's state on, and merges this rank's into the one that comes."""
        size = self.states[index].num_bytes
        size_sent = self.states[(index + 1) % len(self.states)].num_bytes
        self.leaving[:size_sent].copy_(self.merged[:size_sent])
        works = self.shift(self.arriving[:size], self.leaving[:size_sent], tag=1)
        both = self.pair[:, :size]
        self.attend(attend, index, queries, self.states[index].views(both[1]))
        self.link.finish(works, self.transport, deadline)
        both[0].copy_(self.arriving[:size])
        layout, memory = self.states[index], self.merged
        if is_last:
            layout, memory = self.results[index], self.result
        if size:
            merge_states(*self.states[index].views(both), out=layout.views(memory))

    def shift(self, receive: Tensor, send: Tensor, tag: int) -> list[dist.Work]:
        some = ([x] if x.numel() else [] for x in (receive, send))
        return self.link.start_shift(next(some), next(some), tag)


@dataclass(frozen=True)
class _Part:
    """Some sequences, or some key heads with their query heads, of all."""

    sequences: slice
    heads_kv: slice
    heads_q: slice

    @property
    def place(self) -> tuple[slice, slice]:
        """Index of the part in `[batch, num_heads_q, ...]`."""
        return self.sequences, self.heads_q

    def shape(self, q: Tensor) -> tuple[int, int, int, int]:
        batch, num_heads, seqlen_q, head_dim = q.shape
        counts = (len(range(n)[s]) for n, s in ((batch, self.sequences), (num_heads, self.heads_q)))
        return (*counts, seqlen_q, head_dim)  # type: ignore[return-value]

    def of(
        self, k: Tensor, v: Tensor, key_ranges: Tensor | None, options: AttentionOptions
    ) -> tuple[Tensor, Tensor, Tensor | None, AttentionOptions]:
        """The part's arguments of `lean_decode`, of those of the whole."""

        def of_sequences(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[self.sequences]

        table, slopes = of_sequences(options.get("page_table")), options.get("alibi_slopes")
        rows = self.sequences if table is None else _ALL  # pages belong to no sequence

        def of_keys(x: _OptionalTensor) -> _OptionalTensor:
            return None if x is None else x[rows, self.heads_kv]

        if table is not None and table.dim() == 3:
            table = table[:, self.heads_kv]
        changed: AttentionOptions = {
            **options,
            "alibi_slopes": None if slopes is None else slopes[self.heads_q],
            "query_positions": of_sequences(options.get("query_positions")),
            "page_table": table,
            "k_scale": of_keys(options.get("k_scale")),
            "v_scale": of_keys(options.get("v_scale")),
        }
        return of_keys(k), of_keys(v), of_sequences(key_ranges), changed


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
