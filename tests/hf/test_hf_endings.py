# SPDX-License-Identifier: BSD-3-Clause
"""Ranks whose generations part, or that end one alone: an error on every rank, and a group that
goes on, as it would not after a timeout."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from distributed import on_ranks
from tiers import tiers, tiers_of

pytest.importorskip("transformers")

from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from hf_models import make_model, make_prompts
from tree_attention import ExchangeError, hf

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
FORMS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "dict": {"return_dict_in_generate": True, "output_scores": True},
    "beams": {"num_beams": 2, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


def _model(is_split: bool) -> Any:
    model = make_model("llama")
    return hf.enable(hf.parallelize(model) if is_split else model)


class _Last(LogitsProcessor):
    """Has one rank choose another token, the last one, in a way that is not compared."""

    def __init__(self, rank: int) -> None:
        self._token = 7 + rank

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == 37 + 4:
            scores = torch.full_like(scores, -1e9)
            scores[:, self._token] = 0.0
        return scores


@pytest.mark.parametrize(
    "form, is_split",
    tiers_of(product(FORMS, (False, True)), [("tokens", False), ("lookup", False)]),
)
@on_ranks(2)
def test_tokens_that_differ(rank: int, world_size: int, form: str, is_split: bool) -> None:
    """In the last token, which is never fed: no exchange has its query."""
    model = _model(is_split)
    arguments = {**make_prompts(batch=1), **GREEDY, **FORMS[form]}
    with pytest.raises(ExchangeError, match=r"digest of the tokens is .* on rank 1, .* on rank 0"):
        model.generate(**arguments, logits_processor=[_Last(rank)])
    model.generate(**arguments)  # nobody waits, and the group goes on


class _StopAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self._length)


@pytest.mark.parametrize("is_split", tiers([False], [True]))
@on_ranks(2)
def test_a_rank_that_stops_early(rank: int, world_size: int, is_split: bool) -> None:
    model = _model(is_split)
    arguments = {**make_prompts(), **GREEDY, "min_new_tokens": None}
    with pytest.raises(ExchangeError, match=r"call is end of generate on rank 1, \w+ on rank 0"):
        model.generate(**arguments, stopping_criteria=[_StopAt(39 if rank else 99)])
    model.generate(**arguments)


class _Raise(LogitsProcessor):
    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == self._length:
            raise KeyError("a word")
        return scores


@pytest.mark.parametrize(
    "length, is_split",
    tiers_of(product((37, 40, 41), (False, True)), [(37, False)]),
)
@on_ranks(2)
def test_a_rank_that_raises(rank: int, world_size: int, length: int, is_split: bool) -> None:
    """In the first step, in a later one, and after the last exchange of the others."""
    model = _model(is_split)
    arguments = {**make_prompts(), **GREEDY}
    sentence = r"call is end of generate by KeyError: 'a word' on rank 1, .* on rank 0"
    kind, match = (KeyError, "a word") if rank == 1 else (ExchangeError, sentence)
    with pytest.raises(kind, match=match):
        model.generate(**arguments, logits_processor=[_Raise(length if rank else 0)])
    model.generate(**arguments)


@on_ranks(2)
def test_a_rank_with_wrong_arguments(rank: int, world_size: int) -> None:
    model = _model(False)
    arguments = {**make_prompts(), **GREEDY}
    sentence = "call is end of generate by NotImplementedError: generate: output_attentions"
    kind, match = (NotImplementedError, "") if rank == 1 else (ExchangeError, sentence)
    with pytest.raises(kind, match=match):
        model.generate(**arguments, output_attentions=rank == 1)
    # And where all ranks raise the same.
    with pytest.raises(NotImplementedError):
        model.generate(**arguments, output_attentions=True)
    model.generate(**arguments)


@pytest.mark.deep
@on_ranks(2)
def test_a_rank_that_raises_in_an_assistant(rank: int, world_size: int) -> None:
    """The assistant is enabled, too: its rank tells the others once."""
    model, assistant = _model(False), hf.enable(make_model("mistral"))
    arguments = {**make_prompts(batch=1), **GREEDY, "assistant_model": assistant}
    model.generate(**arguments)
    handle = assistant.register_forward_hook(lambda *_: 1 / 0) if rank == 1 else None
    sentence = "call is end of generate by ZeroDivisionError"
    kind, match = (ZeroDivisionError, "") if rank == 1 else (ExchangeError, sentence)
    with pytest.raises(kind, match=match):
        model.generate(**arguments)
    if handle is not None:
        handle.remove()
    model.generate(**arguments)


@on_ranks(2)
def test_one_weight_that_no_sample_has(rank: int, world_size: int) -> None:
    """Ranks would choose other tokens, and merge states of different texts."""
    model = hf.enable(make_model("mistral"))
    if rank == 1:
        with torch.no_grad():
            model.lm_head.weight[5, 1] += 50.0
    with pytest.raises(ExchangeError, match="digest of the model's weights is"):
        model.generate(**make_prompts(), **GREEDY)
