# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures and settings shared by all tests."""

import session  # isort: skip  # before torch, which reads the environment once

import os
import sys
import zlib
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from dry_device import dry_cuda, run_ranks_dry
from emulated import emulated_operators
from helpers import one_thread

_seed = session._seed
_share_servers = session._share_servers

TESTS = Path(__file__).parent
# For scripts/test_deep.sh as a whole; the rest of that tier is marked where it stands.
DEEP_FOLDERS = {TESTS / name for name in ("benchmarks", "cuda")}
# Of tiny models, whose operations take two threads longer than one; ranks have one anywhere.
FOLDERS_OF_MODELS = {TESTS / name for name in ("hf", "vllm", "weights")}
# The emulated device takes a minute to compile. A GPU's cases are quick where there is one.
EMULATED = pytest.param("emulated", marks=pytest.mark.deep)
GPU = pytest.param("cuda", marks=() if torch.cuda.is_available() else pytest.mark.deep)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module of a deep folder for the quick tier."""
    is_quick = config.option.markexpr == "not deep"
    return (is_quick and collection_path in DEEP_FOLDERS) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _thin_out_dry_runs(items)
    for item in items:
        in_deep_folder = not DEEP_FOLDERS.isdisjoint(item.path.parents)
        if in_deep_folder or (_needs_gpu(item) and not torch.cuda.is_available()):
            item.add_marker(pytest.mark.deep)


def _needs_gpu(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    own = (parameters.get(name) for name in ("device", "cuda_kernels"))
    return "cuda" in (*getattr(item, "fixturenames", ()), *own)


def _thin_out_dry_runs(items: list[pytest.Item]) -> None:
    """Leaves of each test that runs dry as many cases as have every parameter's every value."""
    if torch.cuda.is_available():
        return
    seen: set[tuple[str, str, str]] = set()
    kept = []
    for item in items:
        new = set()
        if _needs_gpu(item) and hasattr(item, "callspec"):
            name = item.nodeid.partition("[")[0]
            new = {(name, key, repr(x)) for key, x in item.callspec.params.items()} - seen
            if not new:
                continue
            seen |= new
        kept.append(item)
    items[:] = kept


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    with one_thread() if request.path.parent in FOLDERS_OF_MODELS else nullcontext():
        yield


@pytest.fixture(params=["cpu", EMULATED, GPU])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Runs a test on every backend that this machine and this build of the extension have for the
    operator `OP` of the test's module, by default lean_decode; and on CPU tensors with the CUDA
    kernels on an emulated device. Without a GPU its cases run dry."""
    yield from _device(request)


@pytest.fixture(params=[EMULATED, GPU])
def cuda_kernels(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Runs a test with the CUDA kernels wherever they run: emulated, and on a GPU, or dry."""
    yield from _device(request)


def _device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "emulated":
        # Blocks and threads take turns in another order in every test.
        with emulated_operators(seed=zlib.crc32(request.node.nodeid.encode())):
            yield torch.device("cpu")
    elif request.param == "cuda":
        yield request.getfixturevalue("cuda")
    else:
        yield _usable_device(request, request.param)


@pytest.fixture
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """For tests of what only a GPU can show. Without one they run dry, in the deep tier, so that
    none is first run on a GPU; those marked `gpu` cannot."""
    if torch.cuda.is_available() or os.environ.get("REQUIRE_CUDA") == "1":
        yield _usable_device(request, "cuda")
        return
    for marker in request.node.iter_markers("gpu"):
        pytest.skip(f"a dry run has no {marker.args[0]}")
    if hasattr(request.module, "run_ranks"):
        monkeypatch.setattr(request.module, "run_ranks", run_ranks_dry)
    with dry_cuda(seed=zlib.crc32(request.node.nodeid.encode())):
        yield torch.device("cuda", 0)


def _usable_device(request: pytest.FixtureRequest, name: str) -> torch.device:
    op = getattr(request.module, "OP", "lean_decode")
    reason = None
    if name == "cuda" and not torch.cuda.is_available():
        reason = "no CUDA device"
    elif not torch._C._dispatch_has_kernel_for_dispatch_key(f"tree_attention::{op}", name.upper()):
        reason = f"the extension has no {op} for {name}"
    if reason is not None:
        # scripts/gpu_check.sh sets it: skipping all tests is no success there.
        if os.environ.get("REQUIRE_CUDA") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return torch.device(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport]:
    """After some errors a device answers every later call of the process with the same error. A
    worker of pytest-xdist then ends, which fails this test, and another one runs the rest."""
    report = yield
    if report.failed and "PYTEST_XDIST_WORKER" in os.environ and _device_is_lost():
        print(f"{item.nodeid}: {report.longreprtext}", file=sys.__stderr__, flush=True)
        os._exit(1)
    return report


def _device_is_lost() -> bool:
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
