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

from ..exchange import Communicator, Link, Round, State, StateLayout, get_communicator
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
        options = check_q_k_v("ring_pass_q_decode", q, k_local, v_local, options)
        if comm.world_size == 1:
            return lean_decode(q, k_local, v_local, key_ranges, **options)
        state = comm.state((*q.shape[:3], v_local.shape[3]), q.device)
        no_keys = ranges_without_keys(q, key_ranges)
        # Refuses bad arguments before anything is sent; without keys it costs no more than that.
        lean_decode(q, k_local, v_local, no_keys, out=(state.o, state.lse), **options)

        def attend(part: _Part, queries: Tensor, out: _State) -> None:
            k, v, ranges, changed = part.of(k_local, v_local, key_ranges, options)
            lean_decode(queries, k, v, ranges, out=out, **changed)

        # A door shall keep neither q, nor memory, nor the call.
        shape, dtype, device, seconds = q.shape, q.dtype, q.device, call.seconds
        num_heads_kv, head_dim_v = k_local.shape[1], v_local.shape[3]

        def again(deadline: float) -> None:
            nothing = torch.empty(shape, dtype=dtype, device=device)
            with comm.lend((*shape[:3], head_dim_v), device) as there:
                ring = _ring_of(comm, there, nothing, num_heads_kv)
                ring.run(nothing, _attend_to_nothing, lambda: deadline)

        ring = _ring_of(comm, state, q, num_heads_kv)
        return call.run(
            signature_of(q, v_local, options),
            lambda deadline: ring.run(q, attend, lambda: time.monotonic() + seconds),
            device,
            replay=again,
            queries=queries_of(q, options),
        )


_State = tuple[Tensor, Tensor]  # o, lse
# Attends to this rank's keys with a part's queries, into the part's state.
_Attend = Callable[["_Part", Tensor, _State], object]


def _ring_of(comm: Communicator, state: State, q: Tensor, num_heads_kv: int) -> "_PassQ":
    """The ring of calls of this kind, made once."""
    kind = ring_pass_q_decode, q.shape, q.dtype, num_heads_kv
    ring: _PassQ | None = state.prepared.get(kind)
    if ring is None:
        # Views that are made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            ring = state.prepared[kind] = _PassQ(comm.link, state, q, num_heads_kv)
    return ring


def _attend_to_nothing(part: "_Part", queries: Tensor, out: _State) -> None:
    """For a door, whose results nobody reads."""


@dataclass(frozen=True)
class _Packet:
    """A message to the next rank: a part's queries, and behind them the state so far of the part
    whose queries went before."""

    index: int  # of the part whose queries it has
    queries: Tensor
    state: _State
    query_bytes: Tensor
    state_bytes: Tensor
    bytes: Tensor


class _PassQ:
    """The journey of all parts around the ranks, in memory of the communicator.

    Packet `hop` leaves in that hop, in which packet `hop + 1` arrives. Packet 0 has no state yet,
    and the last one, which ends the journey, no queries.
    """

    def __init__(self, link: Link, state: State, q: Tensor, num_heads_kv: int) -> None:
        self.link, self.state, head_dim = link, state, state.layout.head_dim
        self.parts = _deal(q, num_heads_kv, link.world_size)
        self.shapes = [part.shape(q) for part in self.parts]
        self.dtype = q.dtype
        self.states = [StateLayout(shape[:3], head_dim, torch.float32) for shape in self.shapes]
        self.results = [replace(layout, dtype=q.dtype) for layout in self.states]
        state_bytes = aligned(max(layout.num_bytes for layout in self.states))
        query_bytes = aligned(max(map(math.prod, self.shapes)) * q.dtype.itemsize)
        # Two, as one is received while the other is read and sent.
        self.memory = [self.room(f"packet {i}", query_bytes + state_bytes) for i in range(2)]
        self.packets = [self.packet(hop) for hop in range(link.world_size + 1)]
        self.pair = self.room("pair", 2 * state_bytes).view(2, state_bytes)
        self.result = self.room("result", max(layout.message_bytes for layout in self.results))
        gathered = self.room("results", link.world_size * self.result.numel())
        self.gathered = gathered.view(link.world_size, -1)
        self.rounds: list[Round] = []

    def room(self, name: str, num_bytes: int) -> Tensor:
        return self.state.buffer(f"{name} of pass-Q", num_bytes)

    def packet(self, hop: int) -> _Packet:
        index = (self.link.rank - hop) % self.link.world_size
        before = (index + 1) % self.link.world_size
        num_bytes = math.prod(self.shapes[index]) * self.dtype.itemsize
        begin, memory = aligned(num_bytes), self.memory[hop % 2]
        end = begin + self.states[before].num_bytes
        return _Packet(
            index,
            memory[:num_bytes].view(self.dtype).view(self.shapes[index]),
            self.states[before].views(memory[begin:end]),
            memory[:num_bytes],
            memory[begin:end],
            memory[:end],
        )

    def connect(self) -> list[Round]:
        """The hops' messages, and the gathering of results."""
        link, last = self.link, self.link.world_size - 1
        previous, following = (link.rank - 1) % link.world_size, (link.rank + 1) % link.world_size

        def travelling(packet: _Packet, hop: int) -> Tensor:
            if hop == 0:
                return packet.query_bytes
            return packet.state_bytes if hop == last else packet.bytes

        rounds = []
        for hop in range(link.world_size):
            arrives = travelling(self.packets[hop + 1], hop)
            leaves = travelling(self.packets[hop], hop)
            receive = {previous: arrives} if arrives.numel() else {}
            send = {following: leaves} if leaves.numel() else {}
            rounds.append(link.messages(receive, send, self.state.device, has_call_id=False))
        return [*rounds, link.gather(self.gathered, self.result, self.state.device)]

    def run(self, q: Tensor, attend: _Attend, deadline_of_hop: Callable[[], float]) -> _State:
        """All results, on every rank."""
        o, lse = q.new_empty(self.state.o.shape), torch.empty_like(self.state.lse)
        if self.state.layout.num_bytes == 0:
            return o, lse
        self.rounds = self.rounds or self.connect()
        *hops, gather = self.rounds
        self.packets[0].queries.copy_(q[self.parts[self.link.rank].place])
        for hop, round_of_hop in enumerate(hops):
            here, arriving = self.packets[hop], self.packets[hop + 1]
            layout = self.states[here.index]
            both = self.pair[:, : layout.num_bytes]
            out = layout.views(both[1]) if hop else arriving.state
            deadline = deadline_of_hop()
            round_of_hop.start(deadline)
            if layout.num_bytes:
                attend(self.parts[here.index], here.queries, out)
            round_of_hop.finish(deadline)
            if hop and layout.num_bytes:
                both[0].copy_(arriving.state_bytes)
                is_last = hop == len(hops) - 1
                result = self.results[here.index].views(self.result)
                merge_states(*layout.views(both), out=result if is_last else arriving.state)
        gather.run(deadline_of_hop())
        for last_rank, message in enumerate(self.gathered):
            index = (last_rank + 1) % len(self.parts)  # of the part that ended its journey there
            place = self.parts[index].place
            o[place], lse[place] = self.results[index].views(message)
        return o, lse


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
