# SPDX-License-Identifier: BSD-3-Clause
"""The tokens that a saved cache holds, and the saved cache that holds the most of a text."""

import os
import reprlib
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...._numbers import MAX_INTEGER, as_integers
from .index import INDEX, read_entries


def token_ids(op: str, tokens: Any) -> list[int]:
    """The ids of one sequence, of a list or a tensor `[length]` or `[1, length]`, or TypeError."""
    given = tokens
    if isinstance(tokens, Tensor):
        given = (tokens[0] if tokens.dim() == 2 and len(tokens) == 1 else tokens).tolist()
    ids = as_integers(given)
    if ids is None or not all(0 <= x <= MAX_INTEGER for x in ids):
        got = list(tokens.shape) if isinstance(tokens, Tensor) else reprlib.repr(tokens)
        raise TypeError(
            f"{op}: tokens must be the ids of one sequence, integers of at least 0 in a list or a "
            f"tensor [length] or [1, length], got {got}"
        )
    return ids


def saved_tokens(directory: str | os.PathLike[str]) -> list[int] | None:
    """The ids that `TreeCache.save` was given; None if it was given none, or if no whole index of a
    cache is there."""
    try:
        tokens: list[int] | None = read_entries(Path(directory) / INDEX).get("tokens")
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return tokens


def find_prefix(root: str | os.PathLike[str], tokens: Any) -> tuple[Path, int] | None:
    """The saved cache with the longest beginning in common with a text, and how many tokens.

    Looks at `root` and the directories in it, for what `TreeCache.save(directory, tokens=...)`
    wrote, and passes over everything else. Local: each rank reads the indices. Neither the model
    nor the rest of a cache is compared: `TreeCache.load` does that.

    Equivalent, with the ids of every cache::

        common = {path: (ids[:n] == tokens[:n]).cumprod(0).sum() for path, ids in saved.items()}
        path = max(common, key=common.get)

    Args:
        root: a directory.
        tokens: ids of one sequence, a list or a tensor `[length]` or `[1, length]`.

    Returns:
        The directory for `load` and the length, to which to `crop` what was loaded; None if no
        cache begins with the first token. `generate` needs a token that the cache does not hold.

    Raises:
        OSError: there is no directory `root`.
        TypeError: `tokens` are no such ids.

    For example::

        import tempfile
        import torch
        from transformers import AutoModelForCausalLM
        from tree_attention import hf

        model = hf.enable(AutoModelForCausalLM.from_pretrained("examples/passkey-llama"))
        root, ids = tempfile.mkdtemp(), torch.tensor([[5, 6, 7, 8]])
        cache = hf.TreeCache(model.config)
        with torch.no_grad():
            model(ids, **{hf.CACHE_NAME: cache})
        cache.save(f"{root}/first", tokens=ids)
        path, length = hf.find_prefix(root, [5, 6, 7, 9, 10])
        print(path.name, length)  # first 3
    """
    wanted = np.array(token_ids("find_prefix", tokens), dtype=np.int64)
    try:
        places = Path(root), *sorted(Path(root).iterdir())
    except OSError as error:  # of the system, which knows of no find_prefix
        raise OSError(error.errno, f"find_prefix: {error.strerror}", str(root)) from None
    found: list[tuple[int, int, Path]] = []
    for path in places:
        saved = saved_tokens(path)
        if saved is None:
            continue
        count = min(len(saved), len(wanted))
        differs = np.flatnonzero(np.array(saved[:count], dtype=np.int64) != wanted[:count])
        common = int(differs[0]) if len(differs) else count
        if common > 0:
            found.append((common, -len(saved), path))
    if not found:
        return None
    # If several beginnings are equally long, take the cache with the fewest further tokens, because
    # layers with a window can be cropped only so far.
    common, _, path = max(found, key=lambda each: each[:2])
    return path, common
