# SPDX-License-Identifier: BSD-3-Clause
"""Late, disagreeing and interrupted ranks: an ExchangeError on every rank, in time, for good.

Torch's timeout of these groups is 30 minutes: every deadline that is met is the communicator's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed import AMPLE_SECONDS, Lost, on_ranks, run_ranks
from faults import (
    AMPLE,
    QUICK,
    SLACK,
    TIMEOUT,
    Outcome,
    assert_refuses_further_use,
    call,
    end_or_stall,
    failure,
)
from tiers import by_world, tiers
from tree_attention import merge_states
from tree_attention.exchange import Communicator, ExchangeError
from tree_attention.exchange.agreement import signatures as agreement


def lose_rank(rank: int, world_size: int, victim: int, how: str) -> Outcome:
    comm = Communicator(timeout=TIMEOUT)
    dist.barrier()
    if rank == victim:
        end_or_stall(how)
    outcome = failure(call, "all_gather", comm)
    assert_refuses_further_use(comm)
    return outcome


def survivors(results: list[Any]) -> list[Outcome]:
    return [result for result in results if not isinstance(result, Lost)]


@pytest.mark.parametrize("how", tiers(["kill"], ["stop"]))
@pytest.mark.parametrize("world_size,victim", tiers([(3, 0)], [(2, 0), (2, 1), (3, 2)]))
def test_lost_before_the_first_exchange(world_size: int, victim: int, how: str) -> None:
    """Signatures are compared through a store that rank 0 serves, which may be the lost one."""
    results = run_ranks(lose_rank, world_size, victim, how, lost=[victim])
    for seconds, message in survivors(results):
        assert seconds < TIMEOUT + SLACK
        if victim != 0:
            assert f"no word from rank {victim} about this exchange" in message
            # Once for each rank that says so.
            assert not re.search(rf"no word from rank {victim}(?! about)", message), message
        elif how == "stop":
            assert "the store of the process group does not answer" in message
        else:
            assert re.search("the store of the process group (is lost|does not answer)", message)


def come_one_by_one(rank: int, world_size: int) -> str:
    comm = Communicator(timeout=TIMEOUT)
    time.sleep({0: 3 * TIMEOUT, 1: 2 * TIMEOUT}.get(rank, 0.0))
    return failure(call, "all_gather", comm)[1]


def test_reasons_are_told_once() -> None:
    """Rank 1 fails because others did and quotes them; rank 0 reads them and the quotes."""
    for message in run_ranks(come_one_by_one, 4, fresh=True):
        parts = re.split(r"; | \(|\)", message)
        assert len(parts) == len(set(parts)), message
        assert "has failed: rank" not in message, message


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"seqlen_q": 2}, "head_dim is (2, 4, 2, 32) on rank 1"),
    "scale": ({"softmax_scale": 0.5}, "softmax_scale is 0.5 on rank 1, None on rank 0"),
    "softcap": ({"softcap": 3.0}, "softcap is 3.0 on rank 1, 0.0 on rank 0"),
    "strategy": ({"kind": "three_allreduce"}, "strategy is three_allreduce on rank 1, all_gather"),
    "dtype": ({"dtype": torch.bfloat16}, "dtype is torch.bfloat16 on rank 1, torch.float32 on"),
    "version": ({"version": "1.2"}, "tree_attention version is 1.2 on rank 1, "),
    "function": ({"kind": "ring"}, "call is ring_decode on rank 1, tree_decode on rank 0"),
}


def disagree(rank: int, world_size: int, difference: str) -> Outcome:
    comm = Communicator(timeout=AMPLE)
    options = {"kind": "all_gather", "version": agreement.__version__}
    if rank == 1:
        options |= DIFFERENCES[difference][0]
    with mock.patch.object(agreement, "__version__", options.pop("version")):
        outcome = failure(call, comm=comm, **options)
    # Every rank knows and nothing was sent: they may go on once they agree.
    assert comm.failed is None
    call("all_gather", comm)
    return outcome


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_disagreement_names_rank_and_field(difference: str, world_size: int) -> None:
    for seconds, message in run_ranks(disagree, world_size, difference):
        assert seconds < QUICK
        assert DIFFERENCES[difference][1] in message


class SlowReader:
    """A store that takes its time to answer."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name in ("get", "multi_get"):
            time.sleep(0.3)
        return getattr(self._store, name)


def leave_after_disagreement(rank: int, world_size: int) -> Outcome:
    comm = Communicator(timeout=AMPLE)
    if rank > 0:
        agreement = comm._session._agreement
        agreement._store = SlowReader(agreement._store)  # type: ignore[assignment]
    outcome = failure(call, "all_gather", comm, softcap=1.0 if rank == 1 else 2.0)
    if rank == 0:
        os._exit(1)
    return outcome


def test_rank_that_serves_the_store_stays_until_all_know() -> None:
    results = run_ranks(leave_after_disagreement, 3, lost=[0])
    for seconds, message in survivors(results):
        assert seconds < QUICK
        assert "softcap is 1.0 on rank 1, 2.0 on rank 0" in message


def raise_alone(rank: int, world_size: int, where: str) -> Outcome:
    comm = Communicator(timeout=TIMEOUT)
    call("all_gather", comm, timeout=AMPLE)
    if rank == 0:
        if where == "kernel":
            with pytest.raises(ValueError, match="lean_decode: softcap"):
                call("all_gather", comm, softcap=-1.0)
        elif where == "strategy":
            with pytest.raises(ValueError, match="strategy must be one of"):
                call("none", comm)
        elif where == "option":
            with pytest.raises(TypeError, match="unexpected keyword argument 'soft_cap'"):
                call("all_gather", comm, soft_cap=1.0)
        elif where == "timeout":
            with pytest.raises(TypeError, match="timeout must be a number of seconds or a"):
                call("all_gather", comm, timeout="5")
        elif where == "memory":
            out_of_memory = mock.patch.object(comm, "outputs", side_effect=MemoryError)
            with out_of_memory, pytest.raises(MemoryError):
                call("all_gather", comm)
        else:
            comm.abandon_call()
    # Rank 0 is a step ahead: its message has the size that its peers wait for.
    outcome = failure(call, "all_gather", comm)
    assert_refuses_further_use(comm)
    return outcome


@pytest.mark.parametrize("where", ["kernel", "strategy", "option", "timeout", "memory", "caller"])
@by_world([2], [3])
def test_rank_that_raised_alone_is_not_merged_with_another_step(
    world_size: int, where: str
) -> None:
    for seconds, _ in run_ranks(raise_alone, world_size, where, fresh=True):
        assert seconds < TIMEOUT + SLACK


def raise_alone_at_a_change(rank: int, world_size: int) -> Outcome:
    comm = Communicator(timeout=AMPLE)
    call("all_gather", comm)
    if rank == 0:
        with pytest.raises(ValueError, match="lean_decode: softcap"):
            call("all_gather", comm, seqlen_q=2, softcap=-1.0)
    # Its peers compare signatures too, for they changed their shape at the step it left out.
    outcome = failure(call, "all_gather", comm, seqlen_q=2)
    # Were they to go on, rank 0 might be a step ahead of those who call this one again.
    assert_refuses_further_use(comm)
    return outcome


def test_rank_that_raised_alone_where_the_shape_changed() -> None:
    for seconds, message in run_ranks(raise_alone_at_a_change, 3, fresh=True):
        assert seconds < QUICK
        assert "rank 0 abandoned more calls before the exchange than ranks 1, 2" in message


def come_late(rank: int, world_size: int, first: bool) -> Outcome:
    comm = Communicator(timeout=TIMEOUT)
    if not first:
        call("all_gather", comm, timeout=AMPLE)
    dist.barrier()
    if rank == 1:
        time.sleep(TIMEOUT + 1.5)
    outcome = failure(call, "all_gather", comm, timeout=AMPLE if rank == 1 else TIMEOUT)
    assert_refuses_further_use(comm)
    return outcome


@pytest.mark.deep
@pytest.mark.parametrize("first", [False, True])
def test_late_rank_finds_the_others_gone(first: bool) -> None:
    for rank, (seconds, message) in enumerate(run_ranks(come_late, 3, first, fresh=True)):
        assert seconds < (QUICK if rank == 1 else TIMEOUT + SLACK)
        if rank == 1 and first:
            assert "rank 0 has failed: no answer within 0.5 s: no word from rank 1" in message


@on_ranks(2, fresh=True)
def test_interrupted_exchange_is_final(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)

    def stop(deadline: float) -> None:
        dist.barrier()  # until no rank compares signatures any more
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), comm.begin("interrupted") as interrupted:
        interrupted.run((), stop)
    assert comm.failed is not None and comm.failed.startswith("interrupted by KeyboardInterrupt")
    assert_refuses_further_use(comm)


@on_ranks(2, fresh=True)
def test_what_an_operator_refuses_inside_an_exchange_is_final(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)

    def refuse(deadline: float) -> None:
        dist.barrier()  # until no rank compares signatures any more
        merge_states(torch.ones(2, 8), torch.ones(3))

    message = r"of 2: merge_states: lse_parts must .*got \[3\]"
    with pytest.raises(ExchangeError, match=message), comm.begin("refused") as refused:
        refused.run((), refuse)
    assert_refuses_further_use(comm)


def abort(rank: int, world_size: int, kind: str, first: bool) -> Outcome:
    """Rank 0 waits for rank 1, which never comes, and is told to stop by a thread of its own."""
    comm = Communicator(timeout=AMPLE)
    if not first:
        call(kind, comm)
    dist.barrier()
    if rank == 1:
        return 0.0, ""
    threading.Timer(0.3, comm.abort, ["no longer wanted"]).start()
    outcome = failure(call, kind, comm)
    assert_refuses_further_use(comm)
    before = comm.failed
    comm.abort("again")
    assert comm.failed == before is not None and before.startswith("aborted: no longer wanted")
    return outcome


@pytest.mark.parametrize(
    "kind,first",
    tiers(
        [("all_gather", True), ("ring", False)],
        [("all_gather", False), ("three_allreduce", False)],
    ),
)
def test_abort_from_another_thread(kind: str, first: bool) -> None:
    """While signatures are compared, amid messages, amid a collective, and around a ring."""
    seconds, message = run_ranks(abort, 2, kind, first, fresh=True)[0]
    assert seconds < QUICK and "aborted: no longer wanted" in message


@on_ranks(2, fresh=True)
def test_no_result_of_an_aborted_call(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)

    def stop(deadline: float) -> None:
        dist.barrier()  # until no rank compares signatures any more
        comm.abort("too late")

    with comm.begin("aborted") as aborted:
        _, message = failure(aborted.run, (), stop)
    assert message.startswith(f"rank {rank} of 2: aborted: too late")
    assert_refuses_further_use(comm)


@pytest.mark.parametrize("kind", ["ring", "before the first call"])
@pytest.mark.parametrize("is_kept", [False, True])
@on_ranks(2)
def test_destroyed_group(rank: int, world_size: int, kind: str, is_kept: bool) -> None:
    group = dist.new_group([0, 1])
    comm = Communicator(group, timeout=AMPLE)
    if kind != "before the first call":
        call(kind, comm)
    dist.destroy_process_group(group)
    if not is_kept:
        del group
    _, message = failure(call, "ring", comm)
    assert "the process group was destroyed" in message


SURVIVOR = """
    import os, pathlib, signal, sys, time
    import torch, torch.distributed as dist
    from tree_attention import ExchangeError, tree_decode

    rank, port = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        port.with_suffix(".part").write_text(str(store.port))
        port.with_suffix(".part").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    q, kv = torch.ones(1, 4, 1, 32), torch.ones(1, 2, 10, 32)
    tree_decode(q, kv, kv)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        tree_decode(q, kv, kv, timeout=0.5)
    except ExchangeError as error:
        print("caught", error)
"""


@pytest.mark.deep
def test_process_of_a_survivor_exits(tmp_path: Path) -> None:
    """Neither an operation that timed out nor a store that stalled keeps an interpreter alive."""
    script = tmp_path / "survivor.py"
    script.write_text(textwrap.dedent(SURVIVOR))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path / "port"],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        output, _ = processes[1].communicate(timeout=AMPLE_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert "caught rank 1 of 2: no answer within 0.5 s" in output
    assert processes[1].returncode == 0


def test_a_rank_that_only_failed_is_not_compared() -> None:
    """It has withdrawn from a call that it did not come to, and has no fields to differ in."""
    store = dist.HashStore()
    lost, other = (agreement.Agreement(store, rank, 2, "group") for rank in range(2))
    lost.withdraw("interrupted")
    with pytest.raises(ExchangeError) as caught:
        other.reach((("call", "all_reduce"),), time.monotonic() + 5.0)
    assert str(caught.value) == "rank 0 has failed: interrupted"


@pytest.mark.deep
@on_ranks(3)
def test_errors_name_hosts(rank: int, world_size: int) -> None:
    """Two of the ranks are on a host of their own; who reads the error knows hosts."""
    host = f"host{max(0, rank - 1)}"
    with mock.patch.object(agreement.socket, "gethostname", lambda: host):
        comm = Communicator(dist.new_group(range(world_size)), timeout=5.0)
        with pytest.raises(ExchangeError) as caught:
            comm.agree((("dtype", "half" if rank == 2 else "float"),), timeout=AMPLE)
        here = f"rank {rank} of 3"
        differ = "dtype is half on rank 2 (host1), float on rank 0 (host0)"
        assert str(caught.value) == f"{here}: {differ}"
        if rank == 2:
            return  # it comes to no further call
        with pytest.raises(
            ExchangeError, match=r"no word from rank 2 \(host1\) about this exchange"
        ):
            comm.agree((("dtype", "float"),))


def test_hosts_that_all_ranks_share_are_not_named() -> None:
    store = dist.HashStore()
    one = agreement.Agreement(store, 0, 1, "group")
    one.reach((), time.monotonic() + AMPLE)
    assert one._named([0]) == "rank 0"
