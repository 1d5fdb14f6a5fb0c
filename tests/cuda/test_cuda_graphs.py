# SPDX-License-Identifier: BSD-3-Clause
"""What lean_decode asks of the host on CUDA: one kernel, outputs, and nothing else.

So a captured graph stays right when lengths, queries and pages change in place between replays.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dry_device import sized
from helpers import NAN, Problem, assert_same_bits, make_problem
from tree_attention import lean_decode

PROBLEMS = {
    "one query": {"dtype": torch.bfloat16, "head_dim": 128, "seqlen_k": 5000},
    "float32": {"seqlen_k": 700, "head_dim": 96},
    "ragged batch": {"dtype": torch.float16, "batch": 7, "seqlen_k": 2000, "ranges": "ragged"},
    "many rows": {"dtype": torch.bfloat16, "seqlen_q": 70, "seqlen_k": 300, "ranges": "causal"},
    "pages, alibi, softcap": {
        "dtype": torch.bfloat16, "seqlen_q": 3, "seqlen_k": 900, "ranges": "causal",
        "page_size": 16, "alibi": 0.02, "softcap": 5.0, "softmax_scale": 0.2,
    },
    "no keys": {"seqlen_k": 0},
}  # fmt: skip
problems = pytest.mark.parametrize("name", PROBLEMS)


def make_outputs(problem: Problem) -> tuple[Tensor, Tensor]:
    o = problem.q.new_full((*problem.q.shape[:3], problem.v.shape[3]), NAN)
    return o, torch.full_like(o[..., 0], NAN, dtype=torch.float32)


def capture(problem: Problem, **options: object) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    problem.run(**options)  # as torch asks for: lazy initialisation comes before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = problem.run(**options)
    return graph, out


def test_replay_follows_ranges_and_queries_changed_in_place(cuda):
    """Lengths from none to the whole capacity: what the host knew at capture decides nothing."""
    capacity = 3000
    problem = make_problem(
        batch=5, num_heads_kv=2, group_size=4, seqlen_q=2, seqlen_k=capacity, head_dim=128,
        dtype=torch.bfloat16, ranges="ragged",
    )  # fmt: skip
    k, v = (torch.randn_like(x) for x in (problem.k, problem.v))
    problem.k, problem.v = k, v
    problem = problem.to(cuda)
    graph, out = capture(problem)
    generator = torch.Generator().manual_seed(1)
    bounds = [(0, 0), (0, 1), (2999, 3000), (0, capacity), (500, 400)]
    for repeat in range(sized(20)):
        ends = torch.randint(capacity + 1, (5, 2), generator=generator)
        begins = torch.randint(capacity + 1, (5, 2), generator=generator)
        ranges = torch.stack([torch.minimum(begins, ends), ends], -1).int()
        if repeat % 2:
            ranges[:] = torch.tensor(bounds, dtype=torch.int32)[:, None].roll(repeat, 0)
        problem.key_ranges.copy_(ranges)
        problem.q.copy_(torch.randn(problem.q.shape, generator=generator))
        for x in out:
            x.fill_(NAN)
        graph.replay()
        problem.check(*out)
        assert_same_bits(out, problem.run())


def test_replay_follows_pages_changed_in_place(cuda):
    problem = make_problem(
        seqlen_k=640, page_size=16, per_head=True, dtype=torch.bfloat16, ranges="causal", seqlen_q=2
    ).to(cuda)
    graph, out = capture(problem)
    table = problem.options["page_table"]
    before = problem.run()
    for x in out:
        x.fill_(NAN)
    table.copy_(table.flip(0).contiguous())
    problem.key_ranges.copy_(problem.key_ranges.flip(0).contiguous())
    graph.replay()
    problem.check(*out)
    assert not torch.equal(out[0], before[0])


def test_replay_on_another_stream_and_many_times(cuda):
    """Counters that a launch leaves changed would spoil one of the next."""
    problem = make_problem(seqlen_k=sized(4000), dtype=torch.bfloat16, head_dim=128).to(cuda)
    expected = problem.run_and_check()
    graph, out = capture(problem)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        differ = torch.zeros((), dtype=torch.int64, device=cuda)
        for _ in range(sized(1000)):
            out[0].fill_(NAN)
            graph.replay()
            differ += (out[0] != expected[0]).any()
    torch.cuda.synchronize()
    assert differ.item() == 0


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@problems
def test_waits_for_nothing(name, cuda):
    """torch sees what goes through torch; a capture refuses every other wait."""
    problem = make_problem(**PROBLEMS[name]).to(cuda)
    expected = problem.run_and_check()
    with synchronisation_is_an_error():
        result = problem.run()
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            result[0].sum().item()  # what this test must be able to see
    assert_same_bits(result, expected)
    graph, out = capture(problem)
    graph.replay()
    assert_same_bits(out, expected)


@pytest.mark.gpu("count of allocations")
@problems
def test_allocates_its_outputs_and_nothing_else(name, cuda):
    problem = make_problem(**PROBLEMS[name]).to(cuda)
    out = make_outputs(problem)
    problem.run(out=out), problem.run()
    torch.cuda.synchronize()

    def allocations() -> int:
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    before, free = allocations(), torch.cuda.mem_get_info()[0]
    for _ in range(10):
        problem.run(out=out)
    assert allocations() == before
    for _ in range(10):
        problem.run()
    assert allocations() == before + 10 * 2
    assert torch.cuda.mem_get_info()[0] == free, "memory that torch knows nothing of"
    problem.check(*out)


def kernels_of(function) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() if e.device_type == DeviceType.CUDA]


@pytest.mark.gpu("profiler")
@problems
@pytest.mark.parametrize("num_workers", [0, 1, 37])
def test_is_one_kernel(name, num_workers, cuda):
    """No memset, no copy, no second kernel that combines."""
    problem = make_problem(**PROBLEMS[name]).to(cuda)
    problem.run_and_check(num_workers=num_workers)
    zeros = torch.zeros(8, device=cuda)
    if len(kernels_of(lambda: zeros.add_(1))) != 1:
        pytest.skip("the profiler sees no kernels on this machine")
    kernels = kernels_of(lambda: problem.run(num_workers=num_workers))
    assert len(kernels) == 1 and "lean_decode" in kernels[0], kernels


@pytest.mark.gpu("torch.compile")
def test_compiled_steps_run_as_a_graph(cuda):
    """torch.compile with CUDA graphs, as generation loops use it."""
    torch._dynamo.reset()
    problem = make_problem(dtype=torch.bfloat16, seqlen_k=500, ranges="ragged", head_dim=128)
    problem = problem.to(cuda)

    def step(q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = lean_decode(2 * q, k, v, key_ranges)
        return o + 1, lse

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(5):  # the first calls warm up and record, the others replay
            problem.q.normal_()
            arguments = problem.q, problem.k, problem.v, problem.key_ranges
            torch.compiler.cudagraph_mark_step_begin()
            result = tuple(x.clone() for x in compiled(*arguments))
            assert_same_bits(result, step(*arguments))


FIRST_CALLS = """
import torch
from tree_attention import lean_decode, merge_states

shapes = (1, 8, 1, 128), (1, 2, 999, 128), (1, 2, 999, 128)
q, k, v = (torch.randn(shape).bfloat16().cuda() for shape in shapes)
graph = torch.cuda.CUDAGraph()
with torch.inference_mode():
    with torch.cuda.graph(graph, capture_error_mode="global"):
        o, lse = lean_decode(q, k, v)
        merged = merge_states(o[None], lse[None])
    graph.replay()
    expected = lean_decode(q, k, v)
for found in (o, lse), merged:
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
"""


@pytest.mark.gpu("process of its own")
@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_the_first_calls_of_a_process_may_be_captured(loading, cuda):
    """The kernels are not loaded yet and there is no workspace."""
    result = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, timeout=50,
        env=os.environ | {"CUDA_MODULE_LOADING": loading},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
