# SPDX-License-Identifier: BSD-3-Clause
"""Multi-head latent attention: the cache holds latents alone, and tokens are those of transformers.

The mistakes these tests are for: a latent without its rotated key or in another order, a weight of
other heads, keys that are expanded after all, a model that goes on with weights that are not its
own. `hf_models` has such a model too, which other tests run with the rest.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from distributed import run_ranks
from tiers import by_world

pytest.importorskip("transformers")

from transformers import PreTrainedModel

from hf_families import LATENT, WORKING
from hf_families import make_model as make_family
from hf_models import make_model, make_prompts
from tree_attention import BlockCyclic, Contiguous, hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.cache import latent, operands

GREEDY = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
SIZES = {"kv_lora_rank": 24, "qk_rope_head_dim": 4}  # of the model in hf_models


def _prompts_of_family() -> dict[str, Tensor]:
    prompts = make_prompts()
    return {**prompts, "input_ids": prompts["input_ids"].clamp(max=96)}


def _generate_family(rank: int, world_size: int, name: str, tokens: Tensor) -> None:
    model = make_family(WORKING[name])
    for prefill in ("replicated", "split"):
        hf.enable(model, layout=BlockCyclic(world_size, 4), prefill=prefill)
        assert torch.equal(model.generate(**_prompts_of_family(), **GREEDY), tokens), prefill


@pytest.mark.deep
@pytest.mark.parametrize("name", LATENT)
def test_families_over_three_ranks(name: str) -> None:
    if not WORKING[name].exists:
        pytest.skip(f"this release of transformers has no {name}")
    tokens = make_family(WORKING[name]).generate(**_prompts_of_family(), **GREEDY)
    run_ranks(_generate_family, 3, name, tokens)


WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 7},
    "chunked beams": {"prefill_chunk_size": 7, "num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {},
}


def _draft() -> PreTrainedModel:
    """A model of the same kind that often says something else: its layers are in another order."""
    model = make_model("deepseek")
    model.model.layers.append(model.model.layers.pop(0))
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    return model


@cache
def _expected(way: str) -> Tensor:
    batch = 1 if way in ("lookup", "assisted") else 3
    num_beams = WAYS.get(way, {}).get("num_beams", 1)
    return make_model("deepseek").generate(**make_prompts(batch), **GREEDY, num_beams=num_beams)


def _generate_in_ways(rank: int, world_size: int, expected: dict[str, Tensor]) -> None:
    model, draft = (
        hf.enable(each, layout=BlockCyclic(world_size, 4))
        for each in (make_model("deepseek"), _draft())
    )
    for way, tokens in expected.items():
        arguments = {"assistant_model": draft} if way == "assisted" else WAYS[way]
        found = model.generate(**make_prompts(len(tokens)), **GREEDY, **arguments)
        assert torch.equal(found, tokens), way


@by_world([], [3, 1, 2])
def test_ways_to_generate(world_size: int) -> None:
    """Rows that are repeated, reordered and cropped, and prompts in chunks."""
    run_ranks(_generate_in_ways, world_size, {way: _expected(way) for way in WAYS})


LONG = 61  # tokens of a prompt of which a third is enough to form keys of all heads


def _in_pieces(rank: int, world_size: int, tokens: Tensor) -> None:
    model, prompts = make_model("deepseek"), make_prompts(3, LONG)
    num_heads: list[int] = []
    make = latent._ExpandedLayer

    def recording(layer: Any, module: Any, weight: Tensor, dtype: torch.dtype) -> Any:
        num_heads.append(len(weight))
        return make(layer, module, weight, dtype)

    three_heads = 3 * 3 * LONG * (2 * 8 + 4 + 6) * 4
    for num_bytes, expected in ((1 << 20, [8]), (three_heads, [3, 3, 2]), (1, [1] * 8)):
        for prefill in ("replicated", "split"):
            for block in (4, 64):
                hf.enable(model, layout=BlockCyclic(world_size, block), prefill=prefill)
                num_heads.clear()
                with (
                    mock.patch.object(latent, "_MAX_EXPANDED_BYTES", num_bytes),
                    mock.patch.object(latent, "_ExpandedLayer", recording),
                ):
                    assert torch.equal(model.generate(**prompts, **GREEDY), tokens)
                assert num_heads == expected * 2  # layers, and in the prompt alone


def _in_pieces_of_own_heads(rank: int, world_size: int, tokens: Tensor) -> None:
    shares = [*range(1, world_size), 0]  # the last rank goes on with no head
    model = hf.enable(hf.parallelize(make_model("deepseek"), shares=shares))
    for num_bytes in (1 << 20, 1):
        with mock.patch.object(latent, "_MAX_EXPANDED_BYTES", num_bytes):
            assert torch.equal(model.generate(**make_prompts(3, LONG), **GREEDY), tokens)


@by_world([], [2, 3])
def test_prompts_are_expanded_by_ranks_of_unequal_shares(world_size: int) -> None:
    tokens = make_model("deepseek").generate(**make_prompts(3, LONG), **GREEDY)
    run_ranks(_in_pieces_of_own_heads, world_size, tokens)


@by_world([], [2, 1, 3])
def test_prompts_are_expanded_in_pieces_of_heads(world_size: int) -> None:
    """Also where all slots of the prompt are on the first rank."""
    tokens = make_model("deepseek").generate(**make_prompts(3, LONG), **GREEDY)
    run_ranks(_in_pieces, world_size, tokens)


def _two_turns(rank: int, world_size: int, tokens: Tensor) -> None:
    model = hf.enable(make_model("deepseek"), layout=BlockCyclic(world_size, 4))
    cache = hf.TreeCache(model.config, layout=BlockCyclic(world_size, 4))
    prompts = make_prompts()
    model.generate(**prompts, **{CACHE_NAME: cache}, max_new_tokens=1)
    layout = Contiguous((*range(0, 10 * world_size, 10), 100))
    cache.reshard(layout)
    hf.enable(model, layout=layout)
    cache.crop(-1)
    assert torch.equal(model.generate(**prompts, **GREEDY, **{CACHE_NAME: cache}), tokens)


@by_world([3], [1, 2])
def test_a_resharded_cache_goes_on_with_the_same_tokens(world_size: int) -> None:
    run_ranks(_two_turns, world_size, _expected("greedy"))


def _saved_and_loaded(rank: int, world_size: int, directory: Path) -> None:
    layout = BlockCyclic(world_size, 4)
    model = hf.enable(make_model("deepseek"), layout=layout)
    if not directory.exists():
        cache = hf.TreeCache(model.config, layout=layout)
        model.generate(**make_prompts(), **{CACHE_NAME: cache}, max_new_tokens=1)
        cache.save(directory)
        return
    found = {
        kv_dtype: hf.TreeCache.load(directory, model.config, layout=layout, kv_dtype=kv_dtype)
        for kv_dtype in (None, "int8", "fp8")
    }
    for kv_dtype, error in {"int8": 1 / 254, "fp8": 1 / 16}.items():
        for layer, exact in zip(found[kv_dtype].layers, found[None].layers, strict=True):
            used = exact.shard.count(exact.length)
            rows, scale = layer.key_rows[:, :, :used].float(), layer.k_scale[:, :, :used, None]
            largest = exact.key_rows[:, :, :used].abs().amax(-1, keepdim=True)
            assert used > 0
            assert (
                (rows * scale - exact.key_rows[:, :, :used]).abs() <= 1.01 * error * largest
            ).all()


def test_latents_are_saved_and_loaded_in_8_bits(tmp_path: Path) -> None:
    for world_size in (3, 2):
        run_ranks(_saved_and_loaded, world_size, tmp_path / "cache")
    config = copy.deepcopy(make_model("deepseek").config)
    config.kv_lora_rank, config.qk_rope_head_dim = 20, 8
    with pytest.raises(
        ValueError, match=r"another model: its kv_lora_rank is 24, and that of .* 20"
    ):
        hf.TreeCache.load(tmp_path / "cache", config)


@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
def test_bytes_of_a_token(kv_dtype: str | None) -> None:
    """A latent and a rotated key in each layer: 28 columns, not the 8 x (12 + 6) of all heads."""
    model = hf.enable(make_model("deepseek"), kv_dtype=kv_dtype)
    cache = hf.TreeCache(model.config, kv_dtype=kv_dtype, growth=1)
    prompts = make_prompts()
    model.generate(**prompts, **{CACHE_NAME: cache}, max_new_tokens=1)
    num_tokens = len(cache) * prompts["input_ids"].numel()
    columns = sum(SIZES.values())
    # In 8 bits with a scale of keys and, unused, of values.
    num_bytes = 4 * columns if kv_dtype is None else columns + 2 * 4
    assert cache.num_bytes == num_tokens * num_bytes


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Logits as near to float32 as those of transformers in the same dtype."""
    mask = make_prompts()["attention_mask"].bool()

    def logits(model: PreTrainedModel) -> Tensor:
        cache = hf.TreeCache(model.config) if "generate" in vars(model) else None
        return model(**make_prompts(), **{CACHE_NAME: cache}).logits[mask]

    exact = logits(make_model("deepseek"))
    expected = logits(make_model("deepseek").to(dtype))
    found = logits(hf.enable(make_model("deepseek").to(dtype)))
    assert found.dtype == dtype
    assert (found - exact).abs().mean() <= 2 * (expected - exact).abs().mean()


def test_disable_gives_the_expansion_back() -> None:
    model = make_model("deepseek")
    attributes = [set(vars(layer.self_attn)) for layer in model.model.layers]
    hf.enable(model)
    copied = copy.deepcopy(model)
    hf.disable(model)
    assert [set(vars(layer.self_attn)) for layer in model.model.layers] == attributes
    assert torch.equal(model.generate(**make_prompts(), **GREEDY), _expected("greedy"))
    # The copy is enabled still, with weights of its own.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    output = copied.generate(**make_prompts(), **GREEDY, return_dict_in_generate=True)
    assert torch.equal(output.sequences, _expected("greedy"))
    assert isinstance(output[CACHE_NAME].layers[0], latent.LatentLayer)


def test_other_caches_are_expanded() -> None:
    """Without a cache an enabled model computes keys of all heads, as transformers does."""
    model = hf.enable(make_model("deepseek"))
    tokens = model.generate(**make_prompts(), **GREEDY, use_cache=False)
    assert torch.equal(tokens, _expected("greedy"))


class _Adapted(nn.Linear):
    """As of low-rank adaptation: the weight is not all that the module computes with."""


class _Quantised(Tensor):
    """As of weights of 8 bits behind the interface of a tensor."""


def _quantised(in_features: int, out_features: int) -> nn.Linear:
    linear = nn.Linear(in_features, out_features, bias=False)
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(_Quantised))
    return linear


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (_Adapted, "got a test_latents._Adapted"),
        (_quantised, "got one whose weight is a _Quantised of torch.float32"),
        (nn.Linear, "got one with a bias"),
    ],
)
def test_other_projections_are_refused(make: Any, got: str) -> None:
    """By `enable`, and later on where the module is replaced after it."""
    message = f"kv_b_proj of DeepseekV3Attention must be a torch.nn.Linear with numbers .*{got}"
    for is_enabled in (False, True):
        model = make_model("deepseek")
        if is_enabled:
            hf.enable(model)
        attention = model.model.layers[1].self_attn
        old = attention.kv_b_proj
        attention.kv_b_proj = make(old.in_features, old.out_features)
        with pytest.raises(ValueError, match=message):
            (model if is_enabled else hf.enable(model)).generate(**make_prompts(), **GREEDY)


def test_a_release_that_caches_expanded_keys_is_refused() -> None:
    model = make_model("deepseek")
    kind = type(model.model.layers[0].self_attn)
    message = r"\(kv_lora_rank 24\), and no module of it has expand_kv.* transformers >= 5.17"
    with mock.patch.object(kind, "expand_kv"):
        del kind.expand_kv
        with pytest.raises(ValueError, match=f"^enable: DeepseekV3ForCausalLM has .*{message}"):
            hf.enable(model)
    cache = hf.TreeCache(model.config)
    keys = torch.zeros(1, 8, 3, 12)
    with pytest.raises(ValueError, match=r"takes latents \[batch, 1, tokens, 24\], got \[1, 8, 3"):
        cache.update(keys, keys, 0)


def test_a_device_without_such_long_rows_is_named() -> None:
    model = make_model("deepseek")
    error = ValueError("lean_decode: head_dim must be at most 16, got 28")
    message = "caches latents of 28 columns, which attention does not take on cpu: lean_decode: hea"
    with (
        mock.patch.object(operands, "check_decode", side_effect=error),
        pytest.raises(ValueError, match=f"^enable: DeepseekV3ForCausalLM {message}"),
    ):
        hf.enable(model)
    assert "generate" not in vars(model)
