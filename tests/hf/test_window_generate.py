# SPDX-License-Identifier: BSD-3-Clause
"""Generations with sliding windows that have dropped slots equal those of transformers.

The windows of these models are of 8 slots. The margin and the step by which buffers grow are made
as small, so that short texts leave slots behind all the time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import by_world, tiers, tiers_of

pytest.importorskip("transformers")

import hf_families
from generations import nan_in_new_memory, ways_to_read
from hf_families import WORKING
from hf_models import make_model, make_prompts
from test_kv_dtype import _rounded_cache
from tree_attention import BlockCyclic, hf
from tree_attention.hf.cache import window

WINDOW = 8
NUM_TOKENS = 20
MAX_LENGTH = 90  # of caches of fixed size
GREEDY = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
LOGITS = {"output_logits": True, "return_dict_in_generate": True}
NAMES = ["mistral_window", "gemma2", "gpt_oss"]
FAMILIES = [
    name
    for name, family in WORKING.items()
    if family.exists and family.options.get("sliding_window")
]
assert len(FAMILIES) > 8

worlds = by_world([3], [1, 2, 4])
fixed_or_not = pytest.mark.parametrize("max_length", [None, MAX_LENGTH])


@contextmanager
def _small_margin() -> Iterator[None]:
    with (
        mock.patch.object(window, "MARGIN", 6),
        mock.patch.object(window, "STEP", 3),
        nan_in_new_memory(),
    ):
        yield


def _check_dropped(found: hf.TreeCache) -> None:
    windows = [layer for layer in found.layers if layer.window is not None]
    assert windows
    for layer in windows:
        assert layer.first > 0
        # Of slots that may begin inside a page, and of whole pages.
        assert layer.key_rows.shape[2] < layer.shard.most(WINDOW + 6) + 2 * 3


@cache
def _expected(name: str) -> tuple[Tensor, Tensor]:
    output = make_model(name).generate(**make_prompts(), **GREEDY, **LOGITS)
    return output.sequences, torch.stack(output.logits)


def _generate(
    rank: int, world_size: int, name: str, max_length: int | None, expected: Any
) -> list[Tensor]:
    tokens, logits = expected
    model, found = make_model(name), []
    with _small_margin():
        for options in ways_to_read(BlockCyclic(world_size, 4)):
            hf.enable(model, max_length=max_length, **options)
            output = model.generate(**make_prompts(), **GREEDY, **LOGITS)
            assert torch.equal(output.sequences, tokens), options
            torch.testing.assert_close(torch.stack(output.logits), logits, rtol=0, atol=1e-3)
            _check_dropped(output.past_key_values)
            found += output.logits
    return found


@pytest.mark.deep
@worlds
@fixed_or_not
@pytest.mark.parametrize("name", tiers_of(NAMES, quick=["gemma2"]))
def test_padding_chunks_and_split_prompts(
    name: str, max_length: int | None, world_size: int
) -> None:
    """Equal tokens, and the same bits on all ranks."""
    results = run_ranks(_generate, world_size, name, max_length, _expected(name))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def _generate_family(
    rank: int, world_size: int, max_length: int | None, expected: dict[str, Tensor]
) -> None:
    for name, tokens in expected.items():
        model = hf.enable(
            hf_families.make_model(WORKING[name]),
            layout=BlockCyclic(world_size, 4),
            prefill_chunk_size=16,
            max_length=max_length,
        )
        with _small_margin():
            output = model.generate(**_family_prompts(), **GREEDY, **LOGITS)
        assert torch.equal(output.sequences, tokens), name
        _check_dropped(output.past_key_values)


def _family_prompts() -> dict[str, Tensor]:
    prompts = make_prompts()
    return prompts | {"input_ids": prompts["input_ids"] % hf_families.VOCAB_SIZE}


@pytest.mark.deep
@fixed_or_not
@pytest.mark.parametrize("world_size", [1, 2])
def test_families_with_windows(world_size: int, max_length: int | None) -> None:
    expected = {
        name: hf_families.make_model(WORKING[name]).generate(**_family_prompts(), **GREEDY)
        for name in FAMILIES
    }
    run_ranks(_generate_family, world_size, max_length, expected, timeout=120)


def _generate_in_ways(
    rank: int, world_size: int, kv_dtype: str | None, max_length: int | None, expected: Any
) -> None:
    layout = BlockCyclic(world_size, 4)
    assistant = hf.enable(make_model("mistral_window"))
    for way, (tokens, options) in expected.items():
        model = hf.enable(
            make_model("gemma2"), kv_dtype=kv_dtype, layout=layout, max_length=max_length
        )
        if way == "assistant":
            options = options | {"assistant_model": assistant}
        with _small_margin():
            output = model.generate(
                **make_prompts(3 if way == "beams" else 1), **options, return_dict_in_generate=True
            )
        assert torch.equal(output.sequences, tokens), way
        assert output.past_key_values.layers[0].first > 0


@pytest.mark.deep
@worlds
@fixed_or_not
@pytest.mark.parametrize("kv_dtype", tiers([None], ["int8", "fp8"]))
def test_beams_lookup_and_assistants(
    kv_dtype: str | None, max_length: int | None, world_size: int
) -> None:
    """Caches whose rows are reordered, repeated and cropped."""
    model, expected = make_model("gemma2"), {}
    for way, options in {
        "beams": {"num_beams": 3},
        "lookup": {"prompt_lookup_num_tokens": 4},
        "assistant": {},
    }.items():
        prompts = make_prompts(3 if way == "beams" else 1)
        options = GREEDY | options
        given = _rounded_cache(model.config, kv_dtype) if kv_dtype else None
        expected[way] = model.generate(**prompts, **options, past_key_values=given), options
    run_ranks(_generate_in_ways, world_size, kv_dtype, max_length, expected)


def _go_on(
    rank: int, world_size: int, directory: Path, kv_dtype: str | None, max_length: int | None
) -> list[list[int]]:
    """Two turns over one cache, a copy of it, and what was saved after the first turn."""
    layout = BlockCyclic(world_size, 4)
    model = hf.enable(make_model("gemma2"), layout=layout, kv_dtype=kv_dtype)
    ids = make_prompts(1)["input_ids"]
    with _small_margin():
        if not directory.exists():
            cache = hf.TreeCache(
                model.config, layout=layout, kv_dtype=kv_dtype, max_length=max_length
            )
            model.generate(ids, past_key_values=cache, **GREEDY)
            cache.save(directory)
        cache = hf.TreeCache.load(directory, model.config, layout=layout, max_length=max_length)
        assert cache.layers[0].first > 0
        copied = copy.deepcopy(cache)
        longer = _longer(int(cache.get_seq_length()))
        found = [model.generate(longer, past_key_values=copied, **GREEDY)]
        cache.reshard(BlockCyclic(world_size, 7))
        hf.enable(model, layout=BlockCyclic(world_size, 7))
        found.append(model.generate(longer, past_key_values=cache, **GREEDY))
    assert torch.equal(*found)
    return found[0].tolist()


def _longer(length: int) -> Tensor:
    """The prompt, what gemma2 says, and some more: with `kv_dtype` it need not be what is said."""
    ids = make_prompts(1)["input_ids"]
    said = torch.randint(3, 199, (1, length + 11), generator=torch.Generator().manual_seed(1))
    said[:, : ids.shape[1]] = ids
    return said


@fixed_or_not
@pytest.mark.parametrize("kv_dtype", tiers([None], ["int8"]))
def test_a_kept_cache_goes_on(kv_dtype: str | None, max_length: int | None, tmp_path: Path) -> None:
    """In the same world, in another one, after a reshard and as a copy."""
    directory = tmp_path / "cache"
    model = make_model("gemma2")
    given = _rounded_cache(model.config, kv_dtype) if kv_dtype else None
    first = model.generate(
        make_prompts(1)["input_ids"],
        past_key_values=given,
        return_dict_in_generate=True,
        **GREEDY,
    )
    cached = first.past_key_values
    expected = model.generate(
        _longer(cached.get_seq_length()), past_key_values=cached, **GREEDY
    ).tolist()
    for world_size in (2, 1, 3):
        for found in run_ranks(_go_on, world_size, directory, kv_dtype, max_length):
            assert found == expected


@torch.no_grad()
def _split_and_taken_back(rank: int, world_size: int, wanted: Tensor) -> None:
    model = hf.enable(make_model("mistral_window"), prefill="split")
    ids = make_prompts(batch=1, length=60)["input_ids"]
    kept = hf.TreeCache(model.config)
    for part in (ids[:, :30], ids[:, 30:]):
        model(part, past_key_values=kept, logits_to_keep=1)
    kept.crop(-45)
    found = model(ids[:, 15:40], past_key_values=kept, logits_to_keep=1).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)


@torch.no_grad()
def test_short_passes_that_are_split_can_be_taken_back() -> None:
    """All of them, as long as the layers would have kept their slots if nobody had split them."""
    ids = make_prompts(batch=1, length=60)["input_ids"]
    wanted = make_model("mistral_window")(ids[:, :40], logits_to_keep=1).logits
    run_ranks(_split_and_taken_back, 2, wanted)
