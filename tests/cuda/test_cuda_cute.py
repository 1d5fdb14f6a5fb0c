# SPDX-License-Identifier: BSD-3-Clause
"""Layouts and descriptors of wgmma's operands, as the kernels write them and as the emulated device
reads them, compared with NVIDIA's CuTe: with another reading of the PTX ISA than this library's."""

import importlib.util
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import emulator_build
from compilation import ROOT, Compiler
from distributed import AMPLE_SECONDS

CUDA = Path("/usr/local/cuda/include")
PRODUCTS = Path("tests/cuda_emulator/products.cpp")


@pytest.fixture(scope="module")
def cute() -> list[Path]:
    """The objects of what CuTe says; skips the tests without its headers or CUDA's."""
    package = importlib.util.find_spec("cutlass_library")
    if package is None or package.origin is None:
        pytest.skip("no nvidia-cutlass (requirements-cute.txt)")
    if not (CUDA / "cccl").exists():
        pytest.skip(f"no CUDA headers in {CUDA}")
    headers = Path(package.origin).parent / "source" / "include"
    paths = [f"-I{path}" for path in (headers, CUDA, CUDA / "cccl")]
    compiler = Compiler(ROOT / "build" / "cute", ["-std=c++17", "-w", *paths])
    return compiler.compile([Path("tests/cuda/cute/layouts.cpp")])


def check(cute: list[Path], folder: Path, root: Path) -> subprocess.CompletedProcess[str]:
    """What the comparison says of the sources in `root`."""
    flags = [*emulator_build.FLAGS, "-Itests/cuda/cute", "-O0"]
    compiler = replace(emulator_build.COMPILER, build=folder, flags=flags, root=root)
    compared = [Path("tests/cuda/cute/check_layouts.cpp"), PRODUCTS]
    rest = [source for source in emulator_build.EMULATOR if source != PRODUCTS]
    # First: of inline functions the linker takes the first it meets.
    objects = [*compiler.compile(compared), *emulator_build.COMPILER.compile(rest)]
    program = compiler.link("check_layouts", [*objects, *cute])
    return subprocess.run([program], capture_output=True, text=True, timeout=AMPLE_SECONDS)


def test_layouts_are_those_of_cute(cute: list[Path], tmp_path: Path) -> None:
    result = check(cute, tmp_path, ROOT)
    assert result.returncode == 0, result.stderr
    assert "26624 elements" in result.stdout


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("csrc/cuda/matrix_descriptor.cuh", "byte ^ row % 8 * 16", "byte ^ row % 4 * 16"),
        ("csrc/cuda/matrix_descriptor.cuh", "stride_bytes = 1024", "stride_bytes = 512"),
        ("tests/cuda_emulator/products.h", "k / 8 * stride", "k / 8 * leading"),
        ("tests/cuda_emulator/products.h", "i / 2 % 2 * 8", "i / 4 % 2 * 8"),
    ],
)
def test_another_layout_is_found(
    cute: list[Path], tmp_path: Path, file: str, right: str, wrong: str
) -> None:
    for folder in ("csrc", "tests/cuda", "tests/cuda_emulator", "tests/cpp"):
        shutil.copytree(ROOT / folder, tmp_path / "root" / folder)
    text = (ROOT / file).read_text()
    assert text.count(right) == 1
    (tmp_path / "root" / file).write_text(text.replace(right, wrong))
    result = check(cute, tmp_path / "build", tmp_path / "root")
    assert result.returncode == 1 and "check_layouts.cpp" in result.stderr, result.stderr
