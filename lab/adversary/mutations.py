# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the fuzzer: the package says of some statements what goes wrong "without this". The
fuzzer must find that in a copy without such a statement.

python -m pytest lab/tests/adversary/test_mutations.py
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from package_copy import copy_package

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/tree_attention"
WITHOUT = re.compile(r"^ *# Without this: (.*)\.$", re.MULTILINE)


@dataclass(frozen=True)
class Mutation:
    says: str  # the comment: what goes wrong without the statement after it
    part: str
    kind: str
    finding: str  # a pattern of what the fuzzer finds
    num_cases: int = 12
    in_tests: bool = False

    @property
    def file(self) -> Path:
        """The file of the package that has the comment."""
        (file,) = (x for x in PACKAGE.rglob("*.py") if self.says in WITHOUT.findall(x.read_text()))
        return file.relative_to(PACKAGE)

    def undone(self, text: str) -> str:
        """The source without the statement, or the line inside of one, after the comment."""
        comment = f"# Without this: {self.says}."
        lines = text.splitlines(keepends=True)
        (first,) = (i + 1 for i, line in enumerate(lines) if line.strip() == comment)
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt))
        found = [node for node in nodes if node.lineno == first + 1]
        end, place = first + 1, ""
        if found:
            end, place = found[0].end_lineno or end, " " * found[0].col_offset + "pass\n"
        return "".join([*lines[:first], place, *lines[end:]])


MUTATIONS = (
    Mutation(
        "ranks take messages of other threads for theirs",
        "threads", "in_another_order", "off by|not noticed", 4, in_tests=True,
    ),
    Mutation(
        "a forked child uses the connections of its parent", "ranks", "fork", "a forked child", 2
    ),
    Mutation(
        "a call with an impossible out_dtype sends first",
        "ranks", "wrong_reduction", "out_dtype: torch", 100, in_tests=True,
    ),
    Mutation(
        "a state without columns is sent",
        "ranks", "wrong_reduction", "o: without head dim", 200,
    ),
    Mutation(
        "a deadline may be any number of seconds", "ranks", "timeout", "timeout: ", in_tests=True
    ),
    Mutation("slots below 0 have an owner", "layouts", "call", "owner below 0", 100),
    Mutation(
        "a file of another save is loaded",
        "snapshots", "mix", "never saved was loaded", in_tests=True,
    ),
    Mutation(
        "ranks that repeat the last call wait for this one's messages",
        "ranks", "change", "no answer|no word|off by",
    ),
    Mutation(
        "ranks return different tokens",
        "differing", "criteria", "other tokens|is off|nobody|accepted", 8,
    ),
    Mutation(
        "a damaged index is followed",
        "snapshots", "damage", "KeyError|never saved was loaded", 24,
    ),
    Mutation(
        "the heads of another tensor rank are loaded",
        "snapshots", "swap_places", "never saved was loaded", 4,
    ),
    Mutation(
        "a forked child counts a session, of which its parent knows nothing",
        "ranks", "fork", "no answer|no word",
    ),
    Mutation(
        "a rank number of other digits is taken, or any text at all",
        "environments", "wrong", "Traceback|is named", in_tests=True,
    ),
    Mutation(
        "tokens are appended to the memory that the caller put there",
        "callers", "replaced", "logits are off", 60,
    ),
    Mutation(
        "rows read what the next tokens put in place of their document",
        "sessions", "documents", "below the best|are off", 8,
    ),
)  # fmt: skip


def report(mutation: Mutation, folder: Path) -> str:
    """What the fuzzer says of a copy of the package in which the mutation is made."""
    file = copy_package(folder) / mutation.file
    file.write_text(mutation.undone(file.read_text()))
    cases = ["--only", mutation.part, "--kind", mutation.kind, "--seed", "3"]
    cases += ["--first", "--case", f"0-{mutation.num_cases - 1}"]
    run = subprocess.run(
        [sys.executable, "-m", "lab.adversary", *cases],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode in (0, 1) and run.stdout, run.stderr
    return run.stdout if run.returncode else ""


def is_found(mutation: Mutation, text: str) -> bool:
    return "python -m lab.adversary --only" in text and bool(re.search(mutation.finding, text))


def main() -> int:
    num_missed = 0
    for mutation in MUTATIONS:
        with tempfile.TemporaryDirectory() as folder:
            found = is_found(mutation, report(mutation, Path(folder)))
        num_missed += not found
        print(f"{'found ' if found else 'MISSED'} {mutation.says}", flush=True)
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
