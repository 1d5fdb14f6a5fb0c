# SPDX-License-Identifier: BSD-3-Clause
"""Threads and forked children that share a process group: a right result or a sentence."""

from __future__ import annotations

import _thread
import functools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import AMPLE_SECONDS, on_ranks, run_ranks
from faults import AMPLE
from tiers import by_world, tiers
from tree_attention import (
    Communicator,
    ExchangeError,
    all_merge_states,
    lean_decode,
    ring_decode,
    ring_pass_q_decode,
    tree_decode,
)
from tree_attention.exchange import get_communicator

CALLS = 20


def problem(seed: int, rank: int, world_size: int) -> tuple[tuple[torch.Tensor, ...], Any]:
    """This rank's arguments of tree_decode, and the result over the keys of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 4, 1, 16, generator=generator)
    k, v = torch.randn(2, world_size, 1, 2, 30, 16, generator=generator)
    o, _ = lean_decode(q, torch.cat(tuple(k), 2), torch.cat(tuple(v), 2))
    return (q, k[rank], v[rank]), o


def in_threads(*bodies: Callable[[], object]) -> list[object]:
    """What each body returned or raised, in threads that have the same names on every rank."""
    results: list[object] = [None] * len(bodies)
    barrier = threading.Barrier(len(bodies))

    def run(index: int) -> None:
        barrier.wait()
        try:
            results[index] = bodies[index]()
        except Exception as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(i,), name=f"caller {i}") for i in range(len(bodies))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def hammer(rank: int, world_size: int) -> tuple[int, list[str]]:
    """Two threads call as fast as they can; counts right results and lists the errors."""
    right, errors = [0, 0], []

    def body(index: int) -> Callable[[], None]:
        def run() -> None:
            for step in range(CALLS):
                arguments, expected = problem(2 * step + index, rank, world_size)
                try:
                    o, _ = tree_decode(*arguments, timeout=2.0)
                except ExchangeError as error:
                    errors.append(str(error))
                    continue
                torch.testing.assert_close(o, expected)
                right[index] += 1

        return run

    for result in in_threads(body(0), body(1)):
        assert result is None, result
    return sum(right), errors


@by_world([2], [3])
def test_calls_of_two_threads_are_never_mixed(world_size: int) -> None:
    for right, errors in run_ranks(hammer, world_size, fresh=True):
        assert right + len(errors) == 2 * CALLS
        assert errors, "threads that call at once cannot all succeed"
        for error in errors:
            # Also where one rank served the one thread first and its peer the other.
            assert re.search("thread|failed|no answer|no word|left out a call", error), error


def enter_in_another_order(rank: int, world_size: int) -> list[str]:
    """No two calls overlap on any rank, but the threads take turns the other way round."""
    messages = []
    order = [0, 1] if rank == 0 else [1, 0]
    for index in order:
        arguments, _ = problem(index, rank, world_size)
        error: list[Exception] = []

        def run(arguments: Any = arguments, error: list[Exception] = error) -> None:
            try:
                tree_decode(*arguments, timeout=AMPLE)
            except Exception as caught:
                error.append(caught)

        thread = threading.Thread(target=run, name=f"caller {index}")
        thread.start()
        thread.join()
        assert isinstance(error[0], ExchangeError), error
        messages.append(str(error[0]))
    return messages


def test_threads_that_enter_in_different_orders_are_an_error() -> None:
    for messages in run_ranks(enter_in_another_order, 2, fresh=True):
        assert "name of the calling thread is caller 1 on rank 1, caller 0 on rank 0" in messages[0]
        assert "name of the calling thread is caller 0 on rank 1, caller 1 on rank 0" in messages[1]


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_threads_may_follow_one_another(rank: int, world_size: int) -> None:
    """Threads that wait for one another may share a group."""
    for index in (0, 1, 0):
        arguments, expected = problem(index, rank, world_size)

        def run(arguments: Any = arguments) -> torch.Tensor:
            return tree_decode(*arguments, timeout=AMPLE)[0]

        torch.testing.assert_close(run(), expected)
        [o] = in_threads(run)
        assert isinstance(o, torch.Tensor), o
        torch.testing.assert_close(o, expected)


def share_a_name(rank: int, world_size: int) -> str:
    """Rank 1's second thread calls while its first one, which called before, has nothing to do."""
    arguments, _ = problem(0, rank, world_size)
    called, done = threading.Event(), threading.Event()

    def first() -> None:
        tree_decode(*arguments)
        called.set()
        done.wait()

    error: list[str] = []

    def second() -> None:
        try:
            tree_decode(*arguments)
        except ExchangeError as caught:
            error.append(str(caught))

    threads = [threading.Thread(target=body, name="worker") for body in (first, second)]
    threads[0].start()
    called.wait()
    threads[1].start()
    threads[1].join()
    done.set()
    threads[0].join()
    in_threads(lambda: tree_decode(*arguments))  # a new thread, after them, is no such mistake
    last = threading.Thread(target=lambda: tree_decode(*arguments), name="worker")
    last.start()
    last.join()
    return error[0]


def test_living_threads_of_one_name_cannot_be_told_apart() -> None:
    for error in run_ranks(share_a_name, 2):
        assert error.startswith("tree_decode: two threads of this process are named 'worker'")
        assert "with Communicator(group).turn('step', name='server'): ..." in error


def serve(rank: int, world_size: int) -> None:
    """Threads that are called alike, or otherwise on each rank, or are none of Python's."""
    comm = Communicator()
    arguments, expected = problem(0, rank, world_size)
    errors: list[BaseException] = []

    def step() -> None:
        with comm.turn("step", name="server"):
            for decode in (tree_decode, ring_decode, ring_pass_q_decode):
                o, _ = decode(*arguments, timeout=AMPLE)
                torch.testing.assert_close(o, expected)
            assert comm.all_reduce(torch.ones(2)).tolist() == [world_size] * 2
            assert comm.all_gather(torch.ones(1), (1,) * world_size).tolist() == [1] * world_size
            comm.agree((("step", 1),))
            comm.check()

    def attempt(called: threading.Event) -> None:
        try:
            step()
        except BaseException as error:
            errors.append(error)
        called.set()
        done.wait()

    done = threading.Event()
    for start in (
        *[lambda run: threading.Thread(target=run, name="AnyIO worker thread").start()] * 3,
        lambda run: _thread.start_new_thread(run, ()),  # "Dummy-1", as threads of C extensions
    ):
        called = threading.Event()
        start(functools.partial(attempt, called))
        called.wait()
    if rank == 0:  # which has one more executor
        ThreadPoolExecutor(1).submit(int).result()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(step).result()
    step()
    done.set()
    assert not errors, errors


def test_a_server_names_the_caller_in_place_of_its_threads() -> None:
    run_ranks(serve, 2)


def differ_in_names(rank: int, world_size: int) -> list[str]:
    comm = Communicator()

    def call(name: str | None, thread_name: str) -> str:
        said: list[str] = []

        def run() -> None:
            try:
                if name is None:
                    comm.all_reduce(torch.ones(1), timeout=AMPLE)
                else:
                    with comm.turn("step", name=name):
                        comm.all_reduce(torch.ones(1), timeout=AMPLE)
            except ExchangeError as error:
                said.append(str(error))

        thread = threading.Thread(target=run, name=thread_name)
        thread.start()
        thread.join()
        return said[0] if said else ""

    return [
        call(None, f"ThreadPoolExecutor-{rank}_0"),
        call(f"request {rank}", "worker"),
        call("server" if rank else None, "server"),
        call("server", f"worker {rank}"),
    ]


def test_callers_of_other_names_are_an_error_that_says_what_to_write() -> None:
    for said in run_ranks(differ_in_names, 2):
        for text in said[:3]:
            assert "name of the calling thread is" in text
            assert text.count("with Communicator(group).turn('step', name='server')") == 1, text
        assert "ThreadPoolExecutor-1_0 on rank 1, ThreadPoolExecutor-0_0 on rank 0" in said[0]
        assert "request 1 of Communicator.turn" in said[1]
        assert "server of Communicator.turn" in said[2]
        assert said[3] == ""


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_name_is_a_string_that_is_not_empty(rank: int, world_size: int) -> None:
    comm = Communicator()
    for name in ("", 3, b"server"):
        turn = comm.turn("step", name)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"turn: name must be a string .*{name!r}"), turn:
            pass
    assert comm.all_reduce(torch.ones(1)).tolist() == [world_size]


@on_ranks(2)
def test_a_thread_that_took_another_name_leaves_its_own(rank: int, world_size: int) -> None:
    comm = Communicator()
    called, done = threading.Event(), threading.Event()

    def first() -> None:
        comm.all_reduce(torch.ones(1))
        threading.current_thread().name = "renamed"
        called.set()
        done.wait()

    results: list[torch.Tensor] = []
    threading.Thread(target=first, name="worker").start()
    called.wait()
    second = threading.Thread(
        target=lambda: results.append(comm.all_reduce(torch.ones(1))), name="worker"
    )
    second.start()
    second.join()
    done.set()
    assert results[0].tolist() == [2]


@on_ranks(2)
def test_a_refused_call_keeps_no_thread_out(rank: int, world_size: int) -> None:
    arguments, expected = problem(0, rank, world_size)
    wrong = torch.zeros(7, 7)
    refused, called = threading.Event(), threading.Event()

    def refuse() -> None:
        with pytest.raises(ValueError, match="lean_decode: key_ranges must"):
            tree_decode(*arguments, wrong)
        refused.set()
        called.wait()

    thread = threading.Thread(target=refuse)
    thread.start()
    refused.wait()
    torch.testing.assert_close(tree_decode(*arguments)[0], expected)
    called.set()
    thread.join()


def two_communicators(rank: int, world_size: int) -> str:
    """They share connections, so their calls would be mixed like those of one."""
    first, second = Communicator(), Communicator()
    with first.turn("generate"):
        [error] = in_threads(lambda: second.all_reduce(torch.ones(1)))
    return str(error)


def test_communicators_of_one_group_share_the_turn() -> None:
    for error in run_ranks(two_communicators, 2):
        assert error.startswith("all_reduce: thread 'caller 0' called while generate in thread")


@on_ranks(1)
def test_a_world_of_one_takes_no_turns(rank: int, world_size: int) -> None:
    """A world of one sends nothing: threads share what is made at each call."""
    comm = Communicator()

    def body() -> None:
        for step in range(CALLS):
            arguments, expected = problem(step, 0, 1)
            torch.testing.assert_close(tree_decode(*arguments, group=comm)[0], expected)
            o, lse = torch.full((1, 1, 1, 8), step + 0.5), torch.zeros(1, 1, 1)
            assert torch.equal(all_merge_states(o, lse, comm)[0], o)
            assert torch.equal(comm.all_reduce(o), o)

    assert in_threads(body, body) == [None, None]


@on_ranks(2, fresh=True)
def test_threads_with_groups_of_their_own_do_not_wait(rank: int, world_size: int) -> None:
    groups = [dist.new_group() for _ in range(2)]

    def body(index: int) -> Callable[[], None]:
        def run() -> None:
            for step in range(CALLS):
                arguments, expected = problem(2 * step + index, rank, world_size)
                o, _ = tree_decode(*arguments, group=groups[index], timeout=AMPLE)
                torch.testing.assert_close(o, expected)

        return run

    for result in in_threads(body(0), body(1)):
        assert result is None, result


@on_ranks(2, fresh=True)
def test_threads_get_the_same_communicator(rank: int, world_size: int) -> None:
    made = in_threads(*[get_communicator] * 8)
    assert len({id(comm) for comm in made}) == 1


def in_child(body: Callable[[], object]) -> str:
    """What `body` raised in a forked child, which is ended after a while."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            body()
            text = "returned"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(reader) as pipe:
        return pipe.read()


def fork(rank: int, world_size: int, when: str) -> list[str]:
    arguments, expected = problem(0, rank, world_size)
    comm = Communicator() if when == "after a communicator was made" else None
    if when == "after a call":
        tree_decode(*arguments)
    texts = []
    if rank == 0:  # alone, which the ranks' next communicators must not notice
        texts = [
            in_child(lambda: tree_decode(*arguments, group=comm)),
            in_child(lambda: all_merge_states(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1))),
            in_child(Communicator),
            in_child(lambda: get_communicator(comm).abort("in a child")),
            in_child(lambda: get_communicator(comm).check()),
        ]
    for group in (comm, None, Communicator()):
        torch.testing.assert_close(tree_decode(*arguments, group=group)[0], expected)
    return texts


@pytest.mark.parametrize(
    "when", tiers(["after a call"], ["before any call", "after a communicator was made"])
)
def test_forked_child_is_refused_and_the_parent_goes_on(when: str) -> None:
    texts = run_ranks(fork, 2, when, fresh=True)[0]
    ops = "tree_decode", "all_merge_states", "", "abort", "check"
    for op, text in zip(ops, texts, strict=True):
        assert re.match(
            rf"ExchangeError: ({op}|Communicator): the process group was made before this", text
        )


CHILDREN = """
import os, signal, sys, threading
import torch
from tree_attention import lean_decode, merge_states

q, k = torch.ones(1, 8, 1, 64), torch.linspace(-1, 1, 2 * 32768 * 64).view(1, 2, 32768, 64)
o_parts, lse_parts = torch.ones(4, 1, 8, 4096, 64), torch.zeros(4, 1, 8, 4096)

def compute(num_threads):
    torch.set_num_threads(num_threads)
    return *lean_decode(q, k, k, num_workers=4), *merge_states(o_parts, lse_parts)

def in_child(body):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that hangs is ended
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, sys.argv

def check():
    tasks = set(os.listdir("/proc/self/task"))
    found, there = compute(3), set(os.listdir("/proc/self/task"))
    assert len(there - tasks) >= 2, "the loops of a forked child are serial"
    for x, y in zip(found, compute(1), strict=True):
        assert torch.equal(x, y)
    assert compute(3) and len(os.listdir("/proc/self/task")) == len(there)

def check_and_fork_again():
    check()
    in_child(check)

torch.set_num_threads(3)
if "torch" in sys.argv:
    torch.ones(10_000_000).exp_()
if "ours" in sys.argv:
    compute(3)
if "another thread" in sys.argv:
    thread = threading.Thread(target=compute, args=(3,))
    thread.start()
    thread.join()
torch.set_num_threads(3)
in_child(check_and_fork_again)
assert compute(3)
"""


@pytest.mark.deep
@pytest.mark.parametrize("before", ["ours", "nothing", "torch", "another thread"])
def test_loops_of_a_forked_child_have_threads_of_its_own(before: str) -> None:
    """Whatever the parent ran before: OpenMP's threads, if it has some, stayed with it."""
    subprocess.run([sys.executable, "-c", CHILDREN, before], check=True, timeout=AMPLE_SECONDS)
