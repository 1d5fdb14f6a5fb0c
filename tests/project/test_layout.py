# SPDX-License-Identifier: BSD-3-Clause
"""The package reads from the top: imports go down only, and the exchange has one entrance."""

from __future__ import annotations

import ast
import configparser
import inspect
import pydoc
import re
import subprocess
import typing
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tree_attention
import tree_attention.hf
from tree_attention import positions
from tree_attention.decode import DecodeOptions

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "tree_attention"
MODULES = sorted(PACKAGE.rglob("*.py"))
_FROM_INSIDE = re.compile(r"^\s*from \.+exchange\.\w.* import", re.MULTILINE)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_the_exchange_is_used_through_what_it_names(module: Path) -> None:
    if PACKAGE / "exchange" in module.parents:
        return
    found = _FROM_INSIDE.findall(module.read_text())
    assert not found, "import from tree_attention.exchange itself"


def test_the_lab_is_imported_by_itself_alone() -> None:
    listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "*.py"]
    found = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
    library = [ROOT / path for path in found if not path.startswith("lab/")]
    assert len(library) > 200
    imports_lab = re.compile(r"^\s*(?:from|import) lab\b", re.MULTILINE)
    assert not [path for path in library if path.exists() and imports_lab.search(path.read_text())]


def test_the_harness_of_benchmarks_knows_no_program() -> None:
    harness = sorted((ROOT / "benchmarks" / "harness").glob("*.py"))
    assert len(harness) > 5
    for module in harness:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ImportFrom):
                first, *rest = (node.module or "").split(".")
                assert node.level < 2 and (first != "benchmarks" or rest[:1] == ["harness"]), module
            elif isinstance(node, ast.Import):
                assert not any(x.name.split(".")[0] == "benchmarks" for x in node.names), module


def _imports(module: Path) -> Iterator[tuple[str, ...]]:
    """The paths inside the package of what a module imports, wherever it does so: also inside
    functions, and for type checking."""
    place = module.relative_to(PACKAGE).parts
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            for name in node.names:
                first, *rest = name.name.split(".")
                if first == PACKAGE.name:
                    yield _path(tuple(rest))
        elif isinstance(node, ast.ImportFrom):
            first, *rest = (node.module or "").split(".")
            inside = place[: len(place) - node.level] if node.level else ()
            if node.level:
                base = (*inside, *filter(None, (first, *rest)))
            elif first == PACKAGE.name:
                base = tuple(rest)
            else:
                continue
            for name in node.names:  # maybe of modules
                yield _path((*base, name.name))


def _path(names: tuple[str, ...]) -> tuple[str, ...]:
    """The longest beginning of `names` that is a module, or the `__init__` of a package."""
    while names:
        path = PACKAGE.joinpath(*names)
        if path.with_suffix(".py").exists():
            return names
        if path.is_dir():
            break
        names = names[:-1]
    return (*names, "__init__")


def test_imports_make_no_circle() -> None:
    """In no folder, so that its modules and the folders in it have an order, and all imports go
    down in it."""
    edges: dict[tuple[str, ...], dict[str, set[str]]] = {}  # of each folder, by entry
    for module in MODULES:
        own = module.relative_to(PACKAGE).with_suffix("").parts
        for other in _imports(module):
            shared = next(i for i, (x, y) in enumerate(zip(own, other, strict=False)) if x != y)
            edges.setdefault(own[:shared], {}).setdefault(own[shared], set()).add(other[shared])
    assert edges[()]["hf"] > {"weights", "exchange"} and "shard" in edges["hf", "cache"]["growing"]
    circles = []
    for folder, graph in edges.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circles.append(f"{'/'.join(folder) or PACKAGE.name}: {' <- '.join(error.args[1])}")
    assert not circles, "\n".join(circles)


def test_the_linter_of_imports_excuses_nothing() -> None:
    config = configparser.ConfigParser()
    config.read(PACKAGE.parents[1] / ".importlinter")
    assert config["importlinter"]["exclude_type_checking_imports"] == "False"
    for name in config.sections():
        assert not {x for x in config[name] if "ignore" in x}, name


_QUESTIONS = ("What ", "Whether ", "How ", "Has ", "That of ", "Those of ")


def test_docstrings_say_what_a_thing_is_or_does() -> None:
    found = []
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if text.startswith(_QUESTIONS):
                    found.append(f"{module}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)


def test_a_word_of_the_design_has_one_meaning() -> None:
    names = [
        node.name
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert {name: names.count(name) for name in ("Machine", "Plan", "Shard", "State")} == {
        "Machine": 1,
        "Plan": 1,
        "Shard": 1,
        "State": 1,
    }


def test_help_lists_all_arguments() -> None:
    """Options that several functions share stand in the signature that `help` shows, by name."""
    functions = {
        name: getattr(package, name)
        for package in (tree_attention, tree_attention.hf, positions)
        for name in package.__all__
        if inspect.isroutine(getattr(package, name))
    }
    assert {"tree_decode", "all_merge_states", "enable"} <= functions.keys()
    hidden = {
        name: [
            str(x)
            for x in inspect.signature(function).parameters.values()
            if x.kind == x.VAR_KEYWORD
        ]
        for name, function in functions.items()
    }
    assert not {name: found for name, found in hidden.items() if found}
    for option in (*typing.get_type_hints(DecodeOptions), "deterministic", "explain"):
        assert option in pydoc.render_doc(tree_attention.tree_decode)


def test_a_checkpoint_takes_the_options_of_enable() -> None:
    ours, of_enable = (
        {name: x.default for name, x in inspect.signature(function).parameters.items()}
        for function in (tree_attention.hf.from_pretrained, tree_attention.hf.enable)
    )
    shared = of_enable.items() - {("model", inspect.Parameter.empty), ("group", None)}
    assert len(shared) > 7 and shared <= ours.items()
