# SPDX-License-Identifier: BSD-3-Clause
"""Kernels begin while the one ahead of them ends, and wait for it (compute capability 9.0)."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from compilation import ROOT
from sass import Code, find_tool, parse, text_of
from translated import NVCC_FLAGS, instantiation

# Instructions that touch global memory, and those after which not every thread goes the same way.
GLOBAL = r"LD(\.|$)|LDG|ST(\.|$)|STG|ATOM|RED|MEMBAR|CCTL"
BRANCH = r"BRA|BRX|JMP|EXIT|CALL"
WAIT, TRIGGER = "ACQBULK", "PREEXIT"  # griddepcontrol.wait and .launch_dependents

# Each kind of tile: 16 bits with 8 rows and with several row groups, pairs of warps that split the
# columns, 8 bits with 8 rows and with 16, latents with 16 rows and with 64, and float32.
KERNELS = [
    *(("bf16", 128, 8), ("bf16", 64, 128), ("fp16", 256, 16)),
    *(("bf16_int8", 128, 8), ("fp16_float8", 64, 16)),
    *(("fp16", 576, 16), ("bf16", 576, 64), ("fp32", 64, 16)),
]

CALL = "  griddepcontrol_wait();\n"
TRIGGER_CALL = "  griddepcontrol_launch_dependents();\n"
FIRST_READ = "  if (!cut_line(params, schedule)) return;\n"
MISTAKES = {
    "nothing waits": {CALL: ""},
    "the next launch begins when all blocks have ended": {TRIGGER_CALL: ""},
    "the next launch begins when the first has waited": {
        TRIGGER_CALL: "",
        CALL: CALL + TRIGGER_CALL,
    },
    "the ranges are read before the wait": {CALL: "", FIRST_READ: FIRST_READ + CALL},
    "one thread waits": {CALL: CALL.replace(" griddep", " if (threadIdx.x == 0) griddep")},
    "blocks wait but for the first": {CALL: CALL.replace(" griddep", " if (blockIdx.x) griddep")},
}


def compiled(
    folder: Path, kernel: tuple[str, int, int], architecture: str = "sm_90",
    csrc: Path = ROOT / "csrc",
) -> Code:  # fmt: skip
    source, cubin = folder / "kernel.cu", folder / "kernel.cubin"
    source.write_text(instantiation(*kernel))
    command = [find_tool("nvcc"), *NVCC_FLAGS, f"-arch={architecture}", "-cubin", f"-I{csrc}"]
    result = subprocess.run([*command, source, "-o", cubin], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (code,) = parse(text_of(cubin.read_bytes()))
    return code


def mistake(code: Code) -> str:
    """What is wrong with how a kernel waits and lets the next one begin, or nothing."""
    triggers = code.positions(TRIGGER)
    waits = code.positions(WAIT)
    if len(waits) != 1:
        return f"{len(waits)} waits"
    if len(triggers) != 1 or triggers[0] > waits[0]:
        return f"triggers at {triggers}, the wait at {waits[0]}"
    for line in code.lines:
        if re.search(f"@.*({WAIT}|{TRIGGER})", line):
            return f"not of all threads: {line.strip()}"
    for pattern in (GLOBAL, BRANCH):
        first = code.positions(pattern)[0]
        if first < waits[0]:
            return f"{code.instructions[first]} is before the wait"
    return ""


@pytest.mark.deep
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: "-".join(map(str, kernel)))
def test_nothing_is_read_or_written_before_the_wait(kernel: tuple, tmp_path: Path) -> None:
    assert mistake(compiled(tmp_path, kernel)) == ""


@pytest.mark.deep
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name: str, tmp_path: Path) -> None:
    csrc = shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    file = csrc / "cuda/decode/lean_decode.cuh"
    text = file.read_text()
    for old, new in MISTAKES[name].items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file.write_text(text)
    assert mistake(compiled(tmp_path, KERNELS[0], csrc=csrc)) != "", "not found"


@pytest.mark.deep
def test_older_devices_do_not_wait(tmp_path: Path) -> None:
    assert compiled(tmp_path, KERNELS[0], "sm_80").count(f"{WAIT}|{TRIGGER}") == 0
