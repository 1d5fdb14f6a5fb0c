# SPDX-License-Identifier: BSD-3-Clause
"""docs/gpu.md: its program runs on two ranks of the fake device, with Gloo and a tiny model in the
place of NCCL and the large one."""

from textwrap import indent

import pytest

from test_readme import ROOT, python_program, run

pytest.importorskip("transformers")

PAGE = ROOT / "docs/gpu.md"
FAKE = f"""
import sys
import torch
sys.path.append("{ROOT / "tests"}")
from fake_device import fake_cuda

torch.cuda.set_device = lambda index: None
with fake_cuda():
"""


@pytest.mark.deep
def test_program_runs_on_the_fake_device() -> None:
    program = python_program(PAGE).strip()
    for old, new in (
        ("nccl", "gloo"),
        ("meta-llama/Llama-3.1-8B-Instruct", "examples/passkey-llama"),
    ):
        assert program.count(f'"{old}"') == 1
        program = program.replace(old, new)
    assert 'device="cuda"' in program
    printed = run(FAKE + indent(program, "    "), 2)
    assert printed.strip() == "48213"  # from one rank alone
