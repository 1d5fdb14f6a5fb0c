# SPDX-License-Identifier: BSD-3-Clause
"""A cache whose slots move to other ranks of its group holds and computes the same afterwards."""

from __future__ import annotations

import copy
import os
import signal
from itertools import product

import pytest
import torch

from distributed import on_ranks, run_ranks
from tiers import by_world, tiers_of

pytest.importorskip("transformers")

from faults import AMPLE
from hf_caches import append, check_holds
from hf_models import CONFIGS, make_model, make_prompts
from tree_attention import (
    BlockCyclic,
    Contiguous,
    ContiguousThenCyclic,
    ExchangeError,
    ShardLayout,
    hf,
)
from tree_attention.hf import CACHE_NAME

CONFIG = CONFIGS["llama"]
LENGTH = 77


def _layouts(world_size: int) -> list[ShardLayout]:
    even = tuple(LENGTH * rank // world_size for rank in range(world_size + 1))
    return [
        ContiguousThenCyclic((0,) * world_size + (50,), 4),  # all of a prompt on the last rank
        BlockCyclic(world_size, 7),
        BlockCyclic(world_size, 3, (*range(1, world_size), 2 * world_size)),
        BlockCyclic(world_size),
        Contiguous((*even[:-1], LENGTH + 5)),
    ]


@by_world([3], [1, 2, 5])
@on_ranks()
def test_every_slot_moves_to_where_the_layout_says(rank: int, world_size: int) -> None:
    layouts = _layouts(world_size)
    for first in layouts:
        cache = hf.TreeCache(CONFIG, layout=first, growth=8)
        append(cache, LENGTH - 1)
        copied = copy.deepcopy(cache)
        length = LENGTH - 1
        with torch.inference_mode():
            cache.reshard(layouts[1])
        check_holds(cache, length, layouts[1])
        for layout in layouts:
            cache.reshard(layout)
            check_holds(cache, length, layout)
            if layout is not layouts[-1]:
                append(cache, 1)
                length += 1
                check_holds(cache, length, layout)
        check_holds(copied, LENGTH - 1, first)  # a copy stays where it was


def _generate(rank: int, world_size: int, kv_dtype: str | None) -> list[list[int]]:
    layouts = _layouts(world_size)
    model = hf.enable(make_model("llama"), layout=layouts[0])
    cache = hf.TreeCache(model.config, layout=layouts[0], kv_dtype=kv_dtype)
    prompts = make_prompts()
    tokens = model.generate(**prompts, **{CACHE_NAME: cache}, max_new_tokens=4)
    mask = prompts["attention_mask"]
    for layout in layouts[1:3]:
        cache.reshard(layout)
        if world_size > 1:
            with pytest.raises(ValueError, match=r"layout .* enabled with .* enable\(model, layou"):
                _go_on(model, tokens, mask, cache)
        hf.enable(model, layout=layout)
        tokens = _go_on(model, tokens, mask, cache)
    return tokens.tolist()


def _go_on(
    model: torch.nn.Module, tokens: torch.Tensor, mask: torch.Tensor, cache: hf.TreeCache
) -> torch.Tensor:
    new = mask.new_ones((mask.shape[0], tokens.shape[1] - mask.shape[1]))
    whole = torch.cat((mask, new), 1)
    return model.generate(tokens, attention_mask=whole, **{CACHE_NAME: cache}, max_new_tokens=4)


@pytest.mark.parametrize(
    "world_size, kv_dtype",
    tiers_of(product((1, 2, 3), (None, "int8", "fp8")), [(2, "int8")]),
)
def test_generation_goes_on_with_the_same_tokens(world_size: int, kv_dtype: str | None) -> None:
    model = hf.enable(make_model("llama"), kv_dtype=kv_dtype)
    expected = model.generate(**make_prompts(), max_new_tokens=12).tolist()
    for tokens in run_ranks(_generate, world_size, kv_dtype):
        assert tokens == expected


def test_a_cache_without_tokens_takes_another_layout() -> None:
    cache = hf.TreeCache(CONFIG)
    cache.reshard(BlockCyclic(1, 4))
    append(cache, 9)
    check_holds(cache, 9, BlockCyclic(1, 4))


def _refuse(rank: int, world_size: int) -> str:
    layout = BlockCyclic(world_size, 7)
    cache = hf.TreeCache(CONFIG, layout=layout, timeout=AMPLE)
    append(cache, LENGTH)
    with pytest.raises(ValueError, match="layout must have the group's world size 2, got one of 3"):
        cache.reshard(BlockCyclic(3))
    with pytest.raises(ValueError, match="has no rank for slot 76"):
        cache.reshard(Contiguous((0, 5, LENGTH - 1)))
    error, message = (
        (ExchangeError, "outcome is TreeCache: layout must have the group's world size 2")
        if rank == 0
        else (ValueError, "layout must have the group's world size 2, got one of 3")
    )
    with pytest.raises(error, match=message):
        cache.reshard(BlockCyclic(2 + rank))
    with pytest.raises(ExchangeError) as caught:
        cache.reshard(BlockCyclic(2, 1 + rank))
    check_holds(cache, LENGTH, layout)
    cache.reshard(BlockCyclic(2))  # nothing was sent: the group is as it was
    check_holds(cache, LENGTH, BlockCyclic(2))
    return str(caught.value)


def test_a_layout_that_cannot_be_is_refused_and_nothing_moves() -> None:
    for error in run_ranks(_refuse, 2):
        assert "layout is BlockCyclic(world_size=2, block=2) on rank 1" in error


def test_what_is_no_layout_is_refused() -> None:
    cache = hf.TreeCache(CONFIG)
    append(cache, LENGTH)
    for layout in (5, "cyclic", BlockCyclic):
        with pytest.raises(TypeError, match="layout must be a ShardLayout, such as BlockCyclic"):
            cache.reshard(layout)  # type: ignore[arg-type]
    check_holds(cache, LENGTH, cache.shard.layout)


def _die(rank: int, world_size: int) -> str:
    cache = hf.TreeCache(CONFIG, layout=BlockCyclic(3, 7), timeout=AMPLE)
    append(cache, LENGTH)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ExchangeError) as caught:
        cache.reshard(BlockCyclic(3))
    with pytest.raises(ExchangeError, match="failed before"):
        cache.reshard(BlockCyclic(3))
    return str(caught.value)


@pytest.mark.deep
def test_a_lost_rank_is_an_error_on_the_others() -> None:
    errors = run_ranks(_die, 3, lost=[1])
    assert all("rank 1" in errors[rank] for rank in (0, 2))
