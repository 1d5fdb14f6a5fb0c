# SPDX-License-Identifier: BSD-3-Clause
"""The kernel by wgmma, on a device of compute capability 9.0 where the extension was built with
WGMMA=1, and on an emulated one: which calls take it, and forty shapes of them."""

import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from emulated import H100, emulated_operators
from helpers import Problem, assert_same_bits, make_problem
from latent_problems import make_latents
from test_cuda_latents import CASES
from tree_attention import _loader

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(params=["emulated", "cuda"])
def hopper(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "emulated":
        seed = zlib.crc32(request.node.nodeid.encode())
        with emulated_operators(seed, replace(H100, has_wgmma=True)):
            yield torch.device("cpu")
        return
    missing = ""
    if not torch.cuda.is_available():
        missing = "no CUDA device"
    elif torch.cuda.get_device_capability() != (9, 0):
        missing = "the kernel is for compute capability 9.0"
    elif not _loader.load().build_info()["has_wgmma"]:
        missing = "the extension was built without WGMMA=1"
    # scripts/gpu_check.sh sets it, and builds the kernel for these tests.
    if missing and os.environ.get("REQUIRE_CUDA") == "1":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    yield torch.device("cuda")


def uses_wgmma(problem: Problem) -> bool:
    """Whether a call takes the kernel."""
    page_table = problem.options.get("page_table")
    plan = torch.ops.tree_attention.lean_decode_plan(problem.q, problem.k, problem.v, page_table)
    return plan[2]


OTHER_KERNEL = {"no keys", "pages of 1", "pages of 24, ragged"}
ROWS = {
    "17 rows": {"group_size": 17, "num_heads_kv": 1},
    "32 rows": {"group_size": 32, "num_heads_kv": 1},
    "33 rows": {"group_size": 33, "num_heads_kv": 1},
    "64 rows": {"seqlen_q": 16},
    "64 tokens": {"group_size": 1, "seqlen_q": 64, "ranges": "causal"},
    "a key": {"seqlen_q": 8, "seqlen_k": 1},
    "a tile": {"seqlen_q": 8, "seqlen_k": 64},
    "many tiles": {"seqlen_q": 8, "seqlen_k": 700, "batch": 1},
    "ragged": {"group_size": 20, "ranges": "ragged", "layout": "BSHD"},
    "left padded": {"seqlen_q": 5, "ranges": "left padded", "layout": "padded"},
    "a window": {"seqlen_q": 9, "ranges": "window", "page_size": 64},
    "gaps": {"seqlen_q": 6, "ranges": "random", "page_size": 48},
    "alibi": {"seqlen_q": 8, "alibi": 1 / 64, "softcap": 3.0, "page_size": 16},
}  # fmt: skip
OF_TWO_DIMS = {
    f"{name}, {head_dim} columns": {"head_dim": head_dim, **shape}
    for name, shape in ROWS.items()
    for head_dim in (64, 128)
}
FEWER_COLUMNS = {
    "104 and 72 columns": {"head_dim": 104, "head_dim_v": 72, "seqlen_q": 8, "layout": "padded"},
}
LATENTS = {name: shape for name, shape in CASES.items() if name not in OTHER_KERNEL}
SHAPES = OF_TWO_DIMS | FEWER_COLUMNS | LATENTS


def make(name: str, **changes: Any) -> Problem:
    torch.manual_seed(zlib.crc32(name.encode()))
    shape = {**(SHAPES | CASES)[name], **changes}
    return make_latents(**shape) if name in CASES else make_problem(**shape)


def test_forty_shapes() -> None:
    assert len(SHAPES) >= 40


@pytest.mark.parametrize("name", SHAPES)
def test_exact(name: str, hopper: torch.device) -> None:
    dtype = BF16 if zlib.crc32(name.encode()) % 2 else FP16
    problem = make(name, dtype=dtype).to(hopper)
    assert uses_wgmma(problem)
    for num_workers in (0, 3):
        result = problem.run_and_check(num_workers=num_workers)
        assert_same_bits(result, problem.run(num_workers=num_workers))


@pytest.mark.parametrize(
    "changes",
    [
        {"group_size": 16, "num_heads_kv": 1}, {"group_size": 65, "num_heads_kv": 1},
        {"head_dim": 136}, {"page_size": 24}, {"seqlen_k": 0}, {"dtype": torch.float32},
        {"kv_dtype": torch.int8},
    ],
    ids=str,
)  # fmt: skip
def test_other_calls(changes: dict[str, Any], hopper: torch.device) -> None:
    shape = {"dtype": BF16, "group_size": 20, **changes}
    assert not uses_wgmma(make_problem(**shape).to(hopper))


@pytest.mark.parametrize("name", sorted(OTHER_KERNEL))
def test_other_latents(name: str, hopper: torch.device) -> None:
    assert not uses_wgmma(make(name).to(hopper))
