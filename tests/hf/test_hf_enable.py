# SPDX-License-Identifier: BSD-3-Clause
"""`enable`, `disable` and `seed_ranks`: what they change, refuse and compare over ranks."""

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from distributed import run_ranks

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_models import make_model, make_prompts
from tree_attention import ExchangeError, hf

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
LOST_AFTER_SECONDS = 2.0


@pytest.fixture
def model() -> PreTrainedModel:
    return hf.enable(make_model("llama"))


def test_enable_switches_and_disable_restores() -> None:
    model = make_model("llama", "eager")
    before = dict(vars(model))
    assert hf.enable(model) is model
    assert model.config._attn_implementation == "tree_attention"
    assert "generate" in vars(model)
    hf.enable(model, prefill_chunk_size=3)  # again, with other settings
    assert hf.disable(model) is model
    assert model.config._attn_implementation == "eager"
    assert vars(model).keys() == before.keys()
    with pytest.raises(ValueError, match="disable: the model is not enabled"):
        hf.disable(model)


def test_copies_of_an_enabled_model_are_their_own(model: PreTrainedModel) -> None:
    other = copy.deepcopy(model)
    assert other.generate.__self__ is other
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-0.5)
    prompts = make_prompts()
    assert not torch.equal(model.generate(**prompts, **GREEDY), other.generate(**prompts, **GREEDY))


def test_arguments_by_position_and_in_a_generation_config(model: PreTrainedModel) -> None:
    ids = make_prompts(batch=1)["input_ids"]
    expected = model.generate(input_ids=ids, **GREEDY)
    config = GenerationConfig(**GREEDY)
    assert torch.equal(model.generate(ids, config), expected)
    assert torch.equal(model.generate(inputs=ids, generation_config=config), expected)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
    hf.enable(model, prefill_chunk_size=8)
    assert torch.equal(model.generate(inputs_embeds=embeds, **GREEDY), expected[:, ids.shape[1] :])


class _CountForwards:
    def __init__(self, model: PreTrainedModel) -> None:
        self.lengths: list[int] = []
        model.model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.lengths.append(kwargs["input_ids"].shape[1])


def test_long_prompts_are_prefilled_in_chunks(model: PreTrainedModel) -> None:
    forwards = _CountForwards(model)
    prompts = make_prompts()  # 37 tokens
    for size, lengths in ((16, [16, 16, 5]), (37, [37]), (None, [37])):
        hf.enable(model, prefill_chunk_size=size)
        forwards.lengths.clear()
        model.generate(**prompts, **GREEDY)
        assert forwards.lengths == [*lengths, 1, 1, 1, 1]
    forwards.lengths.clear()
    model.generate(**prompts, **GREEDY, prefill_chunk_size=20)
    assert forwards.lengths == [20, 17, 1, 1, 1, 1]


def test_chunks_after_cached_tokens(model: PreTrainedModel) -> None:
    """transformers before 5.23 would feed the wrong tokens."""
    hf.enable(model, prefill_chunk_size=8)
    ids = make_prompts(batch=1)["input_ids"]
    expected = model.generate(ids, **GREEDY)
    cache = hf.TreeCache(model.config)
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
    assert torch.equal(
        model.generate(ids, **GREEDY, past_key_values=copy.deepcopy(cache)), expected
    )
    explicit = GREEDY | {"prefill_chunk_size": 9, "past_key_values": cache}
    if Version(transformers.__version__) >= Version("5.23"):
        assert torch.equal(model.generate(ids, **explicit), expected)
    else:
        with pytest.raises(NotImplementedError, match="with a cache that holds tokens needs tran"):
            model.generate(ids, **explicit)


@pytest.mark.parametrize("name", ["static", "offloaded", "quantized", "paged"])
def test_other_caches_are_refused(model: PreTrainedModel, name: str) -> None:
    with pytest.raises(
        NotImplementedError, match=f"cache_implementation='{name}' is not supported"
    ):
        model.generate(**make_prompts(), **GREEDY, cache_implementation=name)
    with pytest.raises(ValueError, match="must be a TreeCache, got DynamicCache"):
        model.generate(**make_prompts(), **GREEDY, past_key_values=DynamicCache())


def test_weights_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(NotImplementedError, match="generate: output_attentions is not supported"):
        model.generate(
            **make_prompts(), **GREEDY, output_attentions=True, return_dict_in_generate=True
        )


def test_a_fully_cached_prompt_is_refused(model: PreTrainedModel) -> None:
    """transformers would answer with wrong tokens."""
    ids = make_prompts(batch=1)["input_ids"]
    expected = model.generate(ids, **GREEDY)
    cache = hf.TreeCache(model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    message = r"the cache holds 37 tokens and the prompt has 37; .* cache.crop\(-1\)"
    with pytest.raises(ValueError, match=message):
        model.generate(ids, **GREEDY, past_key_values=cache)
    cache.crop(-1)
    assert torch.equal(model.generate(ids, **GREEDY, past_key_values=cache), expected)


def test_only_the_new_tokens_with_a_mask_over_all(model: PreTrainedModel) -> None:
    prompts = make_prompts()
    expected = model.generate(**prompts, **GREEDY)
    cache = hf.TreeCache(model.config)
    with torch.no_grad():
        mask = prompts["attention_mask"][:, :30]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model(
            prompts["input_ids"][:, :30],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
        )
    found = model.generate(
        prompts["input_ids"][:, 30:],
        attention_mask=prompts["attention_mask"],
        past_key_values=cache,
        **GREEDY,
    )
    assert torch.equal(found[:, 7:], expected[:, 37:])


def test_models_and_options_that_cannot_work_are_refused() -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    with pytest.raises(ValueError, match="must be a decoder of text alone, got 't5'"):
        hf.enable(t5)
    with pytest.raises(ValueError, match="enable: prefill_chunk_size must be at least 1, got 0"):
        hf.enable(make_model("llama"), prefill_chunk_size=0)
    model = make_model("llama")
    model._can_set_attn_implementation = lambda: False
    with pytest.raises(ValueError, match="LlamaForCausalLM does not let its attention be chosen"):
        hf.enable(model)
    assert not vars(model).keys() & {"generate", "_prepare_cache_for_generation"}


def _max_time(rank: int, world_size: int) -> None:
    model = hf.enable(make_model("llama"))
    with pytest.raises(NotImplementedError, match="max_time is not supported over several ranks"):
        model.generate(**make_prompts(), **GREEDY, max_time=60.0)
    criteria = StoppingCriteriaList([MaxTimeCriteria(60.0)])
    with pytest.raises(NotImplementedError, match="max_time is not supported over several ranks"):
        model.generate(**make_prompts(), **GREEDY, stopping_criteria=criteria)


def test_max_time_is_for_one_rank(model: PreTrainedModel) -> None:
    model.generate(**make_prompts(), **GREEDY, max_time=60.0)
    run_ranks(_max_time, 2)


def _other_inputs(arguments: dict[str, Any]) -> None:
    arguments["input_ids"][0, -1] += 1


def _other_mask(arguments: dict[str, Any]) -> None:
    arguments["attention_mask"][0, 0] = 0


def _other_length(arguments: dict[str, Any]) -> None:
    for name in ("input_ids", "attention_mask"):
        arguments[name] = arguments[name][:, 1:]


def _other_settings(arguments: dict[str, Any]) -> None:
    arguments["max_new_tokens"] = 6


def _other_random_state(arguments: dict[str, Any]) -> None:
    torch.manual_seed(99)


def _differ(
    rank: int, world_size: int, change: Callable[[dict[str, Any]], None], field: str
) -> None:
    model = hf.enable(make_model("llama"))
    torch.manual_seed(0)
    arguments: dict[str, Any] = {**make_prompts(), **GREEDY, "do_sample": True}
    if rank == world_size - 1:
        change(arguments)
    message = f"{field} .*is .* on rank {world_size - 1}, .* on rank 0"
    with pytest.raises(ExchangeError, match=message):
        model.generate(**arguments)
    # Nothing was sent: the same ranks go on as soon as they agree.
    hf.seed_ranks()
    model.generate(**make_prompts(), **GREEDY)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_other_inputs, "digest of the inputs"),
        (_other_mask, "digest of the inputs"),
        (_other_length, "digest of the inputs"),
        (_other_settings, "digest of the generation settings"),
        (_other_random_state, "digest of the random state"),
    ],
)
def test_differences_between_ranks_are_found(
    change: Callable[[dict[str, Any]], None], field: str
) -> None:
    """On every rank, before the first step, by name."""
    run_ranks(_differ, 3, change, field)


def _cached_tokens_differ(rank: int, world_size: int) -> None:
    """Only the length of the cache differs, made without an exchange."""
    model = hf.enable(make_model("llama"))
    cache = hf.TreeCache(model.config)
    for layer in cache.layers[: len(cache) if rank else 0]:
        layer.update(torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8))
    with pytest.raises(ExchangeError, match="number of cached tokens is 4 on rank 1, 0 on rank 0"):
        model.generate(**make_prompts(), **GREEDY, past_key_values=cache)


def _weights_differ(rank: int, world_size: int) -> None:
    model = hf.enable(make_model("llama"))
    if rank == 1:
        with torch.no_grad():
            model.model.norm.weight.mul_(2.0)
    with pytest.raises(ExchangeError, match=r"digest of the model's weights is .* on rank 1"):
        model.generate(**make_prompts(), **GREEDY)


@pytest.mark.parametrize("function", [_cached_tokens_differ, _weights_differ])
def test_other_differences_are_found(function: Callable[..., None]) -> None:
    run_ranks(function, 2)


def _stay_away(rank: int, world_size: int) -> None:
    model = hf.enable(make_model("llama"), timeout=LOST_AFTER_SECONDS)
    if rank == 0:
        with pytest.raises(ExchangeError, match="no word from rank 1"):
            model.generate(**make_prompts(), **GREEDY)


def test_a_rank_that_does_not_generate_is_missed() -> None:
    run_ranks(_stay_away, 2, fresh=True)


class _DieAtStep(LogitsProcessor):
    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 37 + self.step:
            os._exit(7)
        return scores


def _lose_a_rank(rank: int, world_size: int) -> None:
    model = hf.enable(make_model("llama"), timeout=LOST_AFTER_SECONDS)
    processors = [_DieAtStep(3)] if rank == 1 else []
    with pytest.raises(ExchangeError):
        model.generate(**make_prompts(), **GREEDY, logits_processor=processors)


def test_a_rank_lost_during_generation_is_an_error_on_the_others() -> None:
    run_ranks(_lose_a_rank, 3, lost=[1])


def _seed(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(rank)
    hf.seed_ranks()
    first = torch.rand(3).tolist()
    hf.seed_ranks(seed=3)
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(3)).item()
    return first


def test_seed_ranks() -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0)).tolist()
    assert run_ranks(_seed, 3) == [expected] * 3
    state = torch.get_rng_state()
    hf.seed_ranks()  # a world of one keeps its generator
    assert torch.equal(torch.get_rng_state(), state)


def _synchronize(rank: int, world_size: int) -> list[float]:
    scores = torch.full((2, 3), float(rank)).T  # not contiguous
    synchronized = hf.SynchronizeLogits()(torch.zeros(2, 1), scores)
    assert torch.equal(scores, torch.full((3, 2), float(rank)))
    return synchronized.flatten().tolist()


def test_synchronized_logits_are_those_of_the_first_rank() -> None:
    assert run_ranks(_synchronize, 3) == [[0.0] * 6] * 3
