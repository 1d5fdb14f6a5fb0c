# SPDX-License-Identifier: BSD-3-Clause
"""A copy of the package with the same extension, for tests that change its files."""

import shutil
from pathlib import Path

import tree_attention


def copy_package(folder: Path) -> Path:
    """The copy, which a process with `folder` first in PYTHONPATH imports."""
    package, copy = Path(tree_attention.__file__).parent, folder / "tree_attention"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for extension in package.glob("*.so"):
        (copy / extension.name).symlink_to(extension)
    return copy
