# SPDX-License-Identifier: BSD-3-Clause
"""The notebook of examples/ prints what it shows, when it is run again."""

import re
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/two_ranks.ipynb"
pytestmark = pytest.mark.deep


def outputs(notebook: Any) -> list[str]:
    """Return what each cell printed, without seconds."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = ["".join(output.text for output in cell.outputs) for cell in cells]
    return [re.sub(r"after \d+ s", "after some s", text) for text in printed]


def test_notebook_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = nbformat.read(NOTEBOOK, as_version=4)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "python"))
    again = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(again, timeout=600, startup_timeout=600, resources=place).execute()
    assert outputs(again) == outputs(shown)
    words = "".join(outputs(shown))
    assert "the process of rank 1 has ended" in words and "saved" in words
    key = re.search(r"The pass key of the \w+ is (\d{5})\.", words)[1]
    assert words.endswith(f"The hidden number was {key}.\n")
    assert not re.search(r"(?<![\w.])/\w+/", words), "a path of one machine"
