# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that call `generate` unlike each other, or not at all: an error on every rank, by name."""

import os
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import on_ranks
from tiers import tiers

pytest.importorskip("transformers")

from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from faults import AMPLE
from hf_models import make_model, make_prompts
from tree_attention import ExchangeError, hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.fingerprint import describe

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
LOST_AFTER_SECONDS = 2.0


def _other_inputs(arguments: dict[str, Any]) -> None:
    arguments["input_ids"][0, -1] += 1


def _other_mask(arguments: dict[str, Any]) -> None:
    arguments["attention_mask"][0, 0] = 0


def _other_length(arguments: dict[str, Any]) -> None:
    for name in ("input_ids", "attention_mask"):
        arguments[name] = arguments[name][:, 1:]


def _other_settings(arguments: dict[str, Any]) -> None:
    arguments["max_new_tokens"] = 6


def _other_temperature(arguments: dict[str, Any]) -> None:
    arguments["temperature"] = 0.7


class _Bias(LogitsProcessor):
    """It also holds what differs from rank to rank by its nature, and is not compared."""

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias
        self.group = dist.group.WORLD
        self.owner = object()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def _allowed_up_to(highest: int) -> Callable[..., list[int]]:
    return lambda batch_id, input_ids: list(range(highest))


def _objects() -> dict[str, Any]:
    """Arguments of generate that change the tokens and are no settings."""
    penalty = RepetitionPenaltyLogitsProcessor(1.2)
    return {
        "logits_processor": LogitsProcessorList([penalty, _Bias(torch.ones(2))]),
        "stopping_criteria": StoppingCriteriaList([EosTokenCriteria(3)]),
        "prefix_allowed_tokens_fn": _allowed_up_to(150),
    }


def _other_penalty(arguments: dict[str, Any]) -> None:
    arguments["logits_processor"][0] = RepetitionPenaltyLogitsProcessor(1.5)


def _other_bias(arguments: dict[str, Any]) -> None:
    arguments["logits_processor"][1].bias[1] = 2.0


def _other_kind(arguments: dict[str, Any]) -> None:
    arguments["logits_processor"][1] = MinLengthLogitsProcessor(1, 1)


def _one_processor(arguments: dict[str, Any]) -> None:
    del arguments["logits_processor"][1]


def _other_criterion(arguments: dict[str, Any]) -> None:
    arguments["stopping_criteria"][0] = EosTokenCriteria(4)


def _other_prefix(arguments: dict[str, Any]) -> None:
    arguments["prefix_allowed_tokens_fn"] = lambda batch_id, input_ids: [3]


def _other_synchronization(arguments: dict[str, Any]) -> None:
    hf.enable(arguments["model"], synchronize_logits=True)


def _other_random_state(arguments: dict[str, Any]) -> None:
    torch.manual_seed(99)


INPUTS = r"inputs \(.* the same: broadcast them\) is .* on rank 2, .* on rank 0"


@pytest.mark.parametrize(
    ("change", "sentence"),
    tiers(
        [
            (_other_inputs, INPUTS),
            (_other_settings, "generation setting max_new_tokens is 6 on rank 2, 5 on rank 0"),
            (_other_penalty, r"logits processor 0 is Repetition.*penalty=1.5, .* rank 2, .*=1.2, "),
            (_one_processor, "logits processor 1 is None on rank 2, _Bias"),
            (_other_synchronization, "synchronize_logits is True on rank 2, False on rank 0"),
            (_other_random_state, r"random state \(see seed_ranks\) is .* on rank 2, .* on rank 0"),
        ],
        [
            (_other_mask, INPUTS),
            (_other_length, INPUTS),
            (_other_temperature, "generation setting temperature is 0.7 on rank 2, 1.0 on rank 0"),
            (
                _other_bias,
                r"logits processor 1 is _Bias\(bias=torch.float32 \[2\] .* on rank 2, _B",
            ),
            (_other_kind, "logits processor 1 is MinLength.* on rank 2, _Bias"),
            (_other_criterion, r"stopping criterion 0 is EosToken.* \[1\] .* on rank 2, EosToken"),
            (_other_prefix, "prefix_allowed_tokens_fn is .*<lambda> on rank 2, .*_allowed_up_to"),
        ],
    ),
)
@on_ranks(3)
def test_differences_between_ranks_are_found(
    rank: int, world_size: int, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    """On every rank, before the first step, by name."""
    model = hf.enable(make_model("llama"))
    torch.manual_seed(0)
    arguments: dict[str, Any] = {**make_prompts(), **GREEDY, "do_sample": True, **_objects()}
    if rank == world_size - 1:
        change({**arguments, "model": model} if change is _other_synchronization else arguments)
    with pytest.raises(ExchangeError, match=sentence) as raised:
        model.generate(**arguments)
    assert raised.value.__suppress_context__  # a program's traceback shows this sentence alone
    # Nothing was sent: the same ranks go on as soon as they agree.
    hf.seed_ranks()
    hf.enable(model)
    model.generate(**make_prompts(), **GREEDY, **_objects())


def _nested() -> list[Any]:
    """A list that holds itself."""
    items: list[Any] = [1]
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ({"b": 2, "a": {3}}, "{'a': {3}, 'b': 2}"),
        ((1, [2.5, True], "x"), "[1, [2.5, True], 'x']"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.ones(2, device="meta"), "torch.float32 [2]"),
        (_allowed_up_to, f"{__name__}._allowed_up_to"),
        (object(), "object"),
        (_nested(), "[1, [1, [1, [1, "),
        (list(range(100_001)), "[0, 1, 2, "),
        ([[i] for i in range(100_001)], "list of 100001"),
        (range(3), "[0, 1, 2]"),
        ([[0] * 60_000, [0] * 60_000, 7], "[[0, 0"),
        (np.ones(2), "float64 [2] 5f07eef034c5a21f"),
        (torch.ones(2).to_sparse(), "torch.float32 [2]"),
    ],
)
def test_descriptions(value: object, text: str) -> None:
    """The same in every process: no address, no order of a set, and an end."""
    assert describe(value).startswith(text)


def _phrase(tokens: list[int]) -> dict[int, Any]:
    """A trie that has one phrase of 30 tokens."""
    trie: dict[int, Any] = {}
    for token in (*tokens, *range(29)):
        trie = {token: trie}
    return trie


class _Allowed:
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, batch: int, ids: Tensor) -> list[int]:
        return [self.token]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_Allowed(3), _Allowed(4)),
        (np.array([3]), np.array([4])),
        (np.int64(3), np.int64(4)),
        ([np.float32(0.1)], [np.float32(0.2)]),
        (array("i", [3]), array("i", [4])),
        (deque([3]), deque([4])),
        (2 + 3j, 2 + 4j),
        (dict.fromkeys(range(150_000), 0.0), dict.fromkeys(range(150_000), 0.0) | {149_999: 1.0}),
        (list(range(150_000)), [*range(149_999), 0]),
        (_phrase([3]), _phrase([4])),
    ],
)
def test_descriptions_differ_where_values_do(one: object, other: object) -> None:
    assert describe(one, with_attributes=True) != describe(other, with_attributes=True)


def test_private_attributes_may_differ() -> None:
    one, other = _Allowed(3), _Allowed(3)
    one._begin, other._begin = 1.0, 2.0  # type: ignore[attr-defined]
    assert describe(one, with_attributes=True) == describe(other, with_attributes=True)


@pytest.mark.deep
def test_descriptions_end_where_nobody_waits_for_them() -> None:
    trie = {i: {j: {} for j in range(1000)} for i in range(1000)}
    begin = time.process_time()
    describe(trie)
    assert time.process_time() - begin < 5.0  # of a million entries; 10 s and more without an end


def test_a_long_description_is_cut_and_still_differs() -> None:
    numbers = list(range(1000))
    text, other = describe(numbers), describe([*numbers[:-1], 0])
    assert len(text) < 300 and text != other and text.startswith("[0, 1, 2, ")


@on_ranks(2)
def test_caches_that_differ_are_found(rank: int, world_size: int) -> None:
    """Only the length of the cache differs, made without an exchange."""
    model = hf.enable(make_model("llama"))
    cache = hf.TreeCache(model.config)
    for layer in cache.layers[: len(cache) if rank else 0]:
        layer.update(torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8))
    with pytest.raises(ExchangeError, match="number of cached tokens is 4 on rank 1, 0 on rank 0"):
        model.generate(**make_prompts(), **GREEDY, **{CACHE_NAME: cache})


def _other_weight(model: Any) -> None:
    model.model.norm.weight.mul_(2.0)


def _one_other_key(model: Any) -> None:
    """Which changes the keys of one rank, and the queries of all ranks alike."""
    model.model.layers[0].self_attn.k_proj.weight.view(-1)[1].add_(1.0)


def _two_swapped_rows(model: Any) -> None:
    """As of two tokens whose ids were exchanged."""
    rows = model.model.embed_tokens.weight
    rows[[1, 2]] = rows[[2, 1]]


def _compensating_bits(model: Any) -> None:
    """The sum of all values as integers stays as it was."""
    values = model.model.layers[1].mlp.up_proj.weight.view(-1).view(torch.int32)
    values[6] += 1
    values[8] -= 1


def _other_frequencies(model: Any) -> None:
    """In a buffer that is never saved."""
    model.model.rotary_emb.inv_freq.mul_(2.0)


def _other_config(model: Any) -> None:
    model.config.rms_norm_eps = 1e-3


def _other_origin(model: Any) -> None:
    """No token depends on it."""
    model.config._name_or_path, model.config.architectures = "/elsewhere", ["Llama"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_other_weight, "digest of the model's weights is .* on rank 1, .* on rank 0"),
        (_one_other_key, "digest of the model's weights is .* on rank 1, .* on rank 0"),
        (_two_swapped_rows, "digest of the model's weights is .* on rank 1, .* on rank 0"),
        (_compensating_bits, "digest of the model's weights is .* on rank 1, .* on rank 0"),
        (_other_frequencies, "digest of the model's buffers is .* on rank 1, .* on rank 0"),
        (_other_config, "model setting rms_norm_eps is 0.001 on rank 1, 1e-06 on rank 0"),
    ],
)
@on_ranks(2)
def test_models_that_differ_are_found(
    rank: int, world_size: int, change: Callable[[Any], None], sentence: str
) -> None:
    model = hf.enable(make_model("llama"))
    model.generate(**make_prompts(), **GREEDY)
    with torch.no_grad():
        (change if rank == 1 else _other_origin)(model)
    with pytest.raises(ExchangeError, match=sentence):
        model.generate(**make_prompts(), **GREEDY)


def _no_assistant(arguments: dict[str, Any]) -> None:
    arguments["assistant_model"] = None


def _other_assistant(arguments: dict[str, Any]) -> None:
    _other_weight(arguments["assistant_model"])


def _other_config_of_the_assistant(arguments: dict[str, Any]) -> None:
    _other_config(arguments["assistant_model"])


def _other_number_of_candidates(arguments: dict[str, Any]) -> None:
    arguments["assistant_model"].generation_config.num_assistant_tokens = 3


def _other_size_of_matches(arguments: dict[str, Any]) -> None:
    arguments.update(assistant_model=None, prompt_lookup_num_tokens=4, max_matching_ngram_size=3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_no_assistant, "assistant_model is None on rank 1, MistralForCausalLM on rank 0"),
        (_other_assistant, "digest of the assistant's weights is .* on rank 1, .* on rank 0"),
        (
            _other_config_of_the_assistant,
            "assistant setting rms_norm_eps is 0.001 on rank 1, 1e-06 on rank 0",
        ),
        (
            _other_number_of_candidates,
            "assistant's generation setting num_assistant_tokens is 3 on rank 1, None on rank 0",
        ),
        (_other_size_of_matches, "max_matching_ngram_size is 3 on rank 1, None on rank 0"),
    ],
)
@on_ranks(2)
@torch.no_grad()
def test_candidates_that_would_differ_are_found(
    rank: int, world_size: int, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    model = hf.enable(make_model("llama"))
    arguments = {**make_prompts(batch=1), **GREEDY, "assistant_model": make_model("mistral")}
    if change is _other_size_of_matches:
        arguments |= {"assistant_model": None, "prompt_lookup_num_tokens": 4}
    if rank == 1:
        change(arguments)
    with pytest.raises(ExchangeError, match=sentence):
        model.generate(**arguments)


@on_ranks(2)
def test_what_makes_no_difference_is_accepted(rank: int, world_size: int) -> None:
    """Where a model was read, and the parts of a split one."""
    model = hf.parallelize(make_model("llama"))
    if rank == 1:
        _other_origin(model)
    tokens = hf.enable(model).generate(**make_prompts(), **GREEDY)
    assert torch.equal(tokens, make_model("llama").generate(**make_prompts(), **GREEDY))
    if rank == 1:
        _other_frequencies(model)
    with pytest.raises(ExchangeError, match=r"digest of the model's buffers is .* on rank 1"):
        model.generate(**make_prompts(), **GREEDY)


@pytest.mark.deep
@on_ranks(2, fresh=True)
def test_a_rank_that_does_not_generate_is_missed(rank: int, world_size: int) -> None:
    model = hf.enable(make_model("llama"), timeout=LOST_AFTER_SECONDS)
    if rank == 0:
        with pytest.raises(ExchangeError, match="no word from rank 1"):
            model.generate(**make_prompts(), **GREEDY)


class _DieAtStep(LogitsProcessor):
    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 37 + self.step and dist.get_rank() == self.rank:
            os._exit(7)
        return scores


@on_ranks(3, lost=[1])
def test_a_rank_lost_during_generation_is_an_error_on_the_others(
    rank: int, world_size: int
) -> None:
    model = hf.enable(make_model("llama"), timeout=AMPLE)
    with pytest.raises(ExchangeError, match="rank 1"):
        model.generate(**make_prompts(), **GREEDY, logits_processor=[_DieAtStep(3, rank=1)])
