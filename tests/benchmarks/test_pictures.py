# SPDX-License-Identifier: BSD-3-Clause
"""The pictures of README.md and docs/ show the tables of benchmarks/results as they are now."""

import re
from pathlib import Path

import pytest

from benchmarks import pictures
from benchmarks.harness.results import digest, read_table
from benchmarks.pictures import AT_LINE_RATE, cache_memory, contexts

ROOT = Path(__file__).parents[2]
DRAWN = [
    path
    for folder in ("docs", "lab/papers")
    for path in sorted((ROOT / folder).glob("*.svg"))
    if "dc:description" in path.read_text()  # by matplotlib
]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_picture_shows_the_results(name):
    shown = pictures.digest_of(ROOT / "docs" / name)
    assert shown == digest(pictures.PICTURES[name].values()), (
        f"docs/{name} is older than benchmarks/results: run python benchmarks/pictures.py"
    )


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_picture_is_drawn_and_shown_on_a_page(name, tmp_path):
    assert pictures.main([name, "--out", str(tmp_path)]) == 0
    assert pictures.digest_of(tmp_path / name) == pictures.digest_of(ROOT / "docs" / name)
    assert any(re.search(rf"!\[[^\]]+\]\((docs/)?{name}\)", page.read_text()) for page in PAGES)


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_every_colour_has_one_of_dark_mode(path):
    svg = path.read_text()
    assert "<image" not in svg  # its colours would stay
    for name, colour in set(re.findall(r"(fill|stroke): (#\w{6})(?! !important)", svg)):
        rule = f'[style*="{name}: {colour}"] {{ {name}: {pictures.DARK[colour]} !important; }}'
        assert rule in svg


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first: str, second: str) -> float:
    low, high = sorted(luminance(x) for x in (first, second))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_told_from_the_ground():
    """By 4.5 for texts, and by 3 for lines and boxes in dark mode: the numbers of WCAG."""
    dark = pictures.DARK
    assert contrast("#ffffff", "#767676") == pytest.approx(4.54, abs=0.005)
    for colours in ({x: x for x in dark}, dark):
        assert contrast(colours[pictures.INK], colours[pictures.GROUND]) > 4.5
    for colour in (pictures.OURS, pictures.FIRST, pictures.SECOND, pictures.THIRD, pictures.GREY):
        assert contrast(dark[colour], dark[pictures.GROUND]) > 3


def test_unknown_picture_is_refused(capsys):
    with pytest.raises(SystemExit):
        pictures.main(["none.svg"])
    assert "no picture none.svg" in capsys.readouterr().err


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
