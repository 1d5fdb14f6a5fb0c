# SPDX-License-Identifier: BSD-3-Clause
"""The PTX instructions of csrc/cuda/ptx.h and ptx_hopper.h on a GPU: the emulator's answers."""

import subprocess
from pathlib import Path

import pytest
import torch

from compilation import ROOT
from sass import find_tool


def compile_program(directory: Path, architecture: str) -> Path:
    program = directory / f"ptx_on_device_{architecture}"
    result = subprocess.run(
        [find_tool("nvcc"), "-std=c++20", "-O1",
         f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
         "-Icsrc", "-Itests/cpp", "tests/cuda_emulator/ptx_on_device.cu", "-o", program],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return program


@pytest.mark.parametrize("architecture", ["80", "90", "90a"])
def test_compiles(architecture, tmp_path):
    compile_program(tmp_path, architecture)


@pytest.mark.gpu("program that runs on it")
def test_known_answers(cuda, tmp_path):
    major, minor = torch.cuda.get_device_capability(cuda)
    architecture = f"{major}{minor}"
    program = compile_program(tmp_path, "90a" if architecture == "90" else architecture)
    result = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout == "all answers are right\n", result.stdout
