# SPDX-License-Identifier: BSD-3-Clause
"""Tensors that belong to the tokens of a prompt: what each chunk and rank gets of them.

`generate` takes positions and kinds of tokens for the whole text or for its new tokens, and
embeddings in front of tokens, or in their place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import by_world

pytest.importorskip("transformers")

from transformers import DynamicCache, PreTrainedModel

import hf_families
from generations import generated
from hf_models import VOCAB_SIZE, make_model, make_prompts
from tree_attention import hf
from tree_attention.hf import CACHE_NAME

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
CACHED, LENGTH = 20, 37

worlds = by_world([], [2, 1, 3])


def _model(name: str) -> PreTrainedModel:
    if name == "llama":
        return make_model(name)
    return hf_families.make_model({**hf_families.WORKING, **hf_families.HYBRIDS}[name])


def _second_turns(name: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Arguments of the second turn of a text of which the first tokens are cached."""
    positions = torch.arange(LENGTH)[None].clone()
    positions[:, CACHED + 2 :] += 9  # others than transformers would make
    whole = make_prompts(batch=1)["input_ids"] % 90
    new = {"input_ids": whole[:, CACHED:], "attention_mask": torch.ones_like(whole)}
    yield "new tokens", new
    if name == "Qwen3.5":  # which has positions of text, height and width
        positions = positions.expand(3, 1, -1) + torch.tensor([0, 1, 2])[:, None, None]
    yield "new, all positions", {**new, "position_ids": positions}
    yield "new, new positions", {**new, "position_ids": positions[..., CACHED:]}
    yield "all, new positions", {"input_ids": whole, "position_ids": positions[..., CACHED:]}
    if name == "GPT-2":
        kinds = (torch.arange(LENGTH)[None] // 3) % 7
        yield "new, all kinds", {**new, "token_type_ids": kinds}
        yield "new, new kinds", {**new, "token_type_ids": kinds[:, CACHED:]}


def _turn(model: PreTrainedModel, cache: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The tokens of a second turn, and their logits, which show positions that tokens do not."""
    first = make_prompts(batch=1)["input_ids"][:, :CACHED] % 90
    with torch.no_grad():
        model(first, **{CACHE_NAME: cache})
    tokens, logits, _ = generated(model, options, **GREEDY, **{CACHE_NAME: cache})
    return tokens[:, -5:], logits


def _check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-3)


@functools.cache
def _expected(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    model = _model(name)
    return {
        case: _turn(model, DynamicCache(config=model.config), options)
        for case, options in _second_turns(name)
    }


def _turns(rank: int, world_size: int, name: str, expected: dict[str, Any]) -> None:
    model, can_split = _model(name), name != "Qwen3.5"
    for case, options in _second_turns(name):
        for prefill in ("split", "replicated") if can_split else ("auto",):
            for size in (None, 5):
                hf.enable(model, prefill=prefill, prefill_chunk_size=size)
                cache = hf.TreeCache(model.config)
                _check(_turn(model, cache, options), expected[case])
        explicit = {**options, "prefill_chunk_size": 7}
        cache = hf.TreeCache(model.config)
        _check(_turn(model, cache, explicit), expected[case])


@worlds
@pytest.mark.parametrize("name", ["llama", "GPT-2", "Qwen3.5"])
def test_a_second_turn_of_new_tokens_alone(world_size: int, name: str) -> None:
    expected = _expected(name)
    logits, of_other_positions = (expected[x][1] for x in ("new tokens", "new, new positions"))
    assert (logits - of_other_positions).abs().max() > 0.01
    run_ranks(_turns, world_size, name, expected)


def _embeddings() -> tuple[Tensor, Tensor]:
    ids = make_prompts(batch=1)["input_ids"][:, :29]
    soft = torch.randint(3, VOCAB_SIZE, (1, 34), generator=torch.Generator().manual_seed(3))
    return ids, make_model("llama").get_input_embeddings()(soft).detach()


# Of these max_length counts 30 tokens, which transformers takes 34 embeddings from.
_LENGTHS: tuple[dict[str, Any], ...] = (
    {"max_new_tokens": 12, "min_new_tokens": 12, "repetition_penalty": 1.3},
    {"max_length": 70},
)


def _prompts_of_embeddings(rank: int, world_size: int, expected: list[Tensor]) -> None:
    ids, embeds = _embeddings()
    prompt = {"input_ids": ids, "inputs_embeds": embeds, "attention_mask": torch.ones(1, 34)}
    slots = 34 + 12 - 1
    for options in (
        {},
        {"max_length": slots},
        {"prefill": "split"},
        {"prefill": "replicated", "prefill_chunk_size": 8},
    ):
        model = hf.enable(make_model("llama"), **options)
        for length, tokens in zip(_LENGTHS, expected, strict=True):
            found = model.generate(**prompt, **length, do_sample=False)
            assert torch.equal(found, tokens)
            found = model.generate(**prompt, **length, do_sample=False, prefill_chunk_size=5)
            assert torch.equal(found, tokens)
    model = hf.enable(make_model("llama"), max_length=slots - 1)
    with pytest.raises(ValueError, match=f"max_length 44, and the .* tokens need {slots} slots"):
        model.generate(**prompt, **_LENGTHS[0], do_sample=False)


@worlds
def test_embeddings_in_front_of_tokens(world_size: int) -> None:
    ids, embeds = _embeddings()
    model = make_model("llama")
    mask = torch.ones(1, 34)
    expected = [
        model.generate(
            input_ids=ids, inputs_embeds=embeds, attention_mask=mask, do_sample=False, **length
        )
        for length in _LENGTHS
    ]
    assert [tokens.shape[1] for tokens in expected] == [29 + 12, 36]
    run_ranks(_prompts_of_embeddings, world_size, expected)


def test_new_embeddings_with_a_cache_are_refused() -> None:
    """transformers takes them for the whole text, and feeds too few of them."""
    model = hf.enable(make_model("llama"))
    cache = hf.TreeCache(model.config)
    ids, embeds = _embeddings()
    with torch.no_grad():
        model(ids[:, :20], **{CACHE_NAME: cache})
    with pytest.raises(ValueError, match=r"the cache holds 20 tokens .* inputs_embeds .* all 54"):
        model.generate(
            inputs_embeds=embeds, attention_mask=torch.ones(1, 54), **{CACHE_NAME: cache}, **GREEDY
        )
