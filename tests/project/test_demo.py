# SPDX-License-Identifier: BSD-3-Clause
"""scripts/demo.sh prints nothing that is not its own, and ends with a command that runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = (Path(__file__).parents[2] / "scripts/demo.sh").read_text()


@pytest.mark.deep
def test_warnings_of_torchao_are_not_shown():
    pytest.importorskip("torchao")
    (quiet,) = re.findall(r"^export TORCH_LOGS=\$\{TORCH_LOGS:-(.*)\}$", DEMO, re.MULTILINE)
    environment = {name: x for name, x in os.environ.items() if name != "TORCH_LOGS"}
    shown = [
        subprocess.run(
            [sys.executable, "-c", "import torchao.quantization"],
            env=environment | logs,
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        for logs in ({}, {"TORCH_LOGS": quiet})
    ]
    if not shown[0]:
        pytest.skip("this release of torchao warns of nothing")
    assert shown[1] == ""


def test_its_last_line_is_a_command():
    """Which is refused for its model alone."""
    (line,) = re.findall(r'^echo "\.venv/bin/python (.*)"$', DEMO, re.MULTILINE)
    words = [word.replace("DIR", "no/such/directory") for word in shlex.split(line)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no/such/directory" in done.stderr, done.stderr
