# SPDX-License-Identifier: BSD-3-Clause
"""Caches of 8 bits: the memory is what the formats say, and ranks have one format.

`test_generations.py` has what models say with them."""

from __future__ import annotations

import pytest
import torch

from distributed import run_ranks

pytest.importorskip("transformers")

from generations import greedy
from hf_models import CONFIGS, make_model, make_prompts
from rounded_caches import rounded_cache
from tree_attention import hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.options import KV_DTYPES
from tree_attention.reference import quantise

GREEDY = greedy(12)
kv_dtypes = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


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
    model = make_model("llama")
    rounded = rounded_cache(model.config, "int8")
    expected = model.generate(**make_prompts(), **{CACHE_NAME: rounded}, **GREEDY)
    hf.enable(model)
    cache = hf.TreeCache(model.config, kv_dtype="int8")
    tokens = model.generate(**make_prompts(), **{CACHE_NAME: cache}, **GREEDY)
    assert cache.layers[0].key_rows.dtype == torch.int8
    assert torch.equal(tokens, expected)
