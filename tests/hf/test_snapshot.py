# SPDX-License-Identifier: BSD-3-Clause
"""Caches saved by some ranks and loaded by others."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import Lost, run_ranks
from tiers import tiers

pytest.importorskip("transformers")

from torch import Tensor

import split_models
from faults import AMPLE
from hf_caches import HEAD_DIM, HEADS, append, check_holds, numbered_keys
from hf_models import CONFIGS, make_model, make_prompts
from tree_attention import (
    BlockCyclic,
    Communicator,
    Contiguous,
    ContiguousThenCyclic,
    ExchangeError,
    ShardLayout,
    hf,
)
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.cache.growing import CROP_KEEPS
from tree_attention.hf.options import KV_DTYPES
from tree_attention.reference import quantise
from window_caches import crop

CONFIG = CONFIGS["llama"]
LENGTH = 77


def filled(layout: ShardLayout | None = None, **options: Any) -> hf.TreeCache:
    cache = hf.TreeCache(CONFIG, layout=layout, **options)
    append(cache, LENGTH)
    return cache


def _layouts(world_size: int) -> list[ShardLayout]:
    uneven = (0,) * world_size + (50,)
    return [
        BlockCyclic(world_size, 7, (*range(1, world_size), 2 * world_size)),
        Contiguous((0, *range(3, 3 + world_size - 1), LENGTH + 1)),
        ContiguousThenCyclic(uneven, 4),
    ]


def _save(rank: int, world_size: int, layout: ShardLayout, directory: Path) -> None:
    filled(layout).save(directory)


def check_load(rank: int, world_size: int, layout: ShardLayout, directory: Path) -> None:
    cache = hf.TreeCache.load(directory, CONFIG, layout=layout, growth=16)
    check_holds(cache, LENGTH)
    append(cache, 1)
    check_holds(cache, LENGTH + 1)


@pytest.mark.parametrize("saved_by", tiers([3], [1, 2]))
def test_any_world_and_layout_loads_what_any_other_saved(saved_by: int, tmp_path: Path) -> None:
    for number, layout in enumerate(_layouts(saved_by)):
        directory = tmp_path / str(number)
        run_ranks(_save, saved_by, layout, directory)
        for world_size in (1, 2, 3, 5):
            for target in _layouts(world_size):
                run_ranks(check_load, world_size, target, directory)


def test_a_model_in_half_precision_keeps_its_bits(tmp_path: Path) -> None:
    cache = hf.TreeCache(CONFIG)
    keys = torch.randn(1, HEADS, 5, HEAD_DIM, dtype=torch.bfloat16)
    keys[..., 0] = torch.nan
    for layer_idx in range(len(cache)):
        cache.update(keys, keys, layer_idx)
    cache.save(tmp_path)
    with torch.inference_mode():
        loaded = hf.TreeCache.load(tmp_path, CONFIG)
    for layer in loaded.layers:
        assert torch.equal(layer.key_rows[:, :, :5].view(torch.int16), keys.view(torch.int16))
        layer.key_rows[:, :, :5] = 0  # also outside of inference mode


def test_buffers_that_move_in_inference_mode_can_be_written_outside_of_it(tmp_path: Path) -> None:
    filled().save(tmp_path)
    cache = hf.TreeCache.load(tmp_path, CONFIG)
    with torch.inference_mode():
        keys = numbered_keys(LENGTH, LENGTH + 1).to("meta")
        cache.update(keys, keys, 0)
    for x in cache.layers[0].buffers().values():
        assert x.device.type == "meta"
        assert not x.is_inference()


def test_a_crop_is_saved(tmp_path: Path) -> None:
    cache = filled()
    cache.crop(40 if CROP_KEEPS else 40 - LENGTH)
    cache.save(tmp_path)
    check_holds(hf.TreeCache.load(tmp_path, CONFIG), 40)


def test_a_save_replaces_the_last_one_and_its_files(tmp_path: Path) -> None:
    cache = filled()
    others = {"notes.txt", "cache-notes.txt", "cache-00000-of-00001.md"}
    for name in others:
        (tmp_path / name).write_text("of the user")
    killed = {"cache-00000-of-00002.7.tmp", "cache-00001-of-00002-0123456789abcdef.safetensors"}
    for name in killed | {"cache-index.7.tmp"}:
        (tmp_path / name).write_text("of a save that was killed")
    cache.save(tmp_path)
    first = set(os.listdir(tmp_path))
    append(cache, 3)
    cache.save(tmp_path)
    second = set(os.listdir(tmp_path))
    assert len(first) == len(second) == 2 + len(others)
    assert first & second == {"index.json"} | others
    check_holds(hf.TreeCache.load(tmp_path, CONFIG), LENGTH + 3)
    cache.save(tmp_path)  # the same again
    assert set(os.listdir(tmp_path)) == second


def _survive(rank: int, world_size: int, directory: Path) -> list[list[int]]:
    model = hf.enable(make_model("llama"), timeout=AMPLE)
    prompts = make_prompts()
    cache = hf.TreeCache(model.config, timeout=AMPLE)
    model.generate(**prompts, **{CACHE_NAME: cache}, max_new_tokens=1)
    cache.save(directory)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    crop(cache, 1)  # the prompt must have a new token
    with pytest.raises(ExchangeError):
        model.generate(**prompts, **{CACHE_NAME: cache}, max_new_tokens=8)
    survivors = dist.new_group([0, 2], use_local_synchronization=True)
    hf.enable(model, group=survivors, timeout=AMPLE)
    cache = hf.TreeCache.load(directory, model.config, survivors)
    crop(cache, 1)
    tokens = model.generate(**prompts, **{CACHE_NAME: cache}, max_new_tokens=8)
    return tokens.tolist()


def test_survivors_of_a_lost_rank_go_on_with_the_same_tokens(tmp_path: Path) -> None:
    expected = make_model("llama").generate(**make_prompts(), max_new_tokens=8).tolist()
    results = run_ranks(_survive, 3, tmp_path, lost=[1])
    assert isinstance(results[1], Lost)
    assert results[0] == results[2] == expected


def _swap_directories(rank: int, world_size: int, directory: Path) -> None:
    model = hf.parallelize(split_models.make_model("llama"), tensor_parallel_size=2)
    group = hf.mesh(model).context_group
    cache = hf.TreeCache(model.config, group)
    keys = torch.zeros(1, 2, 5, 8)
    for i in range(len(cache)):
        cache.update(keys, keys, i)
    own, other = (directory / str(column) for column in (rank % 2, 1 - rank % 2))
    cache.reshard(BlockCyclic(world_size // 2, 3))  # which keeps the heads where they are
    cache.save(own)
    dist.barrier()  # the other group's save
    message = "heads of tensor rank {} of 2, and the group is of tensor rank {} of 2: load what"
    with pytest.raises(ValueError, match=message.format(1 - rank % 2, rank % 2)):
        hf.TreeCache.load(other, model.config, group)
    with pytest.raises(ValueError, match=f"rank {rank % 2} of 2, and the group is of .* 0 of 1:"):
        hf.TreeCache.load(own, model.config)  # into a cache of all heads
    assert hf.TreeCache.load(own, model.config, group).get_seq_length() == 5


@pytest.mark.parametrize("world_size", tiers([2], [4]))
def test_heads_of_another_tensor_rank_are_refused(world_size: int, tmp_path: Path) -> None:
    run_ranks(_swap_directories, world_size, tmp_path)


def _save_with_a_communicator(rank: int, world_size: int, directory: Path) -> None:
    model = hf.parallelize(split_models.make_model("llama"), tensor_parallel_size=2)
    group = hf.mesh(model).context_group
    cache = hf.TreeCache(model.config, Communicator(group))
    ids = split_models.make_prompts()["input_ids"]
    with torch.no_grad():
        model(ids, **{CACHE_NAME: cache})
    own, other = (directory / str(column) for column in (rank % 2, 1 - rank % 2))
    cache.save(own)
    dist.barrier()  # the other group's save
    assert hf.TreeCache.load(own, model.config, group).get_seq_length() == ids.shape[1]
    with pytest.raises(ValueError, match=f"the heads of tensor rank {1 - rank % 2} of 2, and"):
        hf.TreeCache.load(other, model.config, group)


@pytest.mark.parametrize("world_size", tiers([2], [4]))
def test_the_model_says_which_heads_a_communicator_of_the_user_holds(
    world_size: int, tmp_path: Path
) -> None:
    """A communicator over one rank does not know its group, and so not the rank's heads."""
    run_ranks(_save_with_a_communicator, world_size, tmp_path)


def _random_tokens() -> Tensor:
    return torch.randn(2, HEADS, LENGTH, HEAD_DIM, generator=torch.Generator().manual_seed(3))


def _save_8_bits(rank: int, world_size: int, kv_dtype: str | None, directory: Path) -> None:
    cache = hf.TreeCache(CONFIG, layout=BlockCyclic(world_size, 7), kv_dtype=kv_dtype)
    keys = _random_tokens()
    for layer_idx in range(len(cache)):
        cache.update(keys, -keys, layer_idx)
    cache.save(directory)


def _check_8_bits(
    rank: int, world_size: int, kv_dtype: str | None, steps: list[str | None], directory: Path
) -> None:
    """The cache holds the tokens as they are after they were rounded in `steps`."""
    layout = BlockCyclic(world_size, 4)
    cache = hf.TreeCache.load(directory, CONFIG, layout=layout, kv_dtype=kv_dtype)
    for name, held in (("keys", _random_tokens()), ("values", -_random_tokens())):
        expected, scale = held, None
        for step in filter(None, steps):
            expected = expected.float() if scale is None else expected.float() * scale[..., None]
            expected, scale = quantise(expected, KV_DTYPES[step])
        slots = layout.local_slots(rank, 0, LENGTH)
        for layer in cache.layers:
            found = layer.buffers()[name][:, :, : len(slots)]
            assert found.dtype == expected.dtype
            assert torch.equal(found.float(), expected[:, :, slots].float())
            if scale is not None:
                found = {"keys": layer.k_scale, "values": layer.v_scale}[name]
                assert torch.equal(found[:, :, : len(slots)], scale[:, :, slots])


@pytest.mark.parametrize("saved", [None, "int8", "fp8"])
def test_8_bits_are_loaded_as_saved_or_as_asked(saved: str | None, tmp_path: Path) -> None:
    run_ranks(_save_8_bits, 2, saved, tmp_path)
    for asked in (None, "int8", "fp8"):
        steps = [saved] if asked in (None, saved) else [saved, asked]
        for world_size in (1, 3):
            run_ranks(_check_8_bits, world_size, asked, steps, tmp_path)


def test_a_cache_of_another_model_is_refused(tmp_path: Path) -> None:
    filled().save(tmp_path)
    for name, value in (("rope_parameters", {"rope_theta": 5.0}), ("head_dim", 16)):
        config = copy.deepcopy(CONFIG)
        setattr(config, name, value)
        with pytest.raises(ValueError, match=f"is of another model: its {name} is"):
            hf.TreeCache.load(tmp_path, config)


def test_a_layout_that_ends_before_is_refused(tmp_path: Path) -> None:
    filled().save(tmp_path)
    with pytest.raises(ValueError, match="has no rank for slot 76"):
        hf.TreeCache.load(tmp_path, CONFIG, layout=Contiguous((0, 76)))


def test_what_is_no_whole_cache_is_not_saved(tmp_path: Path) -> None:
    cache = hf.TreeCache(CONFIG)
    with pytest.raises(ValueError, match="holds no tokens yet"):
        cache.save(tmp_path)
    cache = filled()
    cache.reset()
    with pytest.raises(ValueError, match="holds no tokens yet"):
        cache.save(tmp_path)
    cache = filled()
    cache.update(numbered_keys(LENGTH, LENGTH + 1), numbered_keys(LENGTH, LENGTH + 1), 0)
    with pytest.raises(ValueError, match="the layers hold 77 to 78 tokens"):
        cache.save(tmp_path)
    cache = filled(_OwnLayout(1))
    with pytest.raises(ValueError, match=r"layout must be one of BlockCyclic, .* got _OwnLayout"):
        cache.save(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        filled().save(tmp_path / "file")


class _OwnLayout(BlockCyclic):
    pass
