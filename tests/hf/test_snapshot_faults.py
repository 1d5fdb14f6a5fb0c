# SPDX-License-Identifier: BSD-3-Clause
"""Saves that fail, and loads beside a save: there is always the cache of before, or the new one."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks, start_process
from tiers import tiers

pytest.importorskip("transformers")

from faults import AMPLE
from hf_caches import append, check_holds
from test_snapshot import CONFIG, LENGTH, check_load, filled
from tree_attention import BlockCyclic, ExchangeError, hf
from tree_attention.hf.cache.snapshot import files as snapshot


def _fail_to_write(rank: int, world_size: int, directory: Path, function: str) -> str:
    cache = filled(timeout=AMPLE)
    cache.save(directory)
    append(cache, 3)
    failing = mock.patch.object(snapshot, function, side_effect=OSError("no space left on device"))
    with pytest.raises((OSError, ExchangeError)) as caught:
        if rank == 0:
            with failing:
                cache.save(directory)
        else:
            cache.save(directory)
    check_holds(hf.TreeCache.load(directory, CONFIG), LENGTH)
    names = {file["name"] for file in json.loads((directory / "index.json").read_text())["files"]}
    assert {file.name for file in directory.iterdir()} == {"index.json"} | names
    dist.barrier()
    cache.save(directory)  # the group is as it was
    check_holds(hf.TreeCache.load(directory, CONFIG), LENGTH + 3)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("function", ["save_file", "write_index"])
def test_a_save_that_fails_on_one_rank_leaves_the_last_one(function: str, tmp_path: Path) -> None:
    errors = run_ranks(_fail_to_write, 2, tmp_path, function)
    assert errors[0] == "OSError: no space left on device"
    assert "ExchangeError: rank 1 of 2: outcome is success on rank 1, no space" in errors[1]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("at_index", [False, True])
def test_a_full_disk_leaves_the_last_save_and_nothing_else(at_index: bool, tmp_path: Path) -> None:
    """A limit on the size of a file stands for it."""
    cache = filled()
    cache.save(tmp_path)
    names = set(os.listdir(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    append(cache, 3)
    write = getattr(snapshot, "write_index" if at_index else "save_file")

    def write_to_full_disk(*args: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        write(*args)

    full = mock.patch.object(snapshot, write.__name__, write_to_full_disk)
    try:
        with full, pytest.raises(OSError, match=r"(?i)file too large"):
            cache.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert set(os.listdir(tmp_path)) == names
    check_holds(hf.TreeCache.load(tmp_path, CONFIG), LENGTH)


def _save_the_same(rank: int, world_size: int, directory: Path) -> None:
    cache = filled(timeout=AMPLE)
    cache.save(directory)
    with pytest.raises((OSError, ExchangeError), match="no space"):
        if rank == 0:
            with mock.patch.object(snapshot, "write_index", side_effect=OSError("no space")):
                cache.save(directory)
        cache.save(directory)
    check_holds(hf.TreeCache.load(directory, CONFIG), LENGTH)


def test_a_save_that_fails_keeps_files_that_the_index_names(tmp_path: Path) -> None:
    run_ranks(_save_the_same, 2, tmp_path)


def _wait_in_vain(rank: int, world_size: int, directory: Path) -> str:
    cache = filled(timeout=5)
    write = snapshot.write_index

    def write_late(*args: Any) -> None:
        time.sleep(7)
        write(*args)

    late = mock.patch.object(snapshot, "write_index", write_late)
    with late, pytest.raises(ExchangeError) as caught:
        cache.save(directory)
    return str(caught.value)


@pytest.mark.deep
def test_files_of_an_index_that_comes_late_are_kept(tmp_path: Path) -> None:
    """A rank that only ran out of time does not know that the first one failed."""
    errors = run_ranks(_wait_in_vain, 2, tmp_path, fresh=True)
    assert "no answer within 5 s" in errors[1]
    run_ranks(check_load, 1, BlockCyclic(1), tmp_path)


def _save_elsewhere(rank: int, world_size: int, directory: Path) -> str:
    own = directory / str(rank)
    cache = filled(timeout=AMPLE)
    with pytest.raises((OSError, ExchangeError)) as caught:
        cache.save(own)
    assert not list(own.iterdir())
    cache.save(directory)  # the group is as it was
    check_holds(hf.TreeCache.load(directory, CONFIG), LENGTH)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_directories_that_ranks_do_not_share_are_refused(tmp_path: Path) -> None:
    errors = run_ranks(_save_elsewhere, 2, tmp_path)
    message = r"TreeCache\.save: rank 0 does not find .*/0/cache-00001-of-00002-\w+\.safetensors "
    message += r"with the \d+ bytes that rank 1 wrote; give all ranks a path at which they reach"
    assert re.match(f"OSError: {message}", errors[0])
    assert re.match("ExchangeError: .*outcome is success on rank 1, " + message, errors[1])


def _names_on_disk(rank: int, world_size: int, directory: Path) -> None:
    """Every rank has the name of its file on disk before it says that it has written it."""
    synced: list[Path] = []
    with mock.patch.object(snapshot, "to_disk", synced.append):
        filled().save(directory)
    (own,) = directory.glob(f"cache-{rank:05}-of-*.safetensors")
    assert len(synced) == 2 and synced[0].suffix == ".tmp" and synced[1] == own.parent


def test_every_rank_has_the_name_of_its_file_on_disk(tmp_path: Path) -> None:
    run_ranks(_names_on_disk, 2, tmp_path)


@pytest.mark.parametrize("moment", ["_check_sizes", "_opened"])
def test_a_load_beside_a_save_has_one_of_both(moment: str, tmp_path: Path) -> None:
    """The save removes the files of the index that was read, before or between they are opened."""
    old, new = filled(), filled(kv_dtype="int8")
    append(new, 3)
    old.save(tmp_path)
    function, saves = getattr(snapshot, moment), iter([new])

    def replaced(*args: Any) -> Any:
        for cache in saves:
            cache.save(tmp_path)
        return function(*args)

    with mock.patch.object(snapshot, moment, replaced):
        cache = hf.TreeCache.load(tmp_path, CONFIG)
    assert cache.get_seq_length() == LENGTH + 3
    assert cache.kv_dtype == torch.int8


def test_a_load_beside_many_saves_says_so(tmp_path: Path) -> None:
    cache = filled()
    cache.save(tmp_path)
    check = snapshot._check_sizes

    def replaced(*args: Any) -> None:
        append(cache, 1)
        cache.save(tmp_path)
        check(*args)

    with (
        mock.patch.object(snapshot, "_check_sizes", replaced),
        pytest.raises(
            FileNotFoundError, match=r"is missing, which .* if another save has just rep"
        ),
    ):
        hf.TreeCache.load(tmp_path, CONFIG)


def test_a_file_that_is_replaced_once_it_is_open_is_read_as_it_was(tmp_path: Path) -> None:
    """Its digest and its tensors are those of one file."""
    cache = filled()
    cache.save(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    digest = snapshot._digest

    def replaced(content: Any) -> str:
        found = digest(content)
        file.unlink()
        os.mkfifo(file)
        return found

    with mock.patch.object(snapshot, "_digest", replaced):
        check_holds(hf.TreeCache.load(tmp_path, CONFIG), LENGTH)


def _kill_itself(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_while_saving(rank: int, world_size: int, directory: Path) -> str:
    cache = filled(timeout=AMPLE)
    cache.save(directory)
    append(cache, 3)
    with pytest.raises(ExchangeError) as caught:
        if rank == 1:
            with mock.patch.object(snapshot, "save_file", _kill_itself):
                cache.save(directory)
        cache.save(directory)
    return str(caught.value)


@pytest.mark.deep
def test_a_rank_killed_while_saving_leaves_the_last_one(tmp_path: Path) -> None:
    errors = run_ranks(_die_while_saving, 3, tmp_path, lost=[1])
    assert all("rank 1" in errors[rank] for rank in (0, 2))
    for world_size in (1, 2):
        run_ranks(check_load, world_size, BlockCyclic(world_size), tmp_path)


def _die_at(directory: Path, moment: int, is_second: bool) -> None:
    cache = filled()
    if is_second:
        cache.save(directory)
    append(cache, 3)
    synced = 0

    def sync(_: int) -> None:
        nonlocal synced
        synced += 1
        if synced == moment:
            _kill_itself()

    with mock.patch.object(os, "fsync", sync):
        cache.save(directory)


@pytest.mark.parametrize("moment", tiers([2, 4], [1, 3]))
@pytest.mark.parametrize("is_second", tiers([True], [False]))
def test_a_process_killed_at_any_moment_leaves_one_of_both(
    is_second: bool, moment: int, tmp_path: Path
) -> None:
    """Once it has written the tensors, named their file, written the index and named that."""
    process = start_process(0, _die_at, tmp_path, moment, is_second)
    try:
        process.join()  # until pytest's deadline
    finally:
        process.kill()
    assert process.exitcode == -signal.SIGKILL
    lengths = [LENGTH if is_second else None] * 3 + [LENGTH + 3]
    length = lengths[moment - 1]
    if length is None:
        with pytest.raises(FileNotFoundError, match=r"no cache was saved there, or it never ended"):
            hf.TreeCache.load(tmp_path, CONFIG)
    else:
        check_holds(hf.TreeCache.load(tmp_path, CONFIG), length)
    filled().save(tmp_path)  # which removes what is left of it
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".json", ".safetensors"]
    check_holds(hf.TreeCache.load(tmp_path, CONFIG), LENGTH)
