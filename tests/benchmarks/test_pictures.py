# SPDX-License-Identifier: BSD-3-Clause
"""The pictures of README.md and docs/ show the tables of benchmarks/results as they are now."""

import re
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import pictures
from benchmarks.harness.results import digest, read_table
from benchmarks.pictures import AT_LINE_RATE, cache_memory, contexts

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_picture_shows_the_results(name):
    with Image.open(ROOT / "docs" / name) as image:
        shown = image.info["Comment"]
    assert shown == digest(pictures.PICTURES[name].values()), (
        f"docs/{name} is older than benchmarks/results: run python benchmarks/pictures.py"
    )


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_picture_is_drawn_wide_and_shown_on_a_page(name, tmp_path):
    assert pictures.main([name, "--out", str(tmp_path)]) == 0
    with Image.open(tmp_path / name) as image:
        assert image.width == 1800 and 400 < image.height < 900
    assert any(re.search(rf"!\[[^\]]+\]\((docs/)?{name}\)", page.read_text()) for page in PAGES)


def test_unknown_picture_is_refused(capsys):
    with pytest.raises(SystemExit):
        pictures.main(["none.png"])
    assert "no picture none.png" in capsys.readouterr().err


def test_line_rate_of_the_ring_is_that_of_the_notes():
    """The notes print the longest ring at line rate in seconds."""
    for cluster, lines in contexts().items():
        place = cluster.replace(" p=", "/")
        (note,) = (x for x in read_table("contexts").notes if x.startswith(f"{place}: ring / tree"))
        seconds = float(re.search(r"\(there ([\d.]+) s", note)[1])
        assert lines[AT_LINE_RATE][-1][1] / 1e3 == pytest.approx(seconds, rel=5e-3)


def test_memory_is_that_of_the_planner_page():
    """docs/planning.md shows what `plan` prints for 16 ranks."""
    held = cache_memory()
    page = (ROOT / "docs/planning.md").read_text()
    line = re.search(r"cache and weights, largest T \* +([\d.]+) +([\d.]+) ", page)
    assert [f"{held[x][3]:.3g}" for x in ("weights", "bf16")] == [line[1], line[2]]
