# SPDX-License-Identifier: BSD-3-Clause
"""Prompt lookup, assistants and drafts of the model itself beside what transformers leaves to the
cache: a second turn, and many candidates on layers with a sliding window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import on_ranks
from tiers import by_world, tiers

pytest.importorskip("transformers")

from transformers import GenerationConfig

from hf_models import make_model, make_prompts
from tree_attention import BlockCyclic, hf
from tree_attention.hf import CACHE_NAME

GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


def _generate(model: Any, ids: Tensor, **options: Any) -> Any:
    return model.generate(ids, return_dict_in_generate=True, **GREEDY, **options)


@pytest.mark.deep
@pytest.mark.parametrize("means", ["lookup", "assistant", "early exit"])
@pytest.mark.parametrize("world_size", [2, 1])
@on_ranks()
def test_second_turn(rank: int, world_size: int, means: str) -> None:
    """The text of the first turn and 20 tokens more: only those, and candidates, are fed."""
    prompt = make_prompts(1)["input_ids"]
    more = torch.randint(3, 199, (1, 20), generator=torch.Generator().manual_seed(1))
    for name in ("llama", "mistral_window"):
        options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
        if means == "assistant":
            options = {"assistant_model": make_model("mistral")}
        if means == "early exit":
            options = {"assistant_early_exit": 1}
        plain = make_model(name)
        model = hf.enable(make_model(name), layout=BlockCyclic(world_size, 4))
        first = _generate(model, prompt, **options)
        whole = torch.cat((first.sequences, more), 1)
        mask = torch.ones_like(whole)
        expected = _generate(plain, whole).sequences
        found = _generate(model, whole, **{CACHE_NAME: first[CACHE_NAME]}, **options)
        assert torch.equal(found.sequences, expected)
        assert found[CACHE_NAME].get_seq_length() == expected.shape[1] - 1
        # The new tokens alone, with a mask over all.
        cache = _generate(model, prompt, **options)[CACHE_NAME]
        new = whole[:, cache.get_seq_length() :]
        found = _generate(model, new, attention_mask=mask, **{CACHE_NAME: cache}, **options)
        assert torch.equal(found.sequences[:, new.shape[1] :], expected[:, whole.shape[1] :])


@pytest.mark.parametrize("max_length", tiers([None], [400]))
@by_world([2], [1])
@on_ranks()
def test_more_candidates_than_windows_keep(
    rank: int, world_size: int, max_length: int | None
) -> None:
    """145 candidates of a text that repeats itself, of which few are right."""
    prompt = make_prompts(1)["input_ids"].repeat(1, 6)
    expected = make_model("mistral_window").generate(prompt, **GREEDY)
    model = hf.enable(
        make_model("mistral_window"), layout=BlockCyclic(world_size, 4), max_length=max_length
    )
    found = model.generate(prompt, **GREEDY, prompt_lookup_num_tokens=145)
    assert torch.equal(found, expected)


def test_only_assisted_decoding_keeps_what_a_long_pass_saw() -> None:
    """It takes memory, and a later turn without candidates takes nothing back."""
    model = hf.enable(make_model("mistral_window"))
    first = _generate(model, make_prompts(1)["input_ids"], prompt_lookup_num_tokens=4)
    cache = first[CACHE_NAME]
    assert all(layer.keeps_last_pass for layer in cache.layers)
    _generate(model, first.sequences, **{CACHE_NAME: cache})
    assert not any(layer.keeps_last_pass for layer in cache.layers)


def test_a_cache_of_fixed_size_needs_room_for_all_drafts() -> None:
    """transformers drafts as many tokens as there are layers for that, also for the last one."""
    if not hasattr(GenerationConfig(), "use_mtp"):
        pytest.skip("this release of transformers has no use_mtp")
    ids = make_prompts(1)["input_ids"]
    most = ids.shape[1] + 11
    model = hf.enable(make_model("llama", num_mtp_layers=3), max_length=most + 2)
    with pytest.raises(ValueError, match=f"max_length {most + 2}, and .* need {most + 3} slots"):
        model.generate(ids, **GREEDY, use_mtp=True)
