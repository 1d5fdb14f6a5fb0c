# SPDX-License-Identifier: BSD-3-Clause
"""Every report of benchmarks/results says how to measure it again: a command that today's programs
take, at a commit without changes, with the same torch as all others."""

import re
from pathlib import Path

import pytest

from benchmarks.cuda.predict import REPORTS  # of a GPU, with the torch that is there
from commands import check_command, program_and_arguments
from test_links import RECORDS

ROOT = Path(__file__).parents[2]
RESULTS = sorted(p for p in (ROOT / "benchmarks/results").glob("*.md") if p.stem not in RECORDS)
# vLLM's operators are timed in the same process, with the torch that vLLM was built for.
OTHER_TORCH = {
    "decode",
    "decode_avx512_bf16",
    "decode_avx2",
    "decode_avx512",
    "decode_peers_avx512_bf16",
}
OTHER_TORCH |= {"groups", "groups_hosts", "latent_operator"}


def header(page: Path) -> dict[str, str]:
    """Return the lines of the first block of a page."""
    block = page.read_text().split("```")[1]
    return dict(line.split(": ", 1) for line in block.strip().splitlines())


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_header_of_a_page(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = header(page)
    assert re.fullmatch("[0-9a-f]{10}(, [0-9a-f]{10})*", found["commit"]), found["commit"]
    check_command(found.get("command today", found["command"]), monkeypatch, capsys)


def test_all_pages_have_one_torch() -> None:
    found = {page.stem: header(page)["torch"] for page in RESULTS if page.stem not in REPORTS}
    assert len({found[name] for name in found.keys() - OTHER_TORCH}) == 1, found
    assert len({found[name] for name in OTHER_TORCH}) == 1


def test_every_page_that_is_named_exists() -> None:
    assert {page.stem for page in RESULTS} >= OTHER_TORCH


def test_launchers_are_left_out() -> None:
    hosts = "python -m lab.emulation --link 1ms,1gbit --per-node 2 -- "
    for launcher in ("python", "torchrun --nproc-per-node 4"):
        for before in ("", hosts):
            found = program_and_arguments(f"{before}{launcher} -m lab.papers.lsh --out DIR")
            assert found == ("lab.papers.lsh", ["--out", "DIR"])
            found = program_and_arguments(f"{before}{launcher} benchmarks/links.py --seconds 1")
            assert found == ("benchmarks.links", ["--seconds", "1"])
