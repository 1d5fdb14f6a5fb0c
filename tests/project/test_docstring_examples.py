# SPDX-License-Identifier: BSD-3-Clause
"""The docstring of every public function and class has a call that can be pasted, which runs here;
so do the methods that have one.

A block after "For example::" is a program for one process, started in a checkout. What it prints
stands after the `print`.
"""

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator

import pytest

from test_readme import ROOT
from tiers import tiers_of

MODULES = ("", ".hf", ".patterns", ".positions", ".reference", ".reference.conformance")
# Their docstrings have none, for the reason given.
WITHOUT = {
    "AttentionOptions": "a dictionary of keyword arguments",
    "ExchangeError": "an exception",
    "WrongAttentionError": "an exception",
    "ChoiceProblem": "the example of `check_choice` takes one",
    "DecodeProblem": "the example of `check_sharded_decode` takes one",
    "Line": "the lines of a `Report`",
    "Report": "the example of `check_merge` makes one",
}


def public() -> Iterator[tuple[str, object]]:
    for module in MODULES:
        found = importlib.import_module(f"tree_attention{module}")
        for name in found.__all__:
            if callable(value := getattr(found, name)):
                yield f"{module[1:]}.{name}".strip("."), value


def methods_with_examples() -> Iterator[tuple[str, object]]:
    for name, value in public():
        for method, function in vars(value).items() if inspect.isclass(value) else ():
            if not method.startswith("_") and examples(function):
                yield f"{name}.{method}", function


NAMES = dict(public())
WITH_EXAMPLES = [x for x in NAMES if x.split(".")[-1] not in WITHOUT]


def examples(value: object) -> list[str]:
    text = inspect.getdoc(value) or ""
    found = re.findall(r"^For example::\n\n((?: {4}.*\n|\n)+)", text + "\n", re.MULTILINE)
    return [textwrap.dedent(x) for x in found]


METHODS = dict(methods_with_examples())
ALL = [*WITH_EXAMPLES, *METHODS]
QUICK = [name for name in ALL if name != "reference.conformance.check_sharded_decode"]


@pytest.mark.parametrize("name", tiers_of(ALL, quick=QUICK))
def test_example_runs_and_prints_what_it_says(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (program,) = examples({**NAMES, **METHODS}[name])
    shown = re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert len(shown) == program.count("print(")
    exec(compile(program, name, "exec"), {"__name__": name})
    assert capsys.readouterr().out.splitlines() == shown


def test_methods_that_callers_begin_with_have_an_example() -> None:
    assert {"hf.TreeCache.share", "ShardLayout.local_rows"} <= METHODS.keys()


def test_names_without_an_example_are_public_and_have_none() -> None:
    without = {x for x in NAMES if x.split(".")[-1] in WITHOUT}
    assert {x.split(".")[-1] for x in without} == set(WITHOUT)
    assert not any(examples(NAMES[x]) for x in without)


def test_help_of_the_package_says_for_whom_each_part_is() -> None:
    package = importlib.import_module("tree_attention")
    text = package.__doc__ or ""
    for name in package.__all__:
        assert f"`{name}`" in text or name == "__version__", name
    for module in (".hf", ".patterns", ".positions", ".reference", ".reference.conformance"):
        assert f"tree_attention{module}`" in text
