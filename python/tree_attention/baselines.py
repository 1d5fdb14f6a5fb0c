# SPDX-License-Identifier: BSD-3-Clause
"""Ring attention, which tree decoding is compared with: every rank talks to its two neighbours.

In `ring_decode` keys and values travel, in `ring_pass_q_decode` queries and their states.
"""

import math
import time
from collections.abc import Callable
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
    Signature,
    State,
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
_Shard = dict[str, Tensor | None]
_Place = tuple[list[int], torch.dtype, int, int]  # of a tensor in a buffer: shape, dtype, bytes
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
        decode.check()
        state = comm.state(decode.shape, q.device)
        own = _facts_of(decode)

        def run(deadline: float) -> _State:
            facts = comm.gather(own, (1,) * comm.world_size, 0, deadline).tolist()
            comm.link.check_call_id()
            return _pass_keys(comm.link, state, decode, facts, call.seconds)

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
        decode.check()
        state = comm.state(decode.shape, q.device)
        num_heads_kv = k_local.shape[1]
        kind = ring_pass_q_decode, q.shape, q.dtype, num_heads_kv

        def attend(part: Part, queries: Tensor, out: _State) -> None:
            lean_decode(**{**part_of(decode.arguments, *part), "q": queries}, out=out)

        def run(deadline: float) -> _State:
            if state.layout.num_bytes == 0:
                return q.new_empty(decode.shape), torch.empty_like(state.lse)
            ring: _PassQ | None = state.prepared.get(kind)
            if ring is None:
                # Views that are made in inference mode cannot be written to outside of it.
                with torch.inference_mode(False):
                    ring = _prepare_pass_q(comm.link, state, q, num_heads_kv)
                    state.prepared[kind] = ring
            return ring(q, attend, call.seconds)

        return call.run(_signature_of(decode), run, q.device, queries=decode.queries)


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


def aligned(num_bytes: int) -> int:
    """The least size that holds `num_bytes` and keeps what follows aligned."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


# Keys and values travel.

# The tensors of a shard that travel, and the numbers of axes that each has at most.
_TRAVELLING = [name for name, x in ARGUMENTS.items() if x.is_of_keys and x.axes]
_MAX_AXES = 4
# Facts that ranks need of a shard before it comes, as any rank may have appended a key: the sizes
# of its tensors, with -1 for an axis that one has not, key_layout, num_workers, and the number of
# threads, which is 0 where lean_decode does not depend on it.
_NUM_SIZES = len(_TRAVELLING) * _MAX_AXES
MANIFEST_BYTES = 8 * (_NUM_SIZES + 5)


def _facts_of(decode: DecodeCall) -> Tensor:
    sizes: list[int] = []
    for name in _TRAVELLING:
        x = decode.arguments.get(name)
        shape = () if x is None else x.shape
        sizes += [*shape, *[-1] * (_MAX_AXES - len(shape))]
    how = [*decode.attention.get("key_layout", (0, 1, 1)), decode.attention.get("num_workers", 0)]
    num_threads = torch.get_num_threads() if decode.q.device.type == "cpu" else 0
    return torch.tensor([[*sizes, *how, num_threads]], device="cpu")


def _pass_keys(
    link: Link, state: State, decode: DecodeCall, facts: list[list[int]], seconds: float
) -> _State:
    """Attends to every rank's shard, which the `facts` describe; each hop has `seconds`."""
    world_size, q, arguments = link.world_size, decode.q, decode.arguments
    device = link.transport_device(q.device)
    shards = [_places_of(sizes, decode) for sizes in facts]
    num_bytes = max(end for shard in shards for *_, end in shard.values())
    # Two, so that one is received while the other is read and sent.
    buffers = [_room(state, f"shard {i}", num_bytes, device) for i in range(min(2, world_size - 1))]
    _, o_parts, lse_parts = state.parts(world_size)
    # Every rank splits a shard as its owner does, or its state would differ in bits.
    is_split_alike = len({numbers[-1] for numbers in facts}) == 1
    here: _Shard = {name: arguments.get(name) for name in _TRAVELLING}
    leaving = [_travelling(x, device) for x in here.values()]
    for hop in range(world_size):
        owner, is_last = (link.rank - hop) % world_size, hop == world_size - 1
        deadline = time.monotonic() + seconds
        arriving: _Shard = dict.fromkeys(_TRAVELLING)
        if not is_last:
            for name, (shape, dtype, begin, end) in shards[owner - 1].items():
                arriving[name] = buffers[hop % 2][begin:end].view(dtype).view(shape)
            coming = [_travelling(x, device) for x in arriving.values()]
            works = link.start_shift(coming, leaving)
        *key_layout, num_workers, num_threads = facts[owner][_NUM_SIZES:]
        if not is_split_alike:
            num_workers = num_workers or num_threads
        how = {"key_layout": key_layout, "num_workers": num_workers}
        lean_decode(**{**arguments, **here, **how}, out=(o_parts[owner], lse_parts[owner]))
        if not is_last:
            link.finish(works, device, deadline)
            leaving = coming
            here = {name: None if x is None else x.to(q.device) for name, x in arriving.items()}
    return merge_states(o_parts, lse_parts, out_dtype=q.dtype)


def _places_of(facts: list[int], decode: DecodeCall) -> dict[str, _Place]:
    """The tensors of a shard, and where in a buffer their bytes begin and end."""
    dtypes = {"k": decode.k.dtype, "v": decode.v.dtype, "key_ranges": torch.int32}
    dtypes |= {"page_table": torch.int32, "k_scale": torch.float32, "v_scale": torch.float32}
    places, begin = {}, 0
    for i, name in enumerate(_TRAVELLING):
        shape = [size for size in facts[i * _MAX_AXES : (i + 1) * _MAX_AXES] if size >= 0]
        if shape:
            end = begin + math.prod(shape) * dtypes[name].itemsize
            places[name] = shape, dtypes[name], begin, end
            begin = aligned(end)
    return places


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


_Attend = Callable[[Part, Tensor, _State], object]  # writes the state over this rank's keys
_PassQ = Callable[[Tensor, _Attend, float], _State]  # of all queries, with the seconds of a hop


def _prepare_pass_q(link: Link, state: State, q: Tensor, num_heads_kv: int) -> _PassQ:
    """The journey of all parts around the ranks, in memory of the communicator.

    In each hop this rank attends with the queries that it has. It sends them on, with the state of
    the part that it had before; meanwhile the next queries come, with the state so far of the part
    that it has. The first hop has no state yet, and the last one no more queries.
    """
    world_size, last = link.world_size, link.world_size - 1
    previous, following = (link.rank - 1) % world_size, (link.rank + 1) % world_size
    by_rank = parts_of(q, num_heads_kv, world_size)
    parts = [by_rank[link.rank - hop] for hop in range(world_size)]
    sizes = [q[part.place].nbytes for part in parts]
    states = [replace(state.layout, shape=tuple(state.lse[part.place].shape)) for part in parts]
    results = [replace(layout, dtype=q.dtype) for layout in states]

    def room(name: str, num_bytes: int) -> Tensor:
        return state.buffer(f"{name} of pass-Q", num_bytes)

    query_bytes, state_bytes = aligned(max(sizes)), aligned(max(x.num_bytes for x in states))
    # Two, as one is received while the other is read and sent.
    memory = [room(f"packet {i}", query_bytes + state_bytes) for i in range(2)]
    pair = room("pair", 2 * state_bytes).view(2, state_bytes)
    result = room("result", max(layout.message_bytes for layout in results))
    gathered = room("results", world_size * result.numel()).view(world_size, -1)

    def packet(hop: int) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, the state, and both, that leave in a hop and came in the one before it."""
        size, whole = sizes[hop % world_size], memory[hop % 2]
        end = aligned(size) + states[hop - 1].num_bytes
        return whole[:size], whole[aligned(size) : end], whole[:end]

    queries = [packet(i)[0].view(q.dtype).view(q[x.place].shape) for i, x in enumerate(parts)]
    states_so_far = [packet(hop + 1)[1] for hop in range(world_size)]
    rounds = []
    for hop in range(world_size):
        kind = 1 if hop == last else 2 if hop else 0
        arriving, leaving = packet(hop + 1)[kind], packet(hop)[kind]
        receive = {previous: arriving} if arriving.numel() else {}
        send = {following: leaving} if leaving.numel() else {}
        rounds.append(link.messages(receive, send, state.device, has_call_id=False))
    gather = link.gather(gathered, result, state.device)

    def run(q: Tensor, attend: _Attend, seconds: float) -> _State:
        queries[0].copy_(q[parts[0].place])
        for hop, round_of_hop in enumerate(rounds):
            layout, so_far, deadline = states[hop], states_so_far[hop], time.monotonic() + seconds
            both = pair[:, : layout.num_bytes]
            round_of_hop.start(deadline)
            if layout.num_bytes:
                attend(parts[hop], queries[hop], layout.views(both[1] if hop else so_far))
            round_of_hop.finish(deadline)
            if layout.num_bytes and hop:
                both[0].copy_(so_far)
                out = results[hop].views(result) if hop == last else layout.views(so_far)
                merge_states(*layout.views(both), out=out)
        gather.run(time.monotonic() + seconds)
        o, lse = q.new_empty(state.o.shape), torch.empty_like(state.lse)
        for rank, message in enumerate(gathered):  # at which the part of the rank after it ended
            hop = (link.rank - rank - 1) % world_size
            o[parts[hop].place], lse[parts[hop].place] = results[hop].views(message)
        return o, lse

    return run
