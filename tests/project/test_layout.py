# SPDX-License-Identifier: BSD-3-Clause
"""The package reads from the top: small folders, and one door to each room."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import subprocess
import typing
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
