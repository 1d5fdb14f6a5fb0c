# SPDX-License-Identifier: BSD-3-Clause
"""The emulated CUDA device, and the decode kernels on it, without torch: tests/cuda_emulator."""

import re
import subprocess
from pathlib import Path

import pytest

import emulator_build
from compilation import ROOT


@pytest.fixture(scope="module")
def program() -> Path:
    return emulator_build.program()


def run(program: Path, *names: str) -> None:
    result = subprocess.run([program, *names], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_emulator(program: Path) -> None:
    """Known answers of every instruction; every kind of mistake is found."""
    run(program)


@pytest.mark.parametrize(
    "cases",
    [
        *("shared_cases", "edges", "many_workers", "short", "short_kinds", "columns_short"),
        *("int8_short", "float8_short", "row_blocks", "latents_short", "latents"),
        *("float16_latents_short", "addresses", "clusters_short", "clusters"),
        *("plans_of_clusters", "plans_of_two_levels", "plans_of_wgmma"),
        *("wgmma_short", "wgmma", "wgmma_rows_short", "wgmma_rows"),
        *("wgmma_pages_short", "wgmma_pages", "wgmma_tokens", "wgmma_again"),
    ],
)
def test_decode(program: Path, cases: str) -> None:
    run(program, f"decode_{cases}")


@pytest.mark.parametrize("header", ["ptx", "ptx_hopper"])
def test_every_instruction_has_a_host_version_and_known_answers(header: str) -> None:
    text = (ROOT / f"csrc/cuda/{header}.h").read_text()
    names = re.findall(r"__forceinline__ [\w*: ]+?[ *](\w+)\(", text)
    assert len(names) == text.count("__forceinline__") > 10
    host = (ROOT / f"tests/cuda_emulator/{header}_host.h").read_text()
    folder = ROOT / "tests/cuda_emulator"
    answers = "".join(path.read_text() for path in folder.glob("ptx_known_*.cuh"))
    for name in names:
        assert re.search(rf"\b{name}\(", host), name
        assert re.search(rf"\bcuda::{name}\b", answers), name
