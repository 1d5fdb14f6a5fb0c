# SPDX-License-Identifier: BSD-3-Clause
"""Padding between tokens, which is refused by a sentence that says what it is and what to do.

What the sentences advise gives the tokens that transformers computes under such a mask.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import tiers

pytest.importorskip("transformers")

from hf_models import PAD, make_model, make_prompts
from tree_attention import BlockCyclic, hf
from tree_attention.hf import CACHE_NAME
from window_caches import crop_to

GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
LENGTH, ENDED = 29, 3  # of the prompts, and the tokens of the first answer of row 1


def _turns(model: Any) -> tuple[Any, dict[str, Tensor]]:
    """The cache of a first turn, and the texts of a second one, as a chat in batches has them."""
    first = model.generate(**make_prompts(2, LENGTH), **GREEDY, return_dict_in_generate=True)
    ids = torch.cat((first.sequences, torch.tensor([[7, 8, 9], [9, 8, 7]])), dim=1)
    mask = torch.cat((make_prompts(2, LENGTH)["attention_mask"], torch.ones(2, 11).long()), dim=1)
    ids[1, LENGTH + ENDED : -3], mask[1, LENGTH + ENDED : -3] = PAD, 0
    return first[CACHE_NAME], {"input_ids": ids, "attention_mask": mask}


def _of_row_1(texts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Its tokens without the hole, with the padding in front."""
    kept = texts["attention_mask"][1].bool()
    kept[:LENGTH] = True
    return {name: x[1:, kept] for name, x in texts.items()}


def _documents() -> Tensor:
    ids = make_prompts(1, LENGTH)["input_ids"] | 4
    ids[0, 11] = PAD
    return ids


def _padded_behind() -> dict[str, Tensor]:
    prompts = make_prompts(2, LENGTH)
    return {name: x.flip(1) for name, x in prompts.items()}


def _expected(name: str) -> tuple[Tensor, Tensor]:
    model = make_model(name)
    cache, texts = _turns(model)
    second = model.generate(**_of_row_1(texts), **GREEDY)
    if name == "llama":  # a window counts the hidden slots as well
        batch = model.generate(**texts, **{CACHE_NAME: cache}, **GREEDY)
        assert torch.equal(batch[1, -8:], second[0, -8:])
    ids = _documents()
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    hidden = model.generate(ids, **GREEDY)
    assert not torch.equal(whole, hidden)  # transformers hides the token
    return second[0, -8:], whole


def _refused(rank: int, world_size: int, name: str, expected: tuple[Tensor, Tensor]) -> None:
    second, whole = expected
    for options in ({}, {"max_length": 64}, {"prefill_chunk_size": 7}):
        model = hf.enable(make_model(name), layout=BlockCyclic(world_size, 4), **options)
        cache, texts = _turns(model)
        hole = f"columns {LENGTH + ENDED} to {LENGTH + 7} between ones; these are tokens of before"
        with pytest.raises(NotImplementedError, match=f"row 1 has a hole, zeros at {hole}"):
            model.generate(**texts, **{CACHE_NAME: cache}, **GREEDY)
        # What the message says, though the pass that was refused has reached the first layer.
        alone = copy.deepcopy(cache)
        alone.batch_select_indices([1])
        crop_to(alone, LENGTH + ENDED)
        found = model.generate(**_of_row_1(texts), **{CACHE_NAME: alone}, **GREEDY)
        assert torch.equal(found[0, -8:], second)
        ids = _documents()
        with pytest.raises(NotImplementedError, match=r"columns 11 to 11 .*=torch\.ones_like"):
            model.generate(ids, **GREEDY)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        assert torch.equal(found, whole)
        behind = f"row 1 has a hole, zeros at columns {LENGTH - 11} to {LENGTH - 1} between ones; "
        # Before the first token, though no key before the last one of the prompt is hidden.
        forwards = list[int]()
        hook = model.model.register_forward_pre_hook(lambda *_, made=forwards: made.append(1))
        with pytest.raises(NotImplementedError, match=f"{behind}.*padding, pad on the left alone"):
            model.generate(**_padded_behind(), **GREEDY)
        hook.remove()
        assert not forwards
        behind = {**_padded_behind(), "max_new_tokens": 1, "do_sample": False}
        assert model.generate(**behind).shape == (2, LENGTH + 1)  # which nothing follows


@pytest.mark.parametrize(
    "name, world_size", tiers([("llama", 1), ("llama", 2)], [("llama", 3), ("gemma2", 2)])
)
def test_what_is_said_and_what_it_advises(name: str, world_size: int) -> None:
    run_ranks(_refused, world_size, name, _expected(name))
