# SPDX-License-Identifier: BSD-3-Clause
"""How hosts of an engine notice that one of them is lost, or that the first was told to end."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from faults import AMPLE
from tree_attention.vllm import watch
from tree_attention.vllm.hosts import Meeting, while_answered
from tree_attention.vllm.watch import LOST_STATUS, Watch

PAGE = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text()


class StoreOfAHost:
    """The store as a host has it, which does nothing any more once the host is stopped."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.is_stopped = store, threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.is_stopped.is_set():
            threading.Event().wait()
        return getattr(self.store, name)


class Host:
    def __init__(self, store: dist.Store, rank: int, names: list[str], timeout: float) -> None:
        self.store, self.said, self.status = StoreOfAHost(store), "", -1
        meeting = Meeting(rank, names, self.store)  # type: ignore[arg-type]
        self.watch = Watch(meeting, timeout, self.leave, self.say)
        self.watch.start()

    def leave(self, status: int) -> None:
        self.status = status

    def say(self, text: str) -> None:
        self.said = text

    def end(self, *, was_told: bool = False) -> None:
        """Its engine ends, in a thread, as all hosts learn it at the same time."""

        def run() -> None:
            self.status = self.watch.ended(was_told=was_told)

        threading.Thread(target=run, daemon=True).start()


@contextmanager
def watched(num: int, timeout: float) -> Iterator[list[Host]]:
    shared, names = dist.HashStore(), [f"host{rank}" for rank in range(num)]
    hosts = [Host(shared, rank, names, timeout) for rank in range(num)]
    time.sleep(3 * watch.BEAT_SECONDS)
    yield hosts
    for host in hosts:
        host.store.is_stopped.set()


def wait_until(done: Callable[[], object], seconds: float = AMPLE) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def wait_for_statuses(hosts: list[Host], status: int) -> None:
    wait_until(lambda: all(host.status != -1 for host in hosts))
    assert [host.status for host in hosts] == [status] * len(hosts)


@pytest.mark.deep
def test_a_silent_host_is_named_by_all_others() -> None:
    with watched(3, timeout=3.0) as (first, silent, third):
        assert not first.said
        silent.store.is_stopped.set()
        wait_for_statuses([first, third], LOST_STATUS)
        assert first.said == third.said
        assert re.match(r"A host is lost: host1, gave no sign for [3-9]\.\d s\. ", first.said)


@pytest.mark.deep
def test_a_host_whose_loss_ended_an_engine_is_named_long_before_the_timeout() -> None:
    """Also where another host's engine ends later than the first's."""
    with watched(4, timeout=60.0) as (first, second, silent, fourth):
        silent.store.is_stopped.set()
        fourth.end()
        time.sleep(1)
        first.end()  # the second hears it from the others
        wait_for_statuses([first, second, fourth], LOST_STATUS)
        for host in (first, second, fourth):
            assert host.said.startswith("A host is lost: host2, gave no sign for ")


@pytest.mark.deep
def test_an_engine_that_ends_while_all_hosts_are_there() -> None:
    with watched(2, timeout=60.0) as hosts:
        hosts[1].end()
        time.sleep(1)
        hosts[0].end()
        wait_for_statuses(hosts, LOST_STATUS)
        for host in hosts:
            assert host.said.startswith("The engine is lost: host1, noticed first; the hosts' ")


def test_a_first_host_that_was_told_to_end_tells_the_others() -> None:
    with watched(3, timeout=60.0) as hosts:
        hosts[1].end()  # vLLM's processes of other hosts may end before
        hosts[0].end(was_told=True)
        wait_for_statuses(hosts, 0)
        assert not any(host.said for host in hosts)


@pytest.mark.deep
def test_all_hosts_may_be_told_to_end() -> None:
    """The first one takes longer than the others."""
    with watched(2, timeout=60.0) as (first, second):
        first.watch.was_told = True
        second.end(was_told=True)
        wait_for_statuses([first, second], 0)
        assert not first.said


def test_another_host_that_was_told_to_end_is_lost() -> None:
    with watched(2, timeout=60.0) as (first, second):
        second.end(was_told=True)
        wait_for_statuses([second], 0)
        wait_for_statuses([first], LOST_STATUS)
        assert first.said.startswith("A host is lost: host1, was told to end. ")


@pytest.mark.deep
def test_a_first_host_that_is_stopped() -> None:
    """Its store keeps the connection and answers nothing: calls of it wait for ever."""
    with watched(1, timeout=2.0) as [host]:
        host.store.is_stopped.set()
        wait_for_statuses([host], LOST_STATUS)
        assert host.said.startswith("A host is lost: host0, gave no sign for 2.0 s. ")


class Gone(dist.HashStore):
    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("Connection reset by peer")


def test_a_first_host_whose_store_is_gone() -> None:
    host = Host(Gone(), 1, ["host0", "host1"], 1.0)
    wait_for_statuses([host], LOST_STATUS)
    assert host.said.startswith("A host is lost: host0, does not answer: Connection reset by peer")


@pytest.mark.deep
def test_what_is_not_answered_ends_in_time() -> None:
    def run(answered: Callable[[], None]) -> None:
        for _ in range(5):
            time.sleep(0.3)
            answered()
        threading.Event().wait()

    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        while_answered(run, 1.0)
    assert 2.4 < time.monotonic() - begin < AMPLE
    assert while_answered(lambda answered: 7, 1.0) == 7
    with pytest.raises(KeyError):
        while_answered(lambda answered: {}[0], 1.0)


@pytest.mark.parametrize("text", ["A host is lost: ", "gave no sign for", "The engine is lost: "])
def test_what_is_said_is_documented(text: str) -> None:
    assert text in PAGE and text in Path(watch.__file__).read_text()
