# SPDX-License-Identifier: BSD-3-Clause
"""examples/long_context.py: one process has no room and two have, and a wrong result fails it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ranks_of_commands import started

pytestmark = pytest.mark.deep

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "long_context.py"
SHORT = ("--tokens", "2")


def cells(output: str, name: str) -> list[str]:
    (line,) = (line for line in output.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.strip("│").split("│")]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_one_process_has_no_room_and_two_are_right() -> None:
    done = run("-m", "tree_attention", "run", "-n", "2", str(PROGRAM), *SHORT)
    assert done.returncode == 0, done.stderr[-3000:]
    mib = {"HuggingFace, 1 host": 512, "ours, 1 host": 512, "ours, 2 hosts": 256}
    for name, expected in mib.items():
        _, ms, spread, cache, right = cells(done.stdout, name)
        low, high = map(float, spread.split(" to "))
        assert 0 < low <= float(ms) <= high and right == "yes"
        assert expected <= int(cache) <= expected + 1
    for sentence in (
        "131,072 tokens have 512 MiB of keys and values. Each process may take 384 MiB for them:",
        "one process is refused: ",
        "2 processes take 256 MiB each, and decode the next token.",
        "Moving keys and values to the query instead would cost 256 MiB.",
        "All hosts have the same logits, bit for bit",
    ):
        assert sentence in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith(("2 hosts are ", "Other programs used ")), last


ONE_WRONG_RANK = f"""
import os, sys
sys.path.insert(0, {str(PROGRAM.parent)!r})
import long_context, tree_attention.decode_call as decode
right = decode.lean_decode
if os.environ["RANK"] == "1":
    decode.lean_decode = lambda q, k, v, *args, **options: right(q, k, -v, *args, **options)
sys.exit(long_context.main())
"""


def test_a_wrong_row_fails() -> None:
    """The two processes' exchange is right and one rank's attention is not."""
    with started(SHORT, program=ONE_WRONG_RANK) as ranks:
        root, other = (ranks.wait_for_end(rank) for rank in range(2))
    assert (root.status, other.status) == (1, 0), (root, other)
    assert cells(root.stdout, "ours, 1 host")[-1] == "yes"
    assert cells(root.stdout, "ours, 2 hosts")[-1] == "WRONG"
    assert "WRONG: the hosts' logits differ" in root.stdout


def test_one_process_is_told_to_start_two() -> None:
    done = run(str(PROGRAM))
    assert done.returncode == 2
    assert "start it with `tree-attention run -n 2 examples/long_context.py`" in done.stderr
