# SPDX-License-Identifier: BSD-3-Clause
"""The messages that a rank sends once more for ranks that repeat its last call: as many, as long
and by the same way as theirs, whatever has changed since it noted them."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from distributed import run_ranks
from faults import AMPLE, QUICK, call, failure
from test_changed_calls import add, agree, assert_goes_on, broadcast
from tiers import tiers
from tree_attention import BlockCyclic, ring_decode, ring_pass_q_decode, tree_decode
from tree_attention.exchange import Communicator, Link
from tree_attention.exchange.agreement.queries import Queries
from tree_attention.exchange.auto.setup import Resources
from tree_attention.exchange.transport.replay import Replay
from tree_attention.hf.cache.shard import Shard

WORLDS = pytest.mark.parametrize(
    "world_size,direct,nodes",
    tiers([(2, False, None), (2, True, "ab")], [(2, True, None), (3, True, "aab")]),
)


def broadcast_before_transports(rank: int, world_size: int, nodes: str | None) -> str:
    """The first call makes no transports, as it does not say where its tensors are."""
    comm = Communicator(timeout=AMPLE, nodes=nodes)
    for function in (broadcast, add, broadcast, broadcast):
        function(comm)
    seconds, message = failure(add if rank == 1 else broadcast, comm)
    assert seconds < QUICK
    assert_goes_on(comm)
    return message


@WORLDS
def test_call_before_there_were_transports(
    world_size: int, direct: bool, nodes: str | None
) -> None:
    for message in run_ranks(broadcast_before_transports, world_size, nodes, direct=direct):
        assert "call is all_reduce on rank 1, broadcast on rank 0" in message


def decode_of_length(function: Callable[..., object], comm: Communicator, length: int) -> None:
    """Of other sizes on each rank, and in each call, with an equal signature."""
    layout = BlockCyclic(comm.world_size, 4)
    q, k = torch.ones(2, 4, 1, 16), torch.ones(2, 2, layout.count(comm.rank, length), 16)
    options = {"deterministic": 4} if function is tree_decode else {}
    function(q, k, k, group=comm, key_layout=layout.key_layout(comm.rank), **options)


def move_of_length(_: object, comm: Communicator, length: int) -> None:
    """From every rank to the next, with a signature that does not say how much."""
    following, previous = ((comm.rank + step) % comm.world_size for step in (1, -1))
    x = torch.full((length,), float(comm.rank))
    received = torch.empty(length)
    Shard(comm).exchange("move", (), {previous: received}, {following: x}, x.device)
    assert received.tolist() == [previous] * length


GROWING: dict[str, tuple[Callable[..., None], object]] = {
    "blocks": (decode_of_length, tree_decode),
    "ring": (decode_of_length, ring_decode),
    "ring of queries": (decode_of_length, ring_pass_q_decode),
    "moves": (move_of_length, None),
}


def change_while_growing(rank: int, world_size: int, nodes: str | None, name: str) -> str:
    comm = Communicator(timeout=AMPLE, nodes=nodes)
    run, function = GROWING[name]
    add(comm)
    for length in (37, 5, 300, 41):
        run(function, comm, length)
    seconds, message = failure(*(add, comm) if rank == 1 else (run, function, comm, 42))
    assert seconds < QUICK
    run(function, comm, 43)
    assert_goes_on(comm)
    return message


@WORLDS
@pytest.mark.parametrize("name", GROWING)
def test_equal_calls_whose_later_messages_grow(
    world_size: int, direct: bool, nodes: str | None, name: str
) -> None:
    for message in run_ranks(change_while_growing, world_size, nodes, name, direct=direct):
        assert "call is all_reduce on rank 1" in message


def sum_with_digest(rank: int, world_size: int, digest: int) -> None:
    with mock.patch.object(Queries, "call_id", return_value=digest):
        comm = Communicator(timeout=AMPLE)
        call("three_allreduce", comm)
        call("three_allreduce", comm)
        if rank == 1:
            seconds, message = failure(add, comm)
        else:
            seconds, message = failure(call, "three_allreduce", comm)
    assert seconds < QUICK and "call is all_reduce on rank 1, tree_decode on rank 0" in message


@pytest.mark.parametrize("digest", [1 << 24, (1 << 24) - 1, 5 << 40, (1 << 64) - 1])
def test_sums_tell_a_replay_from_every_call_id(digest: int) -> None:
    run_ranks(sum_with_digest, 2, digest)


def broadcast_over_nccl(rank: int, world_size: int) -> None:
    """Whose host reads no call id: zeros in a message would be taken for what was sent."""
    comm = Communicator(timeout=AMPLE)
    with (
        mock.patch.object(Link, "transport_device", return_value=torch.device("cuda")),
        mock.patch.object(Link, "_stage", lambda self, tensor, copy=True: tensor),
    ):
        broadcast(comm)
        with mock.patch.object(Link, "broadcast") as sent:
            agree(comm)
    assert sent.call_count == 0


def exchange_ids_alone(comm: Communicator) -> None:
    """The messages of the host in a call whose tensors are on a GPU, such as moves of a cache."""
    with comm.begin("moves of a GPU") as call, mock.patch.object(Resources, "are_known"):
        call.run((), comm.link.exchange_call_ids, torch.device("cuda"))


def change_beside_nccl(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    comm.link._backends["cuda"] = "nccl"
    exchange_ids_alone(comm)
    exchange_ids_alone(comm)
    seconds, message = failure(add if rank == 1 else exchange_ids_alone, comm)
    assert seconds < QUICK and "call is all_reduce on rank 1, moves of a GPU on rank 0" in message
    assert_goes_on(comm)


def test_messages_of_the_host_in_calls_of_a_gpu() -> None:
    """A group may have Gloo for the host and NCCL for GPUs, as torch makes it by default."""
    run_ranks(change_beside_nccl, 2)


def test_nothing_is_sent_again_where_the_host_reads_no_call_id() -> None:
    run_ranks(broadcast_over_nccl, 2)


def test_a_tensor_for_several_ranks_is_made_once() -> None:
    given: list[torch.Tensor] = []
    replay, sent, received = Replay(), torch.ones(3), torch.ones(2, dtype=torch.int32)
    replay.record()
    replay.note(lambda link, tensors, deadline: given.extend(tensors), (sent, received, sent))
    replay.run(None, 0.0)
    assert given[0] is given[2] and [x.tolist() for x in given[:2]] == [[0.0] * 3, [0] * 2]
    assert given[0] is not sent and given[1].dtype == torch.int32
    replay.record(False)
    replay.note(lambda link, tensors, deadline: given.extend(tensors), (sent,))
    replay.run(None, 0.0)
    assert len(given) == 3
