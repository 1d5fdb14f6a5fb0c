# SPDX-License-Identifier: BSD-3-Clause
"""`help` of a public function describes every argument that its signature has."""

import inspect
import re
from collections.abc import Callable

import pytest

import tree_attention
from tree_attention.options import AttentionOptions
from tree_attention.positions import decode_with_range_bias

FUNCTIONS = [
    x for name in tree_attention.__all__ if inspect.isroutine(x := getattr(tree_attention, name))
]
SHARED = [
    tree_attention.lean_decode,
    tree_attention.tree_decode,
    tree_attention.ring_decode,
    tree_attention.ring_pass_q_decode,
]


def described(function: Callable[..., object]) -> set[str]:
    """The names before the colons of indented lines, some of them before commas or a break."""
    text = re.sub(r",\n +", ", ", inspect.getdoc(function) or "")
    lines = re.findall(r"^    (\w+(?:, \w+)*): ", text, re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


@pytest.mark.parametrize(
    "function",
    [x for x in FUNCTIONS if not x.__name__.startswith("ring_")],  # the others "as in tree_decode"
    ids=lambda function: function.__name__,
)
def test_every_argument_is_described(function: Callable[..., object]) -> None:
    assert {*inspect.signature(function).parameters} <= described(function)


def test_functions_are_found() -> None:
    assert len(FUNCTIONS) >= 9 and {*SHARED} <= {*FUNCTIONS}


@pytest.mark.parametrize(
    "function", [*SHARED, decode_with_range_bias], ids=lambda function: function.__name__
)
def test_shared_options_have_their_own_lines(function: Callable[..., object]) -> None:
    text = inspect.getdoc(function) or ""
    for name in AttentionOptions.__annotations__:
        assert re.search(rf"^    {name}: ", text, re.MULTILINE), name


def test_options_of_a_cache_are_described() -> None:
    hf = pytest.importorskip("tree_attention.hf")
    assert {*inspect.signature(hf.enable).parameters} - {"model"} <= described(hf.enable)
    assert "    deterministic: see `tree_decode`" in inspect.getdoc(hf.TreeCache.load)
