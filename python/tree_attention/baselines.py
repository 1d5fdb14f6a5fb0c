# SPDX-License-Identifier: BSD-3-Clause
"""Ring attention, which tree decoding is compared with: every rank talks to its two neighbours.

In `ring_decode` keys and values travel, in `ring_pass_q_decode` queries and their states.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from ._loader import load
from .decode_call import DecodeCall
from .exchange import Call, Communicator, Link, Signature, State, get_communicator
from .ops import lean_decode, merge_states
from .options import ARGUMENTS, AttentionOptions, part_of, takes_attention_options

_State = tuple[Tensor, Tensor]  # o, lse


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

    Args, and what is returned and raised: as in `tree_decode`, without `deterministic`, `explain`
    and, except for `timeout`, the options of its merge.

    For example::

        import torch
        from tree_attention import ring_decode

        q = torch.randn(1, 8, 1, 64)  # [batch, num_heads_q, seqlen_q, head_dim]
        k, v = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)  # 100 keys of 2 kv heads
        o, lse = ring_decode(q, k, v)  # each of several ranks gives its own keys and values
        print(o.shape, lse.shape)  # torch.Size([1, 8, 1, 64]) torch.Size([1, 8, 1])

    Source: Ring Attention (arXiv:2310.01889), as the baseline of Tree Attention section 6.
    """
    with get_communicator(group).begin("ring_decode", timeout) as call:
        decode = DecodeCall("ring_decode", q, k_local, v_local, key_ranges, options)
        # Every rank attends to every shard itself.
        instruction_set = load().cpu_instruction_set() if q.is_cpu else None
        own_fields = ("dtype of v", v_local.dtype), ("instruction set", instruction_set)
        return _around(call, decode, _pass_keys, own_fields)


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

    Args, and what is raised: as in `tree_decode`, without `deterministic`, `explain` and, except
    for `timeout`, the options of its merge.

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
    with get_communicator(group).begin("ring_pass_q_decode", timeout) as call:
        decode = DecodeCall("ring_pass_q_decode", q, k_local, v_local, key_ranges, options)
        return _around(call, decode, _pass_queries)


def _around(
    call: Call,
    decode: DecodeCall,
    travel: Callable[[Communicator, State, DecodeCall, float], _State],
    own_fields: Signature = (),
) -> _State:
    """`travel`, once the arguments are right and the ranks are known to make the same call."""
    comm, device = call.comm, decode.q.device
    if comm.world_size == 1:
        return lean_decode(**decode.arguments)
    decode.check()
    state = comm.state(decode.shape, device)
    fields = comm.fields(state.layout, decode.exchange, device)
    return call.run(
        (*decode.signature, *fields, *own_fields),
        lambda deadline: travel(comm, state, decode, deadline),
        device,
        queries=decode.queries,
    )


# Keys and values travel.

# The tensors of a shard that travel, and the number of axes that each has at most.
_TRAVELLING = [name for name, x in ARGUMENTS.items() if x.is_of_keys and x.axes]
_MAX_AXES = 4
# Facts that ranks need of a shard before it comes, as any rank may have appended a key: the sizes
# of its tensors, with -1 for an axis that one has not, key_layout, num_workers, and the number of
# threads, which is 0 where lean_decode does not depend on it.
_NUM_SIZES = len(_TRAVELLING) * _MAX_AXES
MANIFEST_BYTES = 8 * (_NUM_SIZES + 5)


def _pass_keys(comm: Communicator, state: State, decode: DecodeCall, deadline: float) -> _State:
    """Attends to each rank's shard, while that goes to the next rank and another one comes."""
    link, world_size, q = comm.link, comm.world_size, decode.q
    facts = comm.gather(_facts_of(decode), (1,) * world_size, 0, deadline).tolist()
    link.check_call_id()
    _, o_parts, lse_parts = state.parts(world_size)
    # Every rank splits a shard as its owner does, or its state would differ in bits.
    is_split_alike = len({numbers[-1] for numbers in facts}) == 1
    device = link.transport_device(q.device)
    here = [decode.arguments.get(name) for name in _TRAVELLING]
    leaving = [None if x is None else x.to(device).contiguous() for x in here]
    for hop in range(world_size):
        owner, is_last = (link.rank - hop) % world_size, hop == world_size - 1
        if not is_last:
            arriving = _room_for(facts[owner - 1], decode, device)
            works = link.start_shift(arriving, leaving)
        *key_layout, num_workers, num_threads = facts[owner][_NUM_SIZES:]
        if not is_split_alike:
            num_workers = num_workers or num_threads
        how = {"key_layout": key_layout, "num_workers": num_workers}
        # A name for this dict would keep a third shard until the next hop's attention.
        lean_decode(
            **{**decode.arguments, **dict(zip(_TRAVELLING, here, strict=True)), **how},
            out=(o_parts[owner], lse_parts[owner]),
        )
        if not is_last:
            link.finish(works, device, deadline)
            leaving = arriving
            here = [None if x is None else x.to(q.device) for x in arriving]
    return merge_states(o_parts, lse_parts, out_dtype=q.dtype)


def _facts_of(decode: DecodeCall) -> Tensor:
    sizes: list[int] = []
    for name in _TRAVELLING:
        x = decode.arguments.get(name)
        shape = () if x is None else x.shape
        sizes += [*shape, *[-1] * (_MAX_AXES - len(shape))]
    how = [*decode.attention.get("key_layout", (0, 1, 1)), decode.attention.get("num_workers", 0)]
    num_threads = torch.get_num_threads() if decode.q.is_cpu else 0
    return torch.tensor([[*sizes, *how, num_threads]], device="cpu")


def _room_for(facts: list[int], decode: DecodeCall, device: torch.device) -> list[Tensor | None]:
    """Memory for the tensors of the shard that the facts describe."""
    dtypes = {"k": decode.k.dtype, "v": decode.v.dtype}
    dtypes |= {"key_ranges": torch.int32, "page_table": torch.int32}
    room: list[Tensor | None] = []
    for i, name in enumerate(_TRAVELLING):
        shape = [size for size in facts[i * _MAX_AXES : (i + 1) * _MAX_AXES] if size >= 0]
        dtype = dtypes.get(name, torch.float32)  # scales
        room.append(torch.empty(shape, dtype=dtype, device=device) if shape else None)
    return room


# Queries and their states travel.

Part = tuple[slice, slice, slice]  # of sequences, of query heads, of their key heads
_ALIGNMENT = 64  # of the addresses at which states begin, and queries end


def _pass_queries(comm: Communicator, state: State, decode: DecodeCall, deadline: float) -> _State:
    """Attends to this rank's keys with each part of the queries, as they come by."""
    q, num_heads_kv = decode.q, decode.k.shape[1]
    if state.layout.num_bytes == 0:
        return lean_decode(**decode.arguments)
    kind = q.shape, q.dtype, num_heads_kv
    journey: _Journey | None = state.prepared.get(kind)
    if journey is None:
        # Views that are made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            journey = state.prepared[kind] = _prepare(comm.link, state, q, num_heads_kv)
    return journey(decode, deadline)


def aligned(num_bytes: int) -> int:
    """The least size that holds `num_bytes` and keeps what follows aligned."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def parts_of(q: Tensor, num_heads_kv: int, world_size: int) -> list[Part]:
    """A part for each rank, as `torch.chunk` cuts the sequences, or the key heads if there are more
    of them; the last ones may be empty."""
    batch, num_heads = q.shape[:2]
    count = max(batch, num_heads_kv)
    size = -(-count // world_size)
    bounds = [(min(i * size, count), min((i + 1) * size, count)) for i in range(world_size)]
    everything = slice(None)
    if batch >= num_heads_kv:
        return [(slice(begin, end), everything, everything) for begin, end in bounds]
    group = num_heads // num_heads_kv
    return [(everything, slice(b * group, e * group), slice(b, e)) for b, e in bounds]


_Journey = Callable[[DecodeCall, float], _State]


def _prepare(link: Link, state: State, q: Tensor, num_heads_kv: int) -> _Journey:
    """The journey of all parts around the ranks, in memory of the communicator.

    In each hop this rank attends with the queries that it has. It sends them on, with the state of
    the part that it had before; meanwhile the next queries come, with the state so far of the part
    that it has. The first hop has no state yet, and the last one no more queries.
    """
    world_size, last = link.world_size, link.world_size - 1
    previous, following = (link.rank - 1) % world_size, (link.rank + 1) % world_size
    by_rank = parts_of(q, num_heads_kv, world_size)
    parts = [by_rank[link.rank - hop] for hop in range(world_size)]  # as they come
    places = [part[:2] for part in parts]
    sizes = [q[place].nbytes for place in places]
    states = [replace(state.layout, shape=tuple(state.lse[place].shape)) for place in places]
    results = [replace(layout, dtype=q.dtype) for layout in states]

    def room(name: str, *shape: int) -> Tensor:
        return state.buffer(f"{name} of pass-Q", math.prod(shape)).view(shape)

    query_bytes, state_bytes = aligned(max(sizes)), aligned(max(x.num_bytes for x in states))
    # Two, as one is received while the other is read and sent.
    packets = room("packets", 2, query_bytes + state_bytes)
    pair = room("pair", 2, state_bytes)
    result = room("result", max(layout.message_bytes for layout in results))
    gathered = room("results", world_size, result.numel())

    def packet(hop: int, size: int, state_size: int) -> Tensor:
        """Bytes of queries and of a state after them, which come in the hop before and leave in
        this one."""
        return packets[hop % 2, query_bytes - size : query_bytes + state_size]

    queries = [
        packet(i, size, 0).view(q.dtype).view(q[places[i]].shape) for i, size in enumerate(sizes)
    ]
    states_so_far = [packet(i + 1, 0, x.num_bytes) for i, x in enumerate(states)]
    rounds = []
    for hop in range(world_size):
        leaving, arriving = (
            packet(i, sizes[i] if hop < last else 0, states[i - 1].num_bytes if hop else 0)
            for i in (hop, hop + 1)
        )
        receive = {previous: arriving} if arriving.numel() else {}
        send = {following: leaving} if leaving.numel() else {}
        rounds.append(link.messages(receive, send, state.device, has_call_id=False))
    gather = link.gather(gathered, result, state.device)

    def run(decode: DecodeCall, deadline: float) -> _State:
        queries[0].copy_(decode.q[places[0]])
        for hop, round_of_hop in enumerate(rounds):
            layout, so_far = states[hop], states_so_far[hop]
            both = pair[:, : layout.num_bytes]
            round_of_hop.start(deadline)
            if layout.num_bytes:
                arguments = {**part_of(decode.arguments, *parts[hop]), "q": queries[hop]}
                lean_decode(**arguments, out=layout.views(both[1] if hop else so_far))
            round_of_hop.finish(deadline)
            if hop:
                both[0].copy_(so_far)
                out = results[hop].views(result) if hop == last else layout.views(so_far)
                merge_states(*layout.views(both), out=out)
        gather.run(deadline)
        o, lse = decode.q.new_empty(decode.shape), torch.empty_like(state.lse)
        for rank, message in enumerate(gathered):  # at which the part of the rank after it ended
            hop = (link.rank - rank - 1) % world_size
            o[places[hop]], lse[places[hop]] = results[hop].views(message)
        return o, lse

    return run
