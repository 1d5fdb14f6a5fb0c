# SPDX-License-Identifier: BSD-3-Clause
"""A part for the tests of the runner: the ranks of its third case differ.

Where a file is named, one fault depends on how often the case was played.
"""

from __future__ import annotations

from pathlib import Path

from .cases import Case


def world_size(case: Case) -> int:
    return 2


def play(case: Case, rank: int) -> str:
    if case.index < 2:
        return "fine"
    if not case.kind:
        return f"rank {rank}" if case.index == 2 else "fine"
    # What the second and third time says, in words; the first time is a fault.
    file, *later = case.kind.split(",")
    path = Path(f"{file}.{rank}")
    times = len(path.read_text()) if path.exists() else 0
    path.write_text("." * (times + 1))
    said = ["a fault after 1.5 s", *later][times]
    assert said == "fine", said
    return said
