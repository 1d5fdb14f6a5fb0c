# SPDX-License-Identifier: BSD-3-Clause
"""Caches of 8 bits: generations equal those of transformers with keys and values rounded as the
cache rounds them, and the memory is what the formats say."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import by_world, tiers

pytest.importorskip("transformers")

from transformers import DynamicCache

import split_models
from generations import nan_in_new_memory, ways_to_read
from hf_models import CONFIGS, make_model, make_prompts
from tree_attention import BlockCyclic, hf
from tree_attention.hf.options import KV_DTYPES
from tree_attention.reference import quantise

GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
LOGITS = {"output_logits": True, "return_dict_in_generate": True}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "beams": GREEDY | {"num_beams": 3},
    "lookup": GREEDY | {"prompt_lookup_num_tokens": 4},
}

worlds = by_world([2], [1, 3])
kv_dtypes = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


class RoundedCache(DynamicCache):
    """transformers' own cache of what stands in a cache of 8 bits."""

    kv_dtype: torch.dtype
    has_latents: bool

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = [key_states, value_states]
        if self.has_latents:  # a latent and its rotated key are one row
            rows = [torch.cat(rows, dim=3)]
        rounded = []
        for x in rows:
            values, scale = quantise(x, self.kv_dtype)
            rounded.append((values.float() * scale[..., None]).to(x.dtype))
        if self.has_latents:
            rounded = list(rounded[0].split((key_states.shape[3], value_states.shape[3]), dim=3))
        return super().update(*rounded, *args, **kwargs)


def _rounded_cache(config: Any, kv_dtype: str) -> RoundedCache:
    rounded = RoundedCache(config=config)
    rounded.kv_dtype = KV_DTYPES[kv_dtype]
    rounded.has_latents = hasattr(config, "kv_lora_rank")
    return rounded


@cache
def _expected(name: str, kv_dtype: str, way: str = "greedy") -> tuple[Tensor, Tensor]:
    """Tokens and logits of transformers, for prompts in lists of one: its caches of windows do not
    look at a batch's padding."""
    model = make_model(name)
    output = model.generate(
        **make_prompts(),
        past_key_values=_rounded_cache(model.config, kv_dtype),
        **WAYS[way],
        **LOGITS,
    )
    return output.sequences, torch.stack(output.logits)


def _generate(rank: int, world_size: int, name: str, kv_dtype: str, expected: Any) -> list[Tensor]:
    tokens, logits = expected
    model, found = make_model(name), []
    with nan_in_new_memory():
        for options in ways_to_read(BlockCyclic(world_size, 4)):
            hf.enable(model, kv_dtype=kv_dtype, **options)
            output = model.generate(**make_prompts(), **GREEDY, **LOGITS)
            assert torch.equal(output.sequences, tokens), options
            torch.testing.assert_close(torch.stack(output.logits), logits, rtol=0, atol=0.01)
            found += output.logits
    return found


@worlds
@kv_dtypes
@pytest.mark.parametrize("name", tiers(["llama", "deepseek"], ["gemma2", "gpt_oss"]))
def test_tokens_are_those_of_rounded_keys(name: str, kv_dtype: str, world_size: int) -> None:
    """Padding, windows, soft-caps and sinks; split prompts and chunks. Ranks have the same bits."""
    expected = _expected(name, kv_dtype)
    results = run_ranks(_generate, world_size, name, kv_dtype, expected)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def _generate_in_ways(rank: int, world_size: int, kv_dtype: str, expected: dict[str, Any]) -> None:
    model = hf.enable(make_model("llama"), kv_dtype=kv_dtype)
    for way, (tokens, _) in expected.items():
        prompts = make_prompts(1 if way == "lookup" else 3)
        assert torch.equal(model.generate(**prompts, **WAYS[way]), tokens), way


@worlds
@kv_dtypes
def test_beams_and_lookup(kv_dtype: str, world_size: int) -> None:
    """Caches whose rows are reordered, repeated and cropped."""
    model = make_model("llama")
    expected = {"beams": _expected("llama", kv_dtype, "beams")}
    lookup = model.generate(
        **make_prompts(1),
        past_key_values=_rounded_cache(model.config, kv_dtype),
        **WAYS["lookup"],
    )
    run_ranks(_generate_in_ways, world_size, kv_dtype, expected | {"lookup": (lookup, None)})


def _generate_split(rank: int, world_size: int, kv_dtype: str, tokens: Tensor) -> None:
    for size in split_models.sizes_of_tensor_groups(world_size):
        model = split_models.make_model("llama")
        hf.parallelize(model, tensor_parallel_size=size)
        hf.enable(model, kv_dtype=kv_dtype)
        found = model.generate(**split_models.make_prompts(), **GREEDY)
        assert torch.equal(found, tokens), size


@by_world([2], [3, 4])
@kv_dtypes
def test_split_weights(kv_dtype: str, world_size: int) -> None:
    model = split_models.make_model("llama")
    tokens = model.generate(
        **split_models.make_prompts(),
        past_key_values=_rounded_cache(model.config, kv_dtype),
        **GREEDY,
    )
    run_ranks(_generate_split, world_size, kv_dtype, tokens)


@kv_dtypes
def test_bytes_of_a_token(kv_dtype: str) -> None:
    """A byte for each element and four for each scale."""
    config = CONFIGS["llama"]
    cache = hf.TreeCache(config, kv_dtype=kv_dtype, growth=1)
    keys = torch.randn(1, 2, 10, 8)
    for layer_idx in range(len(cache)):
        cache.update(keys, keys, layer_idx)
    assert cache.num_bytes == len(cache) * 2 * 2 * 10 * (8 + 4)
    layer = cache.layers[0]
    values, scale = quantise(keys, KV_DTYPES[kv_dtype])
    assert torch.equal(layer.key_rows.float(), values.float())
    assert torch.equal(layer.k_scale, scale)


def test_an_unknown_kv_dtype_is_refused() -> None:
    for make in (hf.TreeCache, lambda config, **o: hf.enable(make_model("llama"), **o)):
        with pytest.raises(ValueError, match=r"kv_dtype must be None or one of 'int8', 'fp8', got"):
            make(CONFIGS["llama"], kv_dtype="int4")


def _differ(rank: int, world_size: int) -> str:
    model = hf.enable(make_model("llama"), kv_dtype=("int8", None)[rank])
    with pytest.raises(RuntimeError) as caught:
        model.generate(**make_prompts(), **GREEDY)
    return str(caught.value)


def test_ranks_with_other_kv_dtypes_are_told() -> None:
    for error in run_ranks(_differ, 2):
        assert "kv_dtype is None on rank 1, torch.int8 on rank 0" in error


def test_a_given_cache_keeps_its_kv_dtype() -> None:
    model = hf.enable(make_model("llama"))
    cache = hf.TreeCache(model.config, kv_dtype="int8")
    tokens = model.generate(**make_prompts(), past_key_values=cache, **GREEDY)
    assert cache.layers[0].key_rows.dtype == torch.int8
    assert torch.equal(tokens, _expected("llama", "int8")[0])
