# SPDX-License-Identifier: BSD-3-Clause
"""The pictures of lab/papers show what the algorithms compute now."""

from pathlib import Path

import pytest

from benchmarks.harness.results import digest, read_table
from benchmarks.pictures import digest_of, main
from lab.papers.pictures import PICTURES, algorithm_4, schedules

FOLDER = Path(__file__).parents[2] / "papers"


@pytest.mark.parametrize("name", PICTURES)
def test_picture_shows_what_is_computed(name, tmp_path):
    shown = digest_of(FOLDER / name)
    assert shown == digest(PICTURES[name].values()), "run python -m lab.papers.pictures"
    assert f"]({name})" in (FOLDER / "README.md").read_text()
    assert main([name, "--out", str(tmp_path)], PICTURES) == 0
    assert digest_of(tmp_path / name) == shown


def test_schedules_run_every_tile_once():
    for rows in schedules().values():
        run = sorted((head, tile) for _, head, begin, end in rows for tile in range(begin, end))
        assert run == [(head, tile) for head in range(2) for tile in range(5)]


def test_outcomes_are_a_part_of_the_counted_ones():
    (printed,) = (row for row in read_table("algorithm_4").rows if row["schedule"] == "AsPrinted")
    drawn = [kind for grid in algorithm_4().values() for row in grid for kind in row]
    counted = {"right": "right", "wrong": "loses or mixes tiles", "hangs": "hangs"}
    for kind, heading in counted.items():
        assert 0 < drawn.count(kind) < int(printed[heading].replace(",", ""))
