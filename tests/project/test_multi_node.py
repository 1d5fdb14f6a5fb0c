# SPDX-License-Identifier: BSD-3-Clause
"""The commands of README.md and docs/multi_node.md are ones that torchrun and ours understand."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from commands import UNKNOWN
from tree_attention.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/multi_node.md").read_text()
README = (ROOT / "README.md").read_text()
OF_SEVERAL_HOSTS = r"torchrun --nnodes(?:[^\n`]|(?<=\\)\n)*"
LINES = re.findall(OF_SEVERAL_HOSTS, PAGE) + re.findall(OF_SEVERAL_HOSTS, README)


def parsed(line: str) -> tuple[str, list[str]]:
    """The nodes that torchrun would wait for, and what it runs."""
    words = shlex.split(line.replace("\\\n", " "), comments=True)[1:]
    # What the shell would put in.
    known = {"$NODE_RANK": "0", "$SLURM_NNODES": "2", "$SLURM_JOB_ID": "7"}
    words = [known.get(word, word).replace("$first", "host0") for word in words]
    arguments = get_args_parser().parse_args(words)
    script = arguments.training_script
    if arguments.module:
        assert script == "tree_attention"
        return arguments.nnodes, arguments.training_script_args
    return arguments.nnodes, [script, *arguments.training_script_args]


@pytest.mark.deep
@pytest.mark.parametrize("line", sorted(set(LINES)))
def test_lines_of_torchrun(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    nodes, words = parsed(line)
    assert nodes == "2"
    if words[0].startswith("benchmarks/"):
        command = [sys.executable, *words, "--unheard-of"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 2 and re.search(f"{UNKNOWN}$", result.stderr.strip())
        return
    if words == ["chat.py"]:  # README's program
        assert "`chat.py`" in README
        return
    assert words[0] in COMMANDS
    if words[0] == "calibrate":
        with pytest.raises(SystemExit, match="2"):
            main([*words, "--unheard-of"])
        assert re.search(f"{UNKNOWN}$", capsys.readouterr().err.strip())


def test_commands_of_pages_are_there() -> None:
    """By the name of the program that the package installs."""
    pages = [page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    found = re.findall(r"tree-attention +(\w[\w-]*)", "\n".join(pages))
    assert {"run", "doctor", "generate"} <= {*found} <= {*COMMANDS}


def test_all_lines_are_seen() -> None:
    assert len(LINES) == len(re.findall("(?<!`)torchrun --nnodes", PAGE + README)) == 7
