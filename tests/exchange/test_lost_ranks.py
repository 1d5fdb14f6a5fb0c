# SPDX-License-Identifier: BSD-3-Clause
"""Ranks lost at every point of every strategy and both rings, in worlds of 2 to 5."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from distributed import run_ranks
from faults import (
    AMPLE,
    KINDS,
    QUICK,
    SLACK,
    STOPPED,
    TIMEOUT,
    Once,
    assert_nothing_left,
    before_operation,
    call,
    count_operations,
    end_or_stall,
    failure,
    phases,
    resources,
    right_or_failed,
)
from tiers import tiers
from tree_attention.exchange import Communicator
from tree_attention.exchange.agreement import session


def stop_ranks(rank: int, world_size: int, kind: str, folder: Path) -> None:
    """Every phase with a group of its own. A stopped rank goes on when all others have failed, and
    fails then too."""
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    before = resources()
    nodes = [2 * r // world_size for r in range(world_size)]
    cases, case = 1, 0
    while case < cases:
        group = dist.new_group(range(world_size))
        comm = Communicator(group, STOPPED, nodes=nodes)
        expected = call(kind, comm, timeout=AMPLE)
        choice = phases(count_operations(kind, comm))
        cases, phase = len(choice), choice[case]
        victim = (case + world_size - 1) % world_size
        dist.barrier()
        if rank == victim:
            stop = Once(phase, partial(os.kill, os.getpid(), signal.SIGSTOP))
            with before_operation(stop):
                right_or_failed(kind, comm, expected)
            assert stop.done
        else:
            seconds, message = right_or_failed(kind, comm, expected)
            # Whoever had a result came back for another, with a deadline of its own.
            assert seconds < 2 * STOPPED + SLACK, message
            name = f"{world_size}-{case}"
            (folder / f"{name}-{rank}").touch()
            if rank == (victim + 1) % world_size:
                others = [folder / f"{name}-{r}" for r in range(world_size) if r != victim]
                while not all(file.exists() for file in others):  # or they fail this test
                    time.sleep(0.005)
                os.kill(pids[victim], signal.SIGCONT)
        dist.destroy_process_group(group)
        del group, comm
        case += 1
    assert_nothing_left(before)


def stop_ranks_quickly(rank: int, world_size: int, kind: str, folder: Path) -> None:
    with mock.patch.object(session, "_PATIENCE_SECONDS", 0.05):
        stop_ranks(rank, world_size, kind, folder)


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_ranks(kind: str, tmp_path: Path) -> None:
    """All worlds at once: they wait most of the time."""
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(run_ranks, stop_ranks_quickly, world_size, kind, tmp_path)
            for world_size in range(2, 6)
        ]
    for run in runs:
        run.result()


def lose_one_after_another(rank: int, world_size: int, kind: str) -> None:
    """Those that are left form a group and go on."""
    before = resources()
    left = list(range(world_size))
    for number, victim in enumerate((2, 4, 1, 3)):
        group = dist.new_group(left, use_local_synchronization=True)
        comm = Communicator(group, AMPLE)
        expected = call(kind, comm)
        choice = phases(count_operations(kind, comm))
        phase = choice[number % len(choice)]
        dist.barrier(group)
        if rank == victim:
            kill, leave = partial(os.kill, os.getpid(), signal.SIGKILL), partial(os._exit, 0)
            with before_operation(Once(phase, kill if number % 2 else leave)):
                right_or_failed(kind, comm, expected)
        seconds, message = right_or_failed(kind, comm, expected)
        assert seconds < QUICK, message
        assert re.search(rf"no word from ranks? [\d, ]*\b{left.index(victim)}\b", message), message
        dist.destroy_process_group(group)
        del group, comm
        left.remove(victim)
    assert_nothing_left(before)


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_killed_ranks(kind: str) -> None:
    """Worlds of 5, 4, 3 and 2, of the same processes."""
    run_ranks(lose_one_after_another, 5, kind, lost=[1, 2, 3, 4])


@pytest.mark.parametrize("kind", tiers(["two_phase"], ["all_gather"]))
def test_killed_ranks_of_other_nodes(kind: str) -> None:
    run_ranks(lose_one_after_another, 5, kind, lost=[1, 2, 3, 4], direct=False)


def go_on_without_the_first(rank: int, world_size: int, how: str, folder: Path) -> None:
    comm = Communicator(timeout=TIMEOUT)
    call("all_gather", comm, timeout=AMPLE)
    dist.barrier()
    if rank == 0:
        end_or_stall(how)
    seconds, message = failure(call, "all_gather", comm)
    assert seconds < TIMEOUT + SLACK, message
    del comm
    dist.destroy_process_group()
    name = str(folder / "store")
    store = dist.FileStore(name, world_size - 1)
    dist.init_process_group(
        "gloo", store=store, rank=rank - 1, world_size=world_size - 1, timeout=timedelta(seconds=20)
    )
    call("all_gather", Communicator())


@pytest.mark.parametrize("how", tiers(["kill"], ["stop"]))
def test_ranks_go_on_without_the_one_that_served_the_store(how: str, tmp_path: Path) -> None:
    run_ranks(go_on_without_the_first, 3, how, tmp_path, lost=[0])
