# SPDX-License-Identifier: BSD-3-Clause
"""The package reads from the top: small folders, and one door to each room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "tree_attention"
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({module.parent for module in MODULES})
_FROM_INSIDE = re.compile(r"^\s*from \.+exchange\.\w.* import", re.MULTILINE)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_a_folder_has_nine_modules_at_most(folder: Path) -> None:
    modules = [path.name for path in folder.glob("*.py") if not path.stem.endswith("__")]
    assert len(modules) <= 9, modules


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_the_exchange_is_used_through_what_it_names(module: Path) -> None:
    if PACKAGE / "exchange" in module.parents:
        return
    found = _FROM_INSIDE.findall(module.read_text())
    assert not found, "import from tree_attention.exchange itself"
