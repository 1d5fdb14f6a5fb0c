# SPDX-License-Identifier: BSD-3-Clause
"""Links and paths in the documentation lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "benchmarks",
    "conformance",
    "csrc",
    "docs",
    "examples",
    "lab",
    "python",
    "scripts",
    "tests",
)
PAGES = sorted(
    page
    for pattern in ("*.md", *(f"{name}/**/*.md" for name in FOLDERS))
    for page in ROOT.glob(pattern)
    if ".environments" not in page.parts  # of other engines, whose packages have pages
)
# Results that are kept by hand, or filled in by a program, without the header of a report.
RECORDS = {"cpu_kernel_variants", "cuda_compiled", "cuda_first_run", "cuda_predicted", "referee"}
# Reports name the programs as they were called when the figures were taken.
WRITTEN_BY_HAND = [p for p in PAGES if p.parent.name != "results" or p.stem in RECORDS]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page)


@pytest.mark.parametrize("page", WRITTEN_BY_HAND, ids=name_of)
def test_named_files_exist(page: Path) -> None:
    """Paths of this repository in code spans and commands, such as `scripts/test.sh`."""
    names = re.findall(rf"(?<![\w./])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", page.read_text())
    assert not [name for name in names if not (ROOT / name).exists()]


def test_files_of_the_map_of_tests_exist() -> None:
    tests = ROOT / "tests"
    rows = [line for line in (tests / "README.md").read_text().splitlines() if line[0:1] == "|"]
    names = [name for row in rows for name in re.findall(r"`([\w/*]+(?:\.py|/))`", row)]
    assert len(names) > 30
    assert not [name for name in names if not any(tests.rglob(name.strip("/")))]


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    links = "[a](page.md) [b](#one-two) [c](https://x.org) [d](gone.md) [e](page.md#three) [f](#no)"
    page.write_text(f"# One: `two`\n{links}\n```\n# three\n```\n")
    assert broken_links(page) == ["gone.md", "page.md#three", "#no"]
