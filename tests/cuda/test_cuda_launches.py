# SPDX-License-Identifier: BSD-3-Clause
"""Many launches: one workspace for all shapes, two streams, more blocks than are resident."""

import random

import pytest
import torch
from torch import Tensor

from dry_device import sized
from helpers import NAN, Problem, assert_same_bits, make_problem

BF16, FP16 = torch.bfloat16, torch.float16
# Different row tiles, head_dim buckets, dtypes, numbers of outputs, and splits with other
# contributors at every counter and slot.
SHAPES = [
    {"seqlen_k": 3000, "dtype": BF16, "head_dim": 128},
    {"seqlen_k": 3000, "dtype": BF16, "head_dim": 128, "num_workers": 5},
    {"seqlen_k": 900, "batch": 9, "ranges": "ragged"},
    {"seqlen_k": 40, "batch": 1, "num_heads_kv": 1, "dtype": FP16},
    {"seqlen_k": 0},
    {"seqlen_k": 2000, "seqlen_q": 9, "dtype": BF16, "ranges": "causal", "num_workers": 100},
    {"seqlen_k": 700, "seqlen_q": 33, "dtype": FP16, "head_dim": 96, "ranges": "window"},
    {"seqlen_k": 5000, "batch": 1, "num_heads_kv": 1, "group_size": 8, "dtype": BF16},
    {"seqlen_k": 300, "dtype": BF16, "head_dim": 256, "page_size": 16, "num_workers": 17},
    {"seqlen_k": 1500, "head_dim": 128, "num_workers": 400},
    {"seqlen_k": 64, "batch": 33, "group_size": 1, "dtype": BF16},
]


def make_problems(device: torch.device) -> list[Problem]:
    shapes = [dict(shape) for shape in SHAPES]
    workers = [shape.pop("num_workers", 0) for shape in shapes]
    made = [make_problem(**shape).to(device) for shape in shapes]
    for problem, num_workers in zip(made, workers, strict=True):
        problem.options["num_workers"] = num_workers
    return made


def run_and_check(problem: Problem) -> tuple[Tensor, Tensor]:
    """The reference takes no number of workers."""
    out = problem.run()
    options = {name: x for name, x in problem.options.items() if name != "num_workers"}
    Problem(problem.q, problem.k, problem.v, problem.key_ranges, options).check(*out)
    return out


class Repeats:
    """Runs problems again and counts, on the device, results that differ from the first."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self.expected = [run_and_check(problem) for problem in problems]
        self.out = [tuple(x.clone() for x in state) for state in self.expected]
        self.differ = [torch.zeros((), dtype=torch.int64, device=x.q.device) for x in problems]

    def run(self, index: int) -> None:
        out, expected = self.out[index], self.expected[index]
        for x in out:
            x.fill_(NAN)
        self.problems[index].run(out=out)
        for x, y in zip(out, expected, strict=True):
            self.differ[index] += (x != y).any()

    def check(self) -> None:
        torch.cuda.synchronize()
        assert [x.item() for x in self.differ] == [0] * len(self.problems)


@pytest.mark.timeout(600)
def test_ten_thousand_launches_of_alternating_shapes(cuda):
    repeats = Repeats(make_problems(cuda))
    order = random.Random(0).choices(range(len(SHAPES)), k=sized(10_000))
    for index in order:
        repeats.run(index)
    repeats.check()


@pytest.mark.timeout(600)
def test_two_streams_at_once(cuda):
    """Each stream has a workspace of its own: on one, the counters would be shared."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    repeats = [Repeats(make_problems(cuda)) for _ in streams]
    torch.cuda.synchronize()
    order = random.Random(0)
    for _ in range(sized(1500)):
        for stream, own in zip(streams, repeats, strict=True):
            with torch.cuda.stream(stream):
                own.run(order.randrange(len(SHAPES)))
    for own in repeats:
        own.check()


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_a_hundred_repeats_have_the_same_bits(shape, cuda):
    """Blocks finish in any order, and any of them may be the last to arrive."""
    repeats = Repeats([make_problems(cuda)[shape]])
    for _ in range(sized(100)):
        repeats.run(0)
    repeats.check()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_workers", [1000, 5000, 30_000])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
def test_more_blocks_than_are_resident(dtype, num_workers, cuda):
    """A block that waited for another one might wait for ever."""
    properties = torch.cuda.get_device_properties(cuda)
    assert num_workers > 4 * properties.multi_processor_count
    problem = make_problem(
        batch=2, num_heads_kv=2, group_size=4, seqlen_k=sized(40_000), head_dim=64, dtype=dtype
    ).to(cuda)
    first = problem.run_and_check(num_workers=num_workers)
    for _ in range(3):
        assert_same_bits(problem.run(num_workers=num_workers), first)


def test_a_launch_beside_a_busy_device(cuda):
    """Blocks that start late, because other work holds the multiprocessors, are merged as well."""
    problem = make_problem(seqlen_k=sized(20_000), dtype=BF16, head_dim=128).to(cuda)
    expected = problem.run_and_check()
    a = torch.randn(sized(4096), sized(4096), device=cuda, dtype=BF16)
    busy = torch.cuda.Stream()
    with torch.cuda.stream(busy):
        for _ in range(sized(50)):
            a @ a
    results = [problem.run() for _ in range(sized(50))]
    torch.cuda.synchronize()
    for result in results:
        assert_same_bits(result, expected)
