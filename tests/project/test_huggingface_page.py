# SPDX-License-Identifier: BSD-3-Clause
"""docs/huggingface.md: its program prints what it shows, on one and on two ranks, and its tables
have every argument with its default."""

import inspect
import re
from collections.abc import Callable

import pytest

from test_readme import ROOT, python_program, run

pytest.importorskip("transformers")

from tree_attention import hf
from tree_attention.hf.options import EnableOptions

PAGE = ROOT / "docs/huggingface.md"
TABLES = re.split(r"^\| argument ", PAGE.read_text(), flags=re.MULTILINE)[1:]


@pytest.mark.deep
@pytest.mark.parametrize("world_size", [0, 2], ids=["alone", "two ranks"])
def test_program_of_the_page_prints_what_it_shows(world_size: int) -> None:
    program = python_program(PAGE)
    # One rank prints: the streamer, a batch, a template, a pipeline and then the second turn.
    shown = re.findall(r"# (?:prints )?([\d ]+)$", program, re.MULTILINE)
    assert len(shown) == 5
    assert run(program, world_size, OMP_NUM_THREADS="1").split() == " ".join(shown).split()


@pytest.mark.parametrize(
    ("function", "table"),
    [(hf.enable, TABLES[0]), (hf.from_pretrained, TABLES[1])],
    ids=["enable", "from_pretrained"],
)
def test_tables_have_every_argument(function: Callable[..., object], table: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \|(?: (.*?))? \| .* \|$", table, re.MULTILINE)
    passed_on = EnableOptions.__annotations__ if function is hf.from_pretrained else ()
    arguments = [
        (name, argument.default)
        for name, argument in inspect.signature(function).parameters.items()
        if name not in passed_on
    ]
    assert [name for name, _ in rows] == [name for name, _ in arguments]
    for (name, shown), (_, default) in zip(rows, arguments, strict=True):
        expected = "" if default is inspect.Parameter.empty else default
        text = f'`"{expected}"`' if expected and isinstance(expected, str) else f"{expected}"
        assert shown == (f"{expected:g}" if isinstance(expected, float) else text), name
