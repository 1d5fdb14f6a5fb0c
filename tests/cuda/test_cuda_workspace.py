# SPDX-License-Identifier: BSD-3-Clause
"""The scratch memory of launches: one allocation for each stream, and for each captured graph."""

import gc
import threading
import time

import pytest
import torch

import tree_attention
from dry_device import sized
from helpers import Problem, assert_same_bits, make_problem


def split_problem(device: torch.device, **changed) -> Problem:
    """All blocks share its outputs."""
    shape = {"num_heads_kv": 1, "batch": 1, "seqlen_k": sized(8000), "dtype": torch.bfloat16}
    return make_problem(**shape | changed).to(device)


def used_memory() -> int:
    """Bytes of the device's memory that anybody uses."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_reset_without_workspaces():
    assert tree_attention.reset_workspaces() is None


def test_size_does_not_depend_on_the_problem(cuda):
    """Every kernel, and a long context: what the smallest problem allocates is enough for all."""
    problems = [
        split_problem(cuda, head_dim=head_dim, seqlen_q=seqlen_q, dtype=dtype, batch=3)
        for head_dim in (64, 128, 256)
        for seqlen_q in (1, 8, 40)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    problems.append(split_problem(cuda, seqlen_k=sized(500_000), head_dim=128))
    outs = [problem.run() for problem in problems]  # kernels load on first use
    with torch.cuda.stream(torch.cuda.Stream()):
        split_problem(cuda, seqlen_k=10).run_and_check()
        before = used_memory()
        for problem, out in zip(problems, outs, strict=True):
            problem.run(out=out)
        assert used_memory() == before


def test_a_stream_has_its_own_of_tens_of_megabytes(cuda):
    problem = split_problem(cuda)
    out = problem.run()
    streams = [torch.cuda.Stream() for _ in range(3)]
    before = used_memory()
    for stream in streams:
        with torch.cuda.stream(stream):
            problem.run(out=out)
    # Streams come from a pool of torch, so that an earlier test may have used them.
    assert 0 <= used_memory() - before <= len(streams) * 64 * 2**20
    problem.check(*out)


def test_grows_for_more_workers_than_are_resident(cuda):
    with torch.cuda.stream(torch.cuda.Stream()):
        problem = split_problem(cuda, seqlen_k=sized(300_000), head_dim=128)
        small = problem.run_and_check(num_workers=40)
        for num_workers in (700, 2000, 4000):
            problem.run_and_check(num_workers=num_workers)
        assert_same_bits(problem.run(num_workers=40), small)


def test_first_use_and_growth_during_a_capture(cuda):
    """Nothing of it may become part of the graph, and memory that a graph knows stays."""
    problem = split_problem(cuda, seqlen_k=sized(200_000))
    expected = problem.run(), problem.run(num_workers=1500)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = problem.run(), problem.run(num_workers=1500)
    with torch.cuda.stream(stream):
        problem.run(num_workers=3000)
    gc.collect()
    torch.cuda.empty_cache()
    for _ in range(3):
        for out in captured:
            out[0].zero_()
        graph.replay()
        for out, right in zip(captured, expected, strict=True):
            assert_same_bits(out, right)


def test_graphs_of_one_stream_run_side_by_side(cuda):
    """Each has few blocks, so that both are resident, and all of them share its output."""
    problems = [split_problem(cuda, seqlen_k=n, head_dim=128) for n in map(sized, (60_000, 50_000))]
    expected = [problem.run_and_check(num_workers=40) for problem in problems]
    stream = torch.cuda.Stream()
    graphs, outs = [], []
    for problem in problems:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs.append(problem.run(num_workers=40))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    differ = [torch.zeros((), dtype=torch.int64, device=cuda) for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(sized(300)):
        for i, graph in enumerate(graphs):
            with torch.cuda.stream(streams[i]):
                graph.replay()
                differ[i] += (outs[i][0] != expected[i][0]).any()
    torch.cuda.synchronize()
    assert [x.item() for x in differ] == [0, 0]


def test_a_destroyed_graph_gives_its_workspace_to_the_next(cuda):
    problem = split_problem(cuda, seqlen_k=sized(20_000), head_dim=128)
    stream = torch.cuda.Stream()

    def capture_and_replay() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            problem.run()
        graph.replay()
        torch.cuda.synchronize()
        graph.reset()

    in_a_row, deadline = 0, time.monotonic() + 40
    while in_a_row < 20:
        assert time.monotonic() < deadline, f"only {in_a_row} graphs took no memory of their own"
        before = used_memory()
        capture_and_replay()
        # A thread of the driver says when a graph is gone. Where it is late, the next graph takes
        # another workspace, of more than 2 MB, and there is one more for those that follow.
        in_a_row = in_a_row + 1 if used_memory() - before < 2**20 else 0


@pytest.mark.gpu("threads")
def test_capture_while_other_threads_allocate(cuda):
    """In its strictest mode an allocation of any thread, made without care, ends a capture."""
    problem = split_problem(cuda, seqlen_k=sized(400_000))
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = [tuple(x.zero_() for x in problem.run()) for _ in streams]
    expected = problem.run_and_check()
    used = used_memory()
    graph = torch.cuda.CUDAGraph()

    def run(index: int) -> None:
        with torch.cuda.stream(streams[index]):
            problem.run(num_workers=3000 + index, out=outs[index])

    with torch.cuda.graph(graph, capture_error_mode="global"):
        captured = problem.run()
        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(streams))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    graph.replay()
    assert used_memory() > used
    assert_same_bits(captured, expected)
    for out in outs:
        problem.check(*out)


@pytest.mark.gpu("workspaces")
def test_reset(cuda):
    problem = split_problem(cuda)
    expected = problem.run_and_check()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            out = problem.run()
            tree_attention.reset_workspaces()
            assert stream.query(), "the reset has waited for the device"
            assert_same_bits(problem.run(), expected)
            assert_same_bits(out, expected)


@pytest.mark.gpu("threads")
@pytest.mark.timeout(600)
def test_threads_use_their_streams_at_once(cuda):
    """The table of workspaces is shared by all threads."""
    problem = split_problem(cuda, seqlen_k=3000)
    expected = problem.run_and_check(num_workers=50)
    wrong = []

    def run() -> None:
        for _ in range(20):
            with torch.cuda.stream(torch.cuda.Stream()):
                out = problem.run(num_workers=50)
                torch.cuda.current_stream().synchronize()
            if not torch.equal(out[0], expected[0]):
                wrong.append(out)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
