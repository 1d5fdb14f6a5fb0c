# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures and settings shared by all tests."""

import os

# Threads sleep at a barrier instead of spinning: several times faster where ranks, or other work,
# share the cores. Read once, when torch loads; spawned ranks inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings

# The same examples in every run and no deadline: a busy machine fails no test.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("repeatable")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Runs a test on every backend that this machine and this build of the extension have for the
    operator `OP` of the test's module, by default lean_decode."""
    op = getattr(request.module, "OP", "lean_decode")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if not torch._C._dispatch_has_kernel_for_dispatch_key(
        f"tree_attention::{op}", request.param.upper()
    ):
        pytest.skip(f"the extension has no {op} for {request.param}")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
