# SPDX-License-Identifier: BSD-3-Clause
"""The commands of docs/multi_node.md are ones that torchrun and the library understand."""

import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tree_attention.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/multi_node.md").read_text()
LINES = re.findall(r"torchrun --(?:[^\n]|(?<=\\)\n)*", PAGE)


def parsed(line: str) -> tuple[str, list[str]]:
    """The nodes that torchrun would wait for, and what it runs."""
    words = shlex.split(line.replace("\\\n", " "))[1:]
    # What the shell would put in.
    known = {"$NODE_RANK": "0", "$SLURM_NNODES": "2", "$SLURM_JOB_ID": "7"}
    words = [known.get(word, word).replace("$first", "host0") for word in words]
    arguments = get_args_parser().parse_args(words)
    assert arguments.module and arguments.training_script == "tree_attention"
    return arguments.nnodes, arguments.training_script_args


@pytest.mark.parametrize("line", LINES)
def test_lines_of_torchrun(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    nodes, words = parsed(line)
    assert nodes == "2" and words[0] in COMMANDS
    if words[0] in ("bench", "calibrate"):
        # Only what is added here is unknown.
        with pytest.raises(SystemExit, match="2"):
            main([*words, "--unheard-of"])
        assert capsys.readouterr().err.strip().endswith("unrecognized arguments: --unheard-of")


def test_all_lines_are_seen() -> None:
    assert len(LINES) == PAGE.count("torchrun --") - PAGE.count("`torchrun --") == 6
