# SPDX-License-Identifier: BSD-3-Clause
"""enable(model, deterministic=n): the same logits, bit for bit, on every number of ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import tiers_of

pytest.importorskip("transformers")

from hf_models import make_model, make_prompts
from tree_attention import BlockCyclic, Contiguous, ContiguousThenCyclic, hf
from tree_attention.hf import CACHE_NAME

SIZE = 8  # prompts have 37 slots
OPTIONS = {
    "max_new_tokens": 24,
    "min_new_tokens": 24,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "growing": ("llama", {}),
    "chunks": ("llama", {"prefill_chunk_size": 16}),
    "int8": ("llama", {"kv_dtype": "int8"}),
    "fixed size, windows and sinks": ("gpt_oss", {"max_length": 70}),
}


def generate(rank: int, world_size: int, name: str, options: dict[str, Any]) -> tuple[Tensor, ...]:
    model = hf.enable(make_model(name), **options)
    output = model.generate(**make_prompts(), **OPTIONS)
    assert isinstance(output[CACHE_NAME], hf.TreeCache)
    return output.sequences, torch.stack(output.logits)


@pytest.mark.parametrize("case", tiers_of(CASES, quick=["growing"]))
def test_same_tokens_and_logits_for_every_world(case: str) -> None:
    name, options = CASES[case]
    options = options | {"deterministic": SIZE}
    expected = run_ranks(generate, 1, name, options)[0]
    for world_size in (2, 3):
        for result in run_ranks(generate, world_size, name, options):
            assert all(map(torch.equal, result, expected))


@pytest.mark.deep
def test_shares_keep_the_bits() -> None:
    expected = run_ranks(generate, 1, "llama", {"deterministic": SIZE})[0]
    for result in run_ranks(generate, 2, "llama", {"deterministic": SIZE, "shares": [2, 1]}):
        assert all(map(torch.equal, result, expected))


def generate_contiguous(rank: int, world_size: int) -> tuple[Tensor, ...]:
    bounds = (*range(0, 2 * SIZE * world_size, 2 * SIZE), 208)
    options = {"layout": Contiguous(bounds), "deterministic": SIZE}
    return generate(rank, world_size, "llama", options)


@pytest.mark.deep
def test_room_that_is_not_in_use_is_no_block() -> None:
    """Buffers grow by more slots than the first rank of a contiguous layout has."""
    expected = run_ranks(generate_contiguous, 1)[0]
    for result in run_ranks(generate_contiguous, 2):
        assert all(map(torch.equal, result, expected))


@pytest.mark.deep
def test_otherwise_logits_depend_on_the_world() -> None:
    """What the option is for."""
    layouts = {n: {"layout": BlockCyclic(n, SIZE)} for n in (1, 2)}
    (_, alone), (_, shared) = (run_ranks(generate, n, "llama", layouts[n])[0] for n in layouts)
    assert not torch.equal(alone, shared)


def test_a_resharded_cache_stays_deterministic() -> None:
    cache = hf.TreeCache(make_model("llama").config, deterministic=SIZE)
    assert cache.shard.layout == BlockCyclic(1, SIZE)
    model = hf.enable(make_model("llama"), deterministic=SIZE)
    with torch.no_grad():
        model(**make_prompts(), **{CACHE_NAME: cache})
    cache.reshard(BlockCyclic(1, 2 * SIZE))
    assert cache.shard.blocks.size == SIZE


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("llama", {"deterministic": -1}, "TreeCache: deterministic must be an integer from 0 to"),
        (
            "llama",
            {"deterministic": 8, "layout": ContiguousThenCyclic((0, 16), 16)},
            "TreeCache: with deterministic=8 layout must be a BlockCyclic or a Contiguous that is",
        ),
        ("llama", {"deterministic": 8, "prefill": "split"}, "prefill must be 'auto' or 'replicat"),
        (
            "mistral_window",
            {"deterministic": 8},
            "deterministic needs a max_length, .* window of 8",
        ),
        ("deepseek", {"deterministic": 8}, "deterministic is not supported with latent atten"),
    ],
)
def test_errors(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.enable(make_model(name), **options)


def split(rank: int, world_size: int) -> None:
    model = hf.enable(make_model("llama"), prefill="split")
    cache = hf.TreeCache(model.config, deterministic=SIZE)
    ids = make_prompts()["input_ids"]
    with torch.no_grad(), pytest.raises(ValueError, match="needs a model that was enabled with it"):
        model(ids, **{CACHE_NAME: cache}, logits_to_keep=1)


def test_a_split_prompt_is_refused() -> None:
    run_ranks(split, 2)


def test_a_given_cache_is_as_deterministic_as_the_model() -> None:
    model = hf.enable(make_model("llama"), deterministic=SIZE)
    cache = hf.TreeCache(model.config, layout=BlockCyclic(1, SIZE))
    with pytest.raises(ValueError, match="cache has deterministic=0 and the model was enabled wi"):
        model.generate(**make_prompts(), max_new_tokens=2, **{CACHE_NAME: cache})
    cache = hf.TreeCache(model.config, deterministic=SIZE)
    model.generate(**make_prompts(), max_new_tokens=2, **{CACHE_NAME: cache})
