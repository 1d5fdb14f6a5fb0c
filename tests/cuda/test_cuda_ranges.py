# SPDX-License-Identifier: BSD-3-Clause
"""The launches of a call with several ranges of keys. Its results: test_several_ranges.py."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from emulated import emulated_operators
from helpers import Problem, assert_same_bits, make_problem

# What torch does without a kernel on the device.
NO_KERNEL = re.compile(
    r"(empty|resize_|as_strided|_?reshape\w*|view|_unsafe_view|select|expand|unflatten|flatten|to)$"
)
KINDS = {"rows": {}, "pages": {"page_size": 16}, "ALiBi": {"alibi": 0.1}}
kinds = pytest.mark.parametrize("kind", KINDS)
batches = pytest.mark.parametrize("batch", [1, 3])


def problems(kind: str, batch: int) -> tuple[Problem, Problem]:
    """With three ranges for each query, and with one of them in the same form."""
    several = make_problem(
        batch=batch, seqlen_q=2, ranges="several", dtype=torch.bfloat16, **KINDS[kind]
    )
    assert several.key_ranges is not None and several.key_ranges.shape[2] == 3
    return several, replace(several, key_ranges=several.key_ranges[:, :, :1])


def events_of(function: Callable[[], object], activity: ProfilerActivity) -> list[str]:
    with profile(activities={ProfilerActivity.CPU, activity}) as profiler:
        function()
    wanted = DeviceType.CUDA if activity == ProfilerActivity.CUDA else DeviceType.CPU
    return [event.name for event in profiler.events() if event.device_type == wanted]


def operations_of(function: Callable[[], object]) -> list[str]:
    """The operations of torch below `function` that are kernels on a device."""
    names = events_of(function, ProfilerActivity.CPU)
    names = [name.removeprefix("aten::") for name in names if name.startswith("aten::")]
    return [name for name in names if not NO_KERNEL.match(name)]


def test_operations_are_counted() -> None:
    x = torch.ones(3)
    assert operations_of(lambda: x.expand(2, 3).select(0, 1).view(3, 1)) == []
    assert operations_of(lambda: x + x) == ["add"]
    assert {"sort", "cat", "copy_"} <= set(operations_of(lambda: torch.stack(x.sort())))


@kinds
@batches
def test_three_launches(kind: str, batch: int) -> None:
    """The preparation of the ranges, the decode and the merge; of one range the decode alone. Where
    torch prepares them, sort to repeat, there are 15 operations besides, and two copies of what is
    merged into the caller's outputs."""
    with emulated_operators(0):
        num_launches = torch.ops.tree_attention_emulator.num_launches
        for problem, launches in zip(problems(kind, batch), (3, 1), strict=True):
            out = tuple(torch.empty_like(x) for x in problem.run())
            for run in (problem.run, lambda p=problem, out=out: p.run(out=out)):
                before = num_launches()
                assert operations_of(run) == []
                # The emulated operators check all page ids, by a launch.
                has_pages = launches == 3 or kind == "pages"
                assert num_launches() - before == launches + has_pages
            assert_same_bits(out, problem.run())


@pytest.mark.gpu("profiler")
@kinds
@batches
def test_three_kernels(kind: str, batch: int, cuda: torch.device) -> None:
    zeros = torch.zeros(8, device=cuda)
    if len(events_of(lambda: zeros.add_(1), ProfilerActivity.CUDA)) != 1:
        pytest.skip("the profiler sees no kernels on this machine")
    for problem, names in zip(
        problems(kind, batch), (["split_ranges", "lean_decode", "merge_states"], ["lean_decode"]),
        strict=True,
    ):  # fmt: skip
        problem = problem.to(cuda)
        problem.run_and_check()
        kernels = events_of(problem.run, ProfilerActivity.CUDA)
        assert len(kernels) == len(names), kernels
        assert all(name in kernel for name, kernel in zip(names, kernels, strict=True)), kernels
