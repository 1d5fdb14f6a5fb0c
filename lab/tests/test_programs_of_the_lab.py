# SPDX-License-Identifier: BSD-3-Clause
"""The programs of the lab run as modules of the checkout, as its README says."""

import re
import subprocess
import sys

import pytest

from benchmarks.harness.report import ROOT

README = (ROOT / "lab/README.md").read_text()
MODULES = sorted(set(re.findall(r"-m (lab[\w.]*)", README)))
# They take no options.
PLAIN = {"lab.adversary.mutations", "lab.simulation.estimate", "lab.simulation.planning"}


@pytest.mark.parametrize("module", [name for name in MODULES if name not in PLAIN])
def test_help_of_a_program(module: str) -> None:
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr


def test_every_folder_is_named() -> None:
    folders = {path.parent.name for path in (ROOT / "lab").glob("*/__init__.py")}
    assert folders == {name.split(".")[1] for name in MODULES}
