# SPDX-License-Identifier: BSD-3-Clause
"""Padding between tokens: a row with one hole is answered as it is alone, others are refused.

The mistakes these tests are for: a window or ALiBi that counts the slots of a hole, a slot that is
gone from a ring, a query that sees padding, a hole that a state takes for tokens. What sentences
advise gives the tokens that transformers computes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import tiers

pytest.importorskip("transformers")

from generations import nan_in_new_memory, same_on_all_ranks
from hf_families import OWN_ATTENTION
from hf_models import PAD, make_prompts
from pairwise import by_tier
from questions import (
    DOCUMENT,
    KINDS,
    Answer,
    answers_alone,
    ask,
    check_answers,
    make_model,
    questions_behind,
)
from tree_attention import BlockCyclic, hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.cache import window
from window_caches import crop_to

GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
LENGTH, ENDED = 29, 3  # of the prompts, and the tokens of the first answer of row 1
Kind = tuple[str, str | None]  # with the dtype of the keys
Case = tuple[Kind, int, int]  # one of the ways, and a world
WAYS: list[dict[str, Any]] = [
    {}, {"prefill_chunk_size": 7}, {"max_length": 64}, {"prefill": "split"}
]  # fmt: skip
# Documents in front of the holes, and questions behind them.
TEXTS = questions_behind((26, 15, 26, 21), (9, 4, 3, 9))


def _cut(texts: dict[str, Tensor], end: int) -> dict[str, Tensor]:
    return {name: x[:, :end] for name, x in texts.items()}


def _answered(
    rank: int, world_size: int, cases: list[Case], wanted: dict[Kind, list[Answer]]
) -> list[Tensor]:
    """Read whole, in chunks that end inside holes, and in two turns; windows drop slots."""
    found = []
    layout = BlockCyclic(world_size, 4)
    for kind, way, _ in cases:
        (name, kv_dtype), answers, options = kind, wanted[kind], WAYS[way]
        model = hf.enable(make_model(name), layout=layout, kv_dtype=kv_dtype, **options)
        with mock.patch.multiple(window, MARGIN=7, STEP=3), nan_in_new_memory():
            output = ask(model, TEXTS)
            check_answers(output, answers, kv_dtype)
            found.append(torch.stack(output.logits))
            max_length = options.get("max_length")
            kept = hf.TreeCache(
                model.config, layout=layout, kv_dtype=kv_dtype, max_length=max_length
            )
            first = model.generate(
                **_cut(TEXTS, DOCUMENT), **{CACHE_NAME: kept}, max_new_tokens=1, do_sample=False
            )
            assert len(first) == len(answers)
            output = ask(model, TEXTS, **{CACHE_NAME: kept})
            check_answers(output, answers, kv_dtype)
            found.append(torch.stack(output.logits))
    return found


def _cases(names: Sequence[str], worlds: Sequence[int]) -> list[Case]:
    kinds = [*((name, None) for name in names), ("gemma2", "int8")]
    cases = product(kinds, range(len(WAYS)), worlds)
    return [x for x in cases if x[0][0] not in OWN_ATTENTION or "prefill" not in WAYS[x[1]]]


@pytest.mark.parametrize("cases", by_tier(_cases(("llama",), [2]), _cases(KINDS, [1, 2, 3])))
def test_a_row_with_a_hole_is_answered_as_it_is_alone(cases: list[Case]) -> None:
    kinds = dict.fromkeys(kind for kind, *_ in cases)
    wanted = {kind: answers_alone(make_model(kind[0]), TEXTS, kind[1]) for kind in kinds}
    same_on_all_ranks(run_ranks(_answered, cases[0][-1], cases, wanted))


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
        again = copy.deepcopy(cache)
        found = model.generate(**texts, **{CACHE_NAME: again}, **GREEDY)
        assert torch.equal(found[1, -8:], second)
        texts["attention_mask"][1, 20] = 0
        with pytest.raises(NotImplementedError, match=f"row 1 has a second hole, zeros at {hole}"):
            model.generate(**texts, **{CACHE_NAME: cache}, **GREEDY)
        texts["attention_mask"][1, 20] = 1
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


@pytest.mark.deep
@pytest.mark.parametrize(
    "name, world_size", tiers([("llama", 2)], [("llama", 1), ("llama", 3), ("gemma2", 2)])
)
def test_what_is_said_and_what_it_advises(name: str, world_size: int) -> None:
    run_ranks(_refused, world_size, name, _expected(name))


def test_holes_that_are_refused() -> None:
    """By a sentence, before the first token where `generate` is called."""
    model = hf.enable(make_model("gemma2"))
    with mock.patch.multiple(window, MARGIN=5, STEP=3):
        with pytest.raises(
            NotImplementedError, match=r"has a hole of 6 slots, and .* window of 8 can see around 5"
        ):
            model.generate(**TEXTS, **GREEDY)
        # By hand the cache is not told: of 3 new tokens, the first one sees slots that are gone.
        ids, mask = TEXTS["input_ids"][:1], torch.ones(1, 35, dtype=torch.int64)
        cache = hf.TreeCache(model.config)
        with torch.no_grad():
            model(ids[:, :32], attention_mask=mask[:, :32], **{CACHE_NAME: cache})
            mask[0, 26:31] = 0
            with pytest.raises(
                NotImplementedError, match=r"queries see slot 20, and .* from 22 on, 5 more than"
            ):
                model(ids[:, 32:], attention_mask=mask, **{CACHE_NAME: cache})
    model = hf.enable(make_model("Qwen3-Next"))
    with pytest.raises(NotImplementedError, match="a hole, zeros between ones, which layers that"):
        model.generate(**TEXTS, **GREEDY)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="take for tokens; give the ba"):
        model(**TEXTS, **{CACHE_NAME: hf.TreeCache(model.config)})
    model = hf.enable(make_model("BLOOM"), deterministic=16)
    with pytest.raises(ValueError, match="deterministic is not supported with ALiBi where the pad"):
        model.generate(**TEXTS, **GREEDY)
