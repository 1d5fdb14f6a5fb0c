# SPDX-License-Identifier: BSD-3-Clause
"""examples/long_context.py: two processes fill its table, and a wrong result fails it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ranks_of_commands import started

pytestmark = pytest.mark.deep

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "long_context.py"
TINY = ("--context", "300", "--layers", "1", "--tokens", "2")


def cells(output: str, name: str) -> list[str]:
    (line,) = (line for line in output.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_every_row_is_measured_and_right() -> None:
    launcher = "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    environment = {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(PROGRAM), *TINY],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sent = {}
    for name in ("sdpa, DynamicCache", "sdpa, StaticCache", "ours, 1 process"):
        _, processes, ms, _, sent[name], right = cells(done.stdout, name)
        assert processes.startswith("1 x ") and float(ms) > 0 and right == "yes"
    for name in ("ours, 2 processes", "tree, one layer", "ring, one layer"):
        _, processes, ms, _, sent[name], right = cells(done.stdout, name)
        assert processes.startswith("2 x ") and float(ms) > 0 and right == "yes"
    # o and lse of 32 heads of 64 in float32, and 150 or so keys and values of 8 heads in bfloat16
    assert sent["ours, 1 process"] == "0"
    assert sent["ours, 2 processes"] == sent["tree, one layer"] == "8"
    assert 128 * 2 <= int(sent["ring, one layer"]) <= 172 * 2 + 2
    assert "WRONG" not in done.stdout
    for sentence in ("ours, 2 processes: each process holds 1/2 of the keys", "ring, one layer: "):
        assert sentence in done.stdout


ONE_WRONG_RANK = f"""
import os, sys
sys.path.insert(0, {str(PROGRAM.parent)!r})
os.environ["COLUMNS"] = "200"
import long_context, tree_attention.decode_call as decode
right = decode.lean_decode
if os.environ["RANK"] == "1":
    decode.lean_decode = lambda q, k, v, *args, **options: right(q, k, -v, *args, **options)
sys.exit(long_context.main())
"""


def test_a_wrong_row_fails() -> None:
    """The two processes' exchange is right and one rank's attention is not."""
    with started(TINY, program=ONE_WRONG_RANK) as ranks:
        root, other = (ranks.wait_for_end(rank) for rank in range(2))
    assert (root.status, other.status) == (1, 0), (root, other)
    assert cells(root.stdout, "ours, 1 process")[-1] == "yes"
    assert cells(root.stdout, "ours, 2 processes")[-1] == "WRONG"
    assert cells(root.stdout, "tree, one layer")[-1] == "WRONG"


def test_one_process_is_told_to_start_two() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert "start it with torchrun --nproc-per-node 2" in done.stderr
