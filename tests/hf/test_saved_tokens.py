# SPDX-License-Identifier: BSD-3-Clause
"""Saved caches that keep the tokens they hold, and the one that holds the most of a text.

The mistakes these tests are for: a length that counts tokens which differ, tokens of another cache
or of other ranks, a directory that is damaged and hides the others.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks

pytest.importorskip("transformers")

from hf_caches import numbered_keys
from test_snapshot import CONFIG
from tree_attention import BlockCyclic, ExchangeError, hf
from tree_attention.hf.cache.snapshot.tokens import saved_tokens
from window_caches import crop_to

LENGTH = 77
IDS = torch.arange(3, 3 + LENGTH)
OTHER = IDS.clone()
OTHER[40] = 1


def _filled(length: int = LENGTH, batch: int = 1, layout: Any = None) -> hf.TreeCache:
    cache = hf.TreeCache(CONFIG, layout=layout)
    keys = numbered_keys(0, length, batch)
    for layer in range(len(cache)):
        cache.update(keys, -keys, layer)
    return cache


def _save(rank: int, world_size: int, root: Path) -> None:
    layout = BlockCyclic(world_size, 4)
    _filled(layout=layout).save(root / "all", tokens=IDS[None])
    _filled(60, layout=layout).save(root / "some", OTHER[:60].tolist())
    _filled(layout=layout).save(root / "without")


def _find(rank: int, world_size: int, root: Path) -> None:
    texts: list[tuple[Any, tuple[str, int] | None]] = [
        (IDS, ("all", 77)),
        (torch.cat((IDS, IDS))[None], ("all", 77)),
        (IDS.tolist()[:50], ("all", 50)),
        (OTHER[:50], ("some", 50)),
        (OTHER, ("some", 60)),
        (IDS.int()[:30], ("some", 30)),  # which holds the least behind them
        (IDS[1:], None),
        ([], None),
    ]
    layout = BlockCyclic(world_size, 8)
    for tokens, wanted in texts:
        found = hf.find_prefix(root, tokens)
        assert found == (None if wanted is None else (root / wanted[0], wanted[1]))
        if found is not None:
            cache = hf.TreeCache.load(found[0], CONFIG, layout=layout)
            crop_to(cache, found[1])
            slots = layout.local_slots(rank, 0, found[1])
            for layer in cache.kv_layers:
                held = layer.key_rows[:, :, layer.held()]
                assert torch.equal(held, numbered_keys(0, found[1], 1)[:, :, slots])
    assert hf.find_prefix(str(root / "all"), IDS) == (root / "all", 77)


@pytest.mark.parametrize("saved_by, loaded_by", [(1, 2), (2, 1)])
def test_the_longest_beginning_is_found_and_loaded(
    saved_by: int, loaded_by: int, tmp_path: Path
) -> None:
    run_ranks(_save, saved_by, tmp_path)
    (tmp_path / "notes.txt").write_text("of the user")
    (tmp_path / "empty").mkdir()
    run_ranks(_find, loaded_by, tmp_path)


def test_a_damaged_directory_does_not_hide_others(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _filled().save(tmp_path / name, tokens=IDS)
    file = tmp_path / "a/index.json"
    content = file.read_text()
    assert saved_tokens(tmp_path / "a") == IDS.tolist()
    for damaged in (content.replace("\n  79", "\n  78"), content[:-100], "[]", "{}", "\0"):
        assert damaged != content
        file.write_text(damaged)
        assert saved_tokens(tmp_path / "a") is None
        assert hf.find_prefix(tmp_path, IDS) == (tmp_path / "b", 77)


def test_a_save_replaces_tokens(tmp_path: Path) -> None:
    _filled().save(tmp_path, tokens=IDS)
    _filled().save(tmp_path)
    assert saved_tokens(tmp_path) is None
    assert hf.find_prefix(tmp_path, IDS) is None


@pytest.mark.parametrize(
    "tokens, kind, message",
    [
        (IDS[:-1], ValueError, r"TreeCache\.save: tokens must be the 77 that the cache holds, got"),
        ([], ValueError, r"tokens must be the 77 that the cache holds, got 0; of what generate"),
        (IDS.float(), TypeError, r"TreeCache\.save: tokens must be the ids of one sequence, int"),
        (IDS.bool(), TypeError, r"in a list or a tensor \[length\] or \[1, length\], got \[77\]"),
        (IDS.expand(2, -1), TypeError, r"must be the ids of one sequence.*, got \[2, 77\]"),
        (-IDS, TypeError, "must be the ids of one sequence, integers of at least 0"),
        ("text", TypeError, "must be the ids of one sequence.*, got 'text'"),
        (7, TypeError, "must be the ids of one sequence.*, got 7"),
        ([1.0] * LENGTH, TypeError, "must be the ids of one sequence"),
        ([1 << 63] * LENGTH, TypeError, "must be the ids of one sequence"),
    ],
)
def test_tokens_that_are_refused(
    tokens: Any, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        _filled().save(tmp_path / "new", tokens=tokens)
    assert not (tmp_path / "new").exists()
    if kind is TypeError:
        with pytest.raises(kind, match="find_prefix: tokens must be the ids of one sequence"):
            hf.find_prefix(tmp_path, tokens)


def test_several_sequences_and_no_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokens are kept of a cache of one sequence, got 2; lea"):
        _filled(batch=2).save(tmp_path / "new", tokens=IDS)
    with pytest.raises(FileNotFoundError, match=r"find_prefix: No such file or directory: .*new"):
        hf.find_prefix(tmp_path / "new", IDS)


def _save_differing(rank: int, world_size: int, root: Path, tokens: list[Tensor | None]) -> str:
    with pytest.raises(ExchangeError) as caught:
        _filled(layout=BlockCyclic(world_size, 4)).save(root, tokens=tokens[rank])
    return str(caught.value)


@pytest.mark.parametrize("other", [OTHER, None])
def test_tokens_of_ranks_that_differ_are_refused(other: Tensor | None, tmp_path: Path) -> None:
    for error in run_ranks(_save_differing, 2, tmp_path, [IDS, other]):
        assert "tokens is " in error and "on rank 1" in error
    assert not os.listdir(tmp_path)
