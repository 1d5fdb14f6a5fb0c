# SPDX-License-Identifier: BSD-3-Clause
"""The directory or the model of the Hugging Face Hub that a text names, and which one was meant."""

import difflib
import os
from pathlib import Path


def is_of_hub(path: str) -> bool:
    """True for what may be a name on the Hub, as `name` and `owner/name`: none of those begins like
    a path, has a second separator, or an owner that is a directory here."""
    owner, *names = path.split("/")
    is_path = path.startswith((".", "/", "~")) or len(names) > 1
    return not (is_path or os.path.isdir(path) or (names and os.path.isdir(owner)))


def near_directory(path: Path) -> Path | None:
    """A directory whose path differs from a missing one by slips."""
    found = Path(path.anchor)
    for part in path.relative_to(found).parts:
        if not (found / part).is_dir():
            try:
                names = [x.name for x in found.iterdir() if x.is_dir()]
            except OSError:
                return None
            near = difflib.get_close_matches(part, names, n=1, cutoff=0.7)
            if not near:
                return None
            part = near[0]
        found /= part
    return found


def did_you_mean(path: str) -> str:
    """The end of an error about a missing directory: the name of one that is like it, or ""."""
    near = near_directory(Path(path))
    return "" if near is None else f"; did you mean {near}?"
