# SPDX-License-Identifier: BSD-3-Clause
"""Ring attention, which tree decoding is compared with: every rank talks to its two neighbours.

In `ring_decode` keys and values travel, in `ring_pass_q_decode` queries and their states.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from ._loader import load
from .decode_call import DecodeCall
from .exchange import (
    MAX_KEPT_BYTES,
    Communicator,
    Link,
    Round,
    Signature,
    State,
    StateLayout,
    check_values,
    get_communicator,
)
from .ops import lean_decode, merge_states
from .options import (
    ARGUMENTS,
    AttentionOptions,
    fields_of_options,
    part_of,
    takes_attention_options,
)

_State = tuple[Tensor, Tensor]  # o, lse
# Tensors in received memory begin at addresses that any vector load or store can take.
_ALIGNMENT = 64


@takes_attention_options
def ring_decode(
    q: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    key_ranges: Tensor | None = None,
    *,
    group: dist.ProcessGroup | Communicator | None = None,
    timeout: float | timedelta | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]:
    """`tree_decode` by ring attention: the shards travel, in `world_size - 1` hops.

    Equivalent PyTorch: as of `tree_decode`, with the same bits, as states are merged in rank order.

    While a rank attends to one shard, it passes that shard on and receives the next: with these two
    buffers each holds its own shard and two more, one more than Eq. 8 of Tree Attention counts. Key
    heads are not expanded to query heads. With page_table, all pages travel.

    Args:
        timeout: seconds, or a `datetime.timedelta`, in which each hop returns or raises, 30 unless
            the communicator says otherwise.
        Everything else, what is returned and what is raised: as in `tree_decode`.

    For example::

        import torch
        from tree_attention import ring_decode

        q = torch.randn(1, 8, 1, 64)  # [batch, num_heads_q, seqlen_q, head_dim]
        k, v = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)  # 100 keys of 2 kv heads
        o, lse = ring_decode(q, k, v)  # each of several ranks gives its own keys and values
        print(o.shape, lse.shape)  # torch.Size([1, 8, 1, 64]) torch.Size([1, 8, 1])

    Source: Ring Attention (arXiv:2310.01889), as the baseline of Tree Attention section 6.
    """
    comm = get_communicator(group)
    with comm.begin("ring_decode", timeout) as call:
        decode = DecodeCall("ring_decode", q, k_local, v_local, key_ranges, options)
        if comm.world_size == 1:
            return decode.attend()
        _check(decode)
        state = comm.state(decode.shape, q.device)
        facts = _numbers_of(decode)

        def run(deadline: float) -> _State:
            facts_by_rank = _gather_facts(comm.link, facts, deadline)
            comm.link.check_call_id()
            return _pass_keys(comm.link, state, decode, facts_by_rank, call.seconds)

        # Every rank attends to every shard itself.
        instruction_set = load().cpu_instruction_set() if q.device.type == "cpu" else None
        return call.run(
            (*_signature_of(decode), ("instruction set", instruction_set)),
            run,
            q.device,
            queries=decode.queries,
        )


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

    For example::

        import torch
        from tree_attention import ring_pass_q_decode

        q = torch.randn(1, 8, 1, 64)  # [batch, num_heads_q, seqlen_q, head_dim]
        k, v = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)  # 100 keys of 2 kv heads
        o, lse = ring_pass_q_decode(q, k, v)  # each of several ranks gives its own keys and values
        print(o.shape, lse.shape)  # torch.Size([1, 8, 1, 64]) torch.Size([1, 8, 1])

    Source: Context Parallelism for Scalable Million-Token Inference (arXiv:2411.01783), pass-Q.
    """
    comm = get_communicator(group)
    with comm.begin("ring_pass_q_decode", timeout) as call:
        decode = DecodeCall("ring_pass_q_decode", q, k_local, v_local, key_ranges, options)
        if comm.world_size == 1:
            return decode.attend()
        _check(decode)
        state = comm.state(decode.shape, q.device)

        def attend(part: Part, queries: Tensor, out: _State) -> None:
            lean_decode(**{**part_of(decode.arguments, *part), "q": queries}, out=out)

        ring = _ring_of(comm.link, state, q, k_local.shape[1])
        return call.run(
            _signature_of(decode),
            lambda deadline: ring.run(q, attend, lambda: time.monotonic() + call.seconds),
            q.device,
            queries=decode.queries,
        )


def _check(decode: DecodeCall) -> None:
    decode.check()
    check_values(decode.op, "q", decode.q)


def _signature_of(decode: DecodeCall) -> Signature:
    """Fields that ranks must have in common to call a ring together."""
    return (
        ("batch, num_heads_q, seqlen_q, head_dim", tuple(decode.q.shape)),
        ("dtype", decode.q.dtype),
        ("dtype of v", decode.v.dtype),
        ("k_scale is given", decode.attention.get("k_scale") is not None),
        ("device", decode.q.device.type),
        ("num_heads_kv, head_dim of v", (decode.v.shape[1], decode.v.shape[3])),
        *fields_of_options(decode.attention),
    )


# Keys and values travel.

# The tensors of a shard that travel, and the numbers of axes that each has at most.
_TRAVELLING = [name for name, x in ARGUMENTS.items() if x.is_of_keys and x.axes]
_MAX_AXES = 4
_Shard = dict[str, Tensor | None]
# What a rank sends to each other one before any shard (`_Facts`), in numbers of 8 bytes.
MANIFEST_BYTES = 8 * (len(_TRAVELLING) * _MAX_AXES + 5)


class _Facts(NamedTuple):
    """Facts that ranks need of a shard before it comes: any rank may have appended a key."""

    shapes: dict[str, list[int]]  # of the tensors that are given
    key_layout: list[int]
    num_workers: int
    num_threads: int  # 0 where lean_decode does not depend on it

    @staticmethod
    def of(numbers: list[int]) -> "_Facts":
        *sizes, first, block, stride, num_workers, num_threads = numbers
        shapes = {}
        for i, name in enumerate(_TRAVELLING):
            shapes[name] = [n for n in sizes[i * _MAX_AXES : (i + 1) * _MAX_AXES] if n >= 0]
        shapes = {name: shape for name, shape in shapes.items() if shape}
        return _Facts(shapes, [first, block, stride], num_workers, num_threads)

    def lay_out(self, dtypes: dict[str, torch.dtype]) -> Iterator[tuple[str, list[int], int, int]]:
        """Yields each tensor's name and shape, and where its bytes begin and end in a buffer."""
        begin = 0
        for name, shape in self.shapes.items():
            end = begin + math.prod(shape) * dtypes[name].itemsize
            yield name, shape, begin, end
            begin = aligned(end)


def _numbers_of(decode: DecodeCall) -> list[int]:
    """The facts of this rank's shard; -1 stands for an axis that a tensor does not have."""
    numbers: list[int] = []
    for name in _TRAVELLING:
        x = decode.arguments.get(name)
        shape = () if x is None else x.shape
        numbers += [*shape, *[-1] * (_MAX_AXES - len(shape))]
    key_layout = decode.attention.get("key_layout", (0, 1, 1))
    num_threads = torch.get_num_threads() if decode.q.device.type == "cpu" else 0
    return [*numbers, *key_layout, decode.attention.get("num_workers", 0), num_threads]


def _gather_facts(link: Link, own: list[int], deadline: float) -> list[_Facts]:
    host = torch.device("cpu")
    send = torch.tensor([*own, 0], dtype=torch.int64, device=host)  # the last is the call id
    receive = send.new_empty(link.world_size, send.numel())
    link.gather(receive.view(torch.uint8), send.view(torch.uint8), host).run(deadline)
    facts = [_Facts.of(row[:-1]) for row in receive.tolist()]
    if len({x.num_threads for x in facts}) == 1:
        return facts
    # Every rank splits a shard as its owner does, or its state would differ in bits.
    return [x._replace(num_workers=x.num_workers or x.num_threads) for x in facts]


def _pass_keys(
    link: Link, state: State, decode: DecodeCall, facts: list[_Facts], seconds: float
) -> _State:
    """Attends to every rank's shard; each hop has `seconds`."""
    q, device = decode.q, link.transport_device(decode.q.device)
    dtypes = {"k": decode.k.dtype, "v": decode.v.dtype, "key_ranges": torch.int32}
    dtypes |= {"page_table": torch.int32, "k_scale": torch.float32, "v_scale": torch.float32}
    num_bytes = max(end for x in facts for *_, end in x.lay_out(dtypes))
    # Two, so that one is received while the other is read and sent.
    buffers = [_room(state, f"shard {i}", num_bytes, device) for i in range(min(2, len(facts) - 1))]
    _, o_parts, lse_parts = state.parts(len(facts))
    arguments = decode.arguments
    here: _Shard = {name: arguments.get(name) for name in _TRAVELLING}
    leaving = [_travelling(x, device) for x in here.values()]
    for hop in range(len(facts)):
        owner = (link.rank - hop) % len(facts)
        deadline = time.monotonic() + seconds
        is_last = hop == len(facts) - 1
        if not is_last:
            arriving: _Shard = dict.fromkeys(_TRAVELLING)
            for name, shape, begin, end in facts[owner - 1].lay_out(dtypes):
                arriving[name] = buffers[hop % 2][begin:end].view(dtypes[name]).view(shape)
            coming = [_travelling(x, device) for x in arriving.values()]
            works = link.start_shift(coming, leaving)
        how = {"key_layout": facts[owner].key_layout, "num_workers": facts[owner].num_workers}
        out = o_parts[owner], lse_parts[owner]
        lean_decode(**{**arguments, **here, **how}, out=out)
        if not is_last:
            link.finish(works, device, deadline)
            leaving = coming
            here = {name: None if x is None else x.to(q.device) for name, x in arriving.items()}
    return merge_states(o_parts, lse_parts, out_dtype=q.dtype)


def _travelling(x: Tensor | None, device: torch.device) -> Tensor:
    """A tensor in the form in which it is sent; empty tensors are not sent."""
    if x is None:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return x.to(device).contiguous()


def _room(state: State, name: str, num_bytes: int, device: torch.device) -> Tensor:
    """Bytes to receive a shard into, kept for the next call unless two of them are too many."""
    if 2 * num_bytes > MAX_KEPT_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return state.arena.bytes(name, num_bytes, device)


def aligned(num_bytes: int) -> int:
    """The least size that holds `num_bytes` and keeps what follows aligned."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


# Queries and their states travel.


class Part(NamedTuple):
    """A part of the sequences, or of the key heads with their query heads."""

    sequences: slice
    heads: slice
    key_heads: slice

    @property
    def place(self) -> tuple[slice, slice]:
        """Index of the part in `[batch, num_heads_q, ...]`."""
        return self.sequences, self.heads


def parts_of(q: Tensor, num_heads_kv: int, world_size: int) -> list[Part]:
    """A part for each rank, as `torch.chunk` cuts; the last ones may be empty."""
    batch, num_heads = q.shape[:2]
    count = max(batch, num_heads_kv)
    size = -(-count // world_size)
    bounds = [(min(i * size, count), min((i + 1) * size, count)) for i in range(world_size)]
    everything = slice(None)
    if batch >= num_heads_kv:
        return [Part(slice(begin, end), everything, everything) for begin, end in bounds]
    group = num_heads // num_heads_kv
    return [Part(everything, slice(b * group, e * group), slice(b, e)) for b, e in bounds]


class _Packet(NamedTuple):
    """A part's queries, followed by the state so far of the part whose queries went before."""

    queries: Tensor
    state: _State
    query_bytes: Tensor
    state_bytes: Tensor
    both: Tensor


def _ring_of(link: Link, state: State, q: Tensor, num_heads_kv: int) -> "_PassQ":
    """The ring of calls of this kind, made once."""
    kind = ring_pass_q_decode, q.shape, q.dtype, num_heads_kv
    ring: _PassQ | None = state.prepared.get(kind)
    if ring is None:
        # Views that are made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            ring = state.prepared[kind] = _PassQ(link, state, q, num_heads_kv)
    return ring


class _PassQ:
    """The journey of all parts around the ranks, in memory of the communicator.

    In hop `h` this rank attends with the queries of packet `h` and sends that packet, while packet
    `h + 1` arrives: the queries of the part before, and the state so far of the part that this
    rank has. Packet 0 has no state yet, and the last one, which ends the journey, no queries.
    """

    def __init__(self, link: Link, state: State, q: Tensor, num_heads_kv: int) -> None:
        self.link, self.state, self.dtype = link, state, q.dtype
        self.parts = parts_of(q, num_heads_kv, link.world_size)
        meta = torch.empty(q.shape, device="meta")
        self.shapes = [tuple(meta[part.place].shape) for part in self.parts]  # of queries
        head_dim = state.layout.head_dim
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

    def index(self, hop: int) -> int:
        """The index of the part of the queries that this rank has in a hop."""
        return (self.link.rank - hop) % self.link.world_size

    def packet(self, hop: int) -> _Packet:
        shape, state = self.shapes[self.index(hop)], self.states[self.index(hop - 1)]
        num_bytes, memory = math.prod(shape) * self.dtype.itemsize, self.memory[hop % 2]
        begin, end = aligned(num_bytes), aligned(num_bytes) + state.num_bytes
        queries, behind = memory[:num_bytes], memory[begin:end]
        views = queries.view(self.dtype).view(shape), state.views(behind)
        return _Packet(*views, queries, behind, memory[:end])

    def connect(self) -> list[Round]:
        """The hops' messages, and the gathering of results."""
        link, last = self.link, self.link.world_size - 1
        previous, following = (link.rank - 1) % link.world_size, (link.rank + 1) % link.world_size

        rounds = []
        for hop in range(link.world_size):
            half = "query_bytes" if hop == 0 else "state_bytes" if hop == last else "both"
            arrives, leaves = (getattr(self.packets[i], half) for i in (hop + 1, hop))
            receive = {previous: arrives} if arrives.numel() else {}
            send = {following: leaves} if leaves.numel() else {}
            rounds.append(link.messages(receive, send, self.state.device, has_call_id=False))
        return [*rounds, link.gather(self.gathered, self.result, self.state.device)]

    def run(
        self,
        q: Tensor,
        attend: Callable[[Part, Tensor, _State], object],
        deadline_of_hop: Callable[[], float],
    ) -> _State:
        """All results, on every rank. `attend` writes the state of a part over this rank's keys."""
        o, lse = q.new_empty(self.state.o.shape), torch.empty_like(self.state.lse)
        if self.state.layout.num_bytes == 0:
            return o, lse
        self.rounds = self.rounds or self.connect()
        *hops, gather = self.rounds
        self.packets[0].queries.copy_(q[self.parts[self.link.rank].place])
        for hop, round_of_hop in enumerate(hops):
            here, arriving, index = self.packets[hop], self.packets[hop + 1], self.index(hop)
            layout = self.states[index]
            both = self.pair[:, : layout.num_bytes]
            out = layout.views(both[1]) if hop else arriving.state
            deadline = deadline_of_hop()
            round_of_hop.start(deadline)
            if layout.num_bytes:
                attend(self.parts[index], here.queries, out)
            round_of_hop.finish(deadline)
            if hop and layout.num_bytes:
                both[0].copy_(arriving.state_bytes)
                is_last = hop == len(hops) - 1
                result = self.results[index].views(self.result)
                merge_states(*layout.views(both), out=result if is_last else arriving.state)
        gather.run(deadline_of_hop())
        for last_rank, message in enumerate(self.gathered):
            index = (last_rank + 1) % len(self.parts)  # of the part that ended its journey there
            place = self.parts[index].place
            o[place], lse[place] = self.results[index].views(message)
        return o, lse
