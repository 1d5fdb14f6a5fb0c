# SPDX-License-Identifier: BSD-3-Clause
"""examples/long_context.py: one process has no room and two have, and a wrong result fails it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distributed import AMPLE_SECONDS
from examples.long_context import MEASURED, ONE, WIDE, Demo, Row, speed
from ranks_of_commands import started
from tree_attention.cli.world import World

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
        timeout=AMPLE_SECONDS,
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
    footnote = r"one process with all 2 threads takes [\d.]+ ms \([\d.]+ to [\d.]+\)\."
    assert re.search(footnote, done.stdout)
    *_, speed, last = done.stdout.splitlines()
    assert speed.startswith(("2 hosts are ", "2 hosts had no more", "Other programs used ")), speed
    assert last == "2 hosts decode what one has no room for, with 1/2 of the cache each."


@pytest.mark.parametrize(
    ("others", "seconds", "says"),
    [
        (0.0, 1.0, r"2 hosts are 2\.00 times as fast as one \(2\.00 to 4\.00, token by token\)\. "),
        (0.0, 9.0, r"2 hosts had no more speed than one on this machine\. Here they read one "),
        (9.0, 1.0, r"Other programs used 9\.0 of this machine's \d+ processors, so that 2 "),
    ],
)
def test_no_verdict_is_below_one(others: float, seconds: float, says: str) -> None:
    demo = object.__new__(Demo)
    demo.world, demo.threads, demo.others = World(0, 2), 1, others
    demo.together = "ours, 2 hosts"
    rows = {ONE: [2.0, 2.0, 4.0], WIDE: [1.0] * 3, demo.together: [seconds] * 3}
    demo.rows = {name: Row(0, seconds=times) for name, times in rows.items()}
    assert re.match(says, speed(demo))
    assert not re.search(r"\b0\.\d", speed(demo))


def test_what_was_measured_is_in_the_results() -> None:
    page = (ROOT / "benchmarks/results/scaling.md").read_text()
    ms = {
        name.strip(): float(row.split("|")[3])
        for name, row in re.findall(r"^\| bare/\d \| (.*?) (\|.*)", page, re.MULTILINE)
    }
    one = ms["1 process, 1 thread"]
    split = [one / ms[f"weights split, tensor_parallel_size {size}"] for size in (1, 2)]
    assert "{:.2f} times as fast, {:.2f} with split heads".format(*split) in MEASURED


ONE_WRONG_RANK = f"""
import os, sys
sys.path.insert(0, {str(PROGRAM.parent)!r})
import long_context, tree_attention.decode as decode
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


SLOW_ROOT = f"""
import functools, sys, time
sys.path.insert(0, {str(PROGRAM.parent)!r})
import long_context
from tree_attention.weights.mesh import Mesh
Mesh.__init__ = functools.partialmethod(Mesh.__init__, timeout=8.0)
find_truth = long_context.Demo.find_truth
long_context.Demo.find_truth = lambda demo: (find_truth(demo), demo.world.root and time.sleep(10))
sys.exit(long_context.main())
"""


def test_the_others_wait_for_what_the_first_computes_alone() -> None:
    """However long it takes on a busy machine: an exchange would end them."""
    with started(SHORT, program=SLOW_ROOT) as ranks:
        ended = [ranks.wait_for_end(rank) for rank in range(2)]
    assert [rank.status for rank in ended] == [0, 0], ended


ALONE = f"""
import sys
sys.path.insert(0, {str(PROGRAM.parent)!r})
import long_context
sys.exit(long_context.main())
"""


def test_one_process_is_told_to_start_two() -> None:
    with started([], 0, program=ALONE) as ranks:
        ended = ranks.wait_for_end(0)
    assert ended.status == 2
    assert "start it with `tree-attention run -n 2 examples/long_context.py`" in ended.stderr
