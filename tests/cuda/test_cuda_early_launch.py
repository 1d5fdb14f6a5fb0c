# SPDX-License-Identifier: BSD-3-Clause
"""What the build's switch EARLY_LAUNCH makes of a kernel, and that it is off."""

import subprocess
from pathlib import Path

import pytest

from compilation import ROOT
from sass import Code, find_tool, parse
from translated import NVCC_FLAGS, instantiation

# Instructions that touch global memory, and those after which not every thread goes the same way.
GLOBAL = r"LDG|STG|ATOMG|RED|MEMBAR|CCTL"
BRANCH = r"BRA|BRX|BSSY|EXIT|CALL"


def compiled(folder: Path, *flags: str) -> Code:
    source, cubin = folder / "kernel.cu", folder / "kernel.cubin"
    source.write_text(instantiation("bf16", 128, 8))
    options = [flag for flag in NVCC_FLAGS if flag not in ("-ptx", "-arch=compute_90")]
    command = [find_tool("nvcc"), *options, "-arch=sm_90", "-cubin", f"-I{ROOT / 'csrc'}", *flags]
    result = subprocess.run([*command, source, "-o", cubin], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    text = subprocess.run(
        [find_tool("nvdisasm"), "-c", cubin], check=True, capture_output=True, text=True
    ).stdout
    (kernel,) = parse(text)
    return kernel


@pytest.mark.deep
def test_nothing_is_read_or_written_before_the_wait(tmp_path: Path) -> None:
    kernel = compiled(tmp_path, "-DTREE_ATTENTION_EARLY_LAUNCH")
    (wait,) = kernel.positions("ACQBULK")  # griddepcontrol.wait
    assert wait < min(kernel.positions(GLOBAL))
    assert wait < min(kernel.positions(BRANCH))


@pytest.mark.deep
def test_no_kernel_waits_without_the_switch(tmp_path: Path) -> None:
    assert compiled(tmp_path).count("ACQBULK") == 0
