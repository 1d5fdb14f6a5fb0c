# SPDX-License-Identifier: BSD-3-Clause
"""The PTX instructions of csrc/cuda/ptx.h on a GPU: the answers that the emulator gives, too."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
CUDA_HOME = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))


def compile_program(directory: Path, architecture: str) -> Path:
    nvcc = shutil.which("nvcc", path=f"{os.environ['PATH']}{os.pathsep}{CUDA_HOME / 'bin'}")
    if nvcc is None:
        pytest.skip("nvcc was not found")
    program = directory / f"ptx_on_device_{architecture}"
    result = subprocess.run(
        [nvcc, "-std=c++20", "-O1", f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
         "-Icsrc", "-Itests/cpp", "tests/cuda_emulator/ptx_on_device.cu", "-o", program],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return program


@pytest.mark.parametrize("architecture", ["80", "90a"])
def test_compiles(architecture, tmp_path):
    compile_program(tmp_path, architecture)


def test_known_answers(cuda, tmp_path):
    major, minor = torch.cuda.get_device_capability(cuda)
    architecture = "90a" if (major, minor) == (9, 0) else f"{major}{minor}"
    program = compile_program(tmp_path, architecture)
    result = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout == "all answers are right\n", result.stdout
