# SPDX-License-Identifier: BSD-3-Clause
"""examples/long_context.py: two processes fill its table, and a wrong result fails it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "long_context.py"
TINY = ("--context", "300", "--layers", "1", "--tokens", "2")


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT / "python"), str(PROGRAM.parent))),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    return subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(program), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def cells(output: str, name: str) -> list[str]:
    (line,) = (line for line in output.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_every_row_is_measured_and_right() -> None:
    done = run(PROGRAM, *TINY)
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


def test_a_wrong_row_fails(tmp_path: Path) -> None:
    """The two processes' exchange is right and one rank's attention is not."""
    program = tmp_path / "one_wrong_rank.py"
    program.write_text(
        "import os, sys\n"
        "import long_context, tree_attention.decode as decode\n"
        "right = decode.lean_decode\n"
        "if os.environ['RANK'] == '1':\n"
        "    decode.lean_decode = lambda q, k, v, *args, **options: "
        "right(q, k, -v, *args, **options)\n"
        "sys.exit(long_context.main())\n"
    )
    done = run(program, *TINY)
    assert done.returncode != 0
    assert cells(done.stdout, "ours, 1 process")[-1] == "yes"
    assert cells(done.stdout, "ours, 2 processes")[-1] == "WRONG"
    assert cells(done.stdout, "tree, one layer")[-1] == "WRONG"


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
