# SPDX-License-Identifier: BSD-3-Clause
"""Methods that a caller put on a model, before `enable` and afterwards: called, and given back."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import by_world

pytest.importorskip("transformers")

from transformers import GenerationMixin, LlamaForCausalLM, LogitsProcessor, PreTrainedModel

from hf_models import CONFIGS, VOCAB_SIZE, make_model, make_prompts
from tree_attention import hf
from tree_attention.hf import CACHE_NAME

GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def _shifted(ids: Tensor) -> Tensor:
    return torch.where(ids > 3, (ids + 1) % VOCAB_SIZE, ids)


def _longer_prompts(self: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """As retrieval does: other tokens than the caller's, and more of them."""
    ids, mask = kwargs.pop("input_ids", inputs), kwargs.pop("attention_mask")
    ids = torch.cat([ids, _shifted(ids[:, -9:])], dim=1)
    mask = torch.cat([mask, mask[:, -9:]], dim=1)
    return type(self).generate(self, ids, *args, attention_mask=mask, **kwargs)


def _other_tokens(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
    inputs = type(self).prepare_inputs_for_generation(self, input_ids, **kwargs)
    return {**inputs, "input_ids": _shifted(inputs["input_ids"])}


def _soft_prompt(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
    """As prompt tuning does: five embeddings in front of the prompt, in the first step."""
    is_first = kwargs.get("is_first_iteration")
    if kwargs.get("attention_mask") is not None:
        kwargs["attention_mask"] = torch.nn.functional.pad(
            kwargs["attention_mask"], (5, 0), value=1
        )
    kwargs["position_ids"] = None
    inputs = type(self).prepare_inputs_for_generation(self, input_ids, **kwargs)
    if is_first:
        embeds = self.get_input_embeddings()(inputs.pop("input_ids"))
        soft = self.get_input_embeddings().weight[20:25].expand(len(embeds), -1, -1)
        inputs["inputs_embeds"] = torch.cat([soft, embeds], dim=1)
    return inputs


def _two_steps(self: Any, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
    outputs.logits = outputs.logits.roll(3, -1)
    return type(self)._update_model_kwargs_for_generation(
        self, outputs, model_kwargs, *args, **kwargs
    )


def _noted_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.num_caches = vars(self).get("num_caches", 0) + 1
    return type(self)._prepare_cache_for_generation(self, *args, **kwargs)


class _Ban(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, scores.argmax(-1)[:1], -torch.inf)


def _more_processors(self: Any, *args: Any, **kwargs: Any) -> Any:
    return [*type(self)._get_logits_processor(self, *args, **kwargs), _Ban()]


class _Processors(list):  # type: ignore[type-arg]
    """What a patch may return in place of transformers' list."""

    def __call__(self, ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return functools.reduce(lambda x, processor: processor(ids, x), self, scores)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    output = type(self).forward(self, *args, **kwargs)
    output.logits = output.logits.roll(5, -1)
    return output


PATCHES: dict[str, tuple[str, Callable[..., Any]]] = {
    "retrieval": ("generate", _longer_prompts),
    "other_tokens": ("prepare_inputs_for_generation", _other_tokens),
    "soft_prompt": ("prepare_inputs_for_generation", _soft_prompt),
    "logits": ("_update_model_kwargs_for_generation", _two_steps),
    "cache": ("_prepare_cache_for_generation", _noted_cache),
    "processors": (
        "_get_logits_processor",
        lambda self, *args, **kwargs: _Processors(_more_processors(self, *args, **kwargs)),
    ),
    "forward": ("forward", _forward),
}


def _patch(model: PreTrainedModel, case: str, way: str) -> Any:
    """Puts a method on the model and returns what is then there."""
    name, function = PATCHES[case]
    method: Any = MethodType(function, model)
    if way == "closure":  # which a deep copy shares, as it does without enable
        method = functools.partial(function, model)
    vars(model)[name] = method
    return method


@functools.cache
def _expected(case: str | None) -> Tensor:
    model = make_model("llama")
    if case is not None:
        _patch(model, case, "method")
    return model.generate(**make_prompts(batch=1), **GREEDY)


def _before_enable(rank: int, world_size: int, expected: dict[str, Tensor]) -> None:
    prompts = make_prompts(batch=1)
    for case, tokens in expected.items():
        for way in ("method", "closure") if case == "retrieval" else ("method",):
            model = make_model("llama")
            method, name = _patch(model, case, way), PATCHES[case][0]
            hf.enable(model, prefill="auto", synchronize_logits=True)
            assert torch.equal(model.generate(**prompts, **GREEDY), tokens), case
            hf.enable(model, prefill_chunk_size=16)  # again
            if case != "soft_prompt":  # of which every chunk would have one, as in transformers
                assert torch.equal(model.generate(**prompts, **GREEDY), tokens), case
            if way == "method":
                other = copy.deepcopy(hf.enable(model))
                assert torch.equal(other.generate(**prompts, **GREEDY), tokens), case
                assert getattr(hf.disable(other), name).__self__ is other
                assert getattr(other, name).__func__ is PATCHES[case][1]
            hf.disable(model)
            assert vars(model)[name] is method


@by_world([1], [2])
def test_methods_from_before_enable_are_called_and_given_back(world_size: int) -> None:
    expected = {case: _expected(case) for case in PATCHES}
    for case in expected:
        is_same = torch.equal(expected[case][:, :43], _expected(None))
        assert is_same == (case == "cache"), case  # each other patch changes tokens
    run_ranks(_before_enable, world_size, expected)


class _OfTheirOwn(LlamaForCausalLM):
    prepare_inputs_for_generation = _other_tokens

    def generate(self, prompt: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().generate(prompt[:, 2:], **kwargs)


def test_methods_of_a_subclass() -> None:
    model = _OfTheirOwn(copy.deepcopy(CONFIGS["llama"])).eval()
    _OfTheirOwn.prepare_inputs_for_generation = lambda self, ids, **kwargs: {
        **LlamaForCausalLM.prepare_inputs_for_generation(self, ids, **kwargs)
    }
    ids = make_prompts(batch=1)["input_ids"]
    expected = model.generate(ids, **GREEDY)
    assert torch.equal(hf.enable(model).generate(ids, **GREEDY), expected)
    assert torch.equal(model.generate(prompt=ids, **GREEDY), expected)


def _wrap(model: PreTrainedModel, name: str, calls: list[str]) -> Any:
    inner = getattr(model, name)

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return inner(*args, **kwargs)

    setattr(model, name, wrapper)
    return wrapper


def _after_enable(rank: int, world_size: int, expected: Tensor) -> None:
    """A method that calls the one that it found, as wrappers do, also once that is disabled."""
    prompts = make_prompts(batch=1)
    for name in (
        "generate",
        "_prepare_cache_for_generation",
        "prepare_inputs_for_generation",
        "_update_model_kwargs_for_generation",
        "forward",
    ):
        for is_wrapped_before in (False, True):
            model, calls = make_model("llama"), list[str]()

            if is_wrapped_before:
                _wrap(model, name, calls)
            hf.enable(model)
            wrapper = _wrap(model, name, calls)
            assert torch.equal(model.generate(**prompts, **GREEDY), expected)
            in_force, calls[:] = len(calls), []
            hf.disable(model)
            assert vars(model)[name] is wrapper
            assert torch.equal(model.generate(**prompts, **GREEDY), expected)
            assert len(calls) == in_force >= 1
            hf.enable(model)
            assert torch.equal(model.generate(**prompts, **GREEDY), expected)
            hf.disable(model)
            assert vars(model)[name] is wrapper


@by_world([], [1, 2])
def test_methods_that_wrap_those_of_enable(world_size: int) -> None:
    run_ranks(_after_enable, world_size, _expected(None))


def test_a_method_that_was_kept_aside(model: PreTrainedModel) -> None:
    """As accelerate's hooks keep `_old_forward`, and put it back."""
    model.kept = model.generate
    hf.disable(model)
    assert torch.equal(model.kept(**make_prompts(batch=1), **GREEDY), _expected(None))


@pytest.fixture
def model() -> PreTrainedModel:
    return hf.enable(make_model("llama"))


def test_methods_that_leave_out_those_of_enable(model: PreTrainedModel) -> None:
    """Before the first token, where that would be of keys that no rank shares."""
    prompts = make_prompts(batch=1)
    forwards: list[int] = []
    model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    message = "generate: the generate that enable put on the model was left out"
    with pytest.raises(RuntimeError, match=message):
        GenerationMixin.generate(model, **prompts, **GREEDY)
    model.generate = MethodType(_longer_prompts, model)
    with pytest.raises(RuntimeError, match=message):
        model.generate(**prompts, **GREEDY)
    hf.enable(model)  # which then calls it
    assert torch.equal(model.generate(**prompts, **GREEDY), _expected("retrieval"))
    hf.enable(hf.disable(model))
    del forwards[:]
    model = hf.enable(make_model("llama"))
    model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    model._prepare_cache_for_generation = MethodType(_noted_cache, model)
    message = "generate: _prepare_cache_for_generation was put on the model after enable and does"
    with pytest.raises(RuntimeError, match=message):
        model.generate(**prompts, **GREEDY)
    assert not forwards


def test_a_cache_of_the_callers_is_refused() -> None:
    model = make_model("llama")

    def no_cache(generation_config: Any, model_kwargs: Any, *args: Any) -> None:
        model_kwargs.pop(CACHE_NAME, None)

    model._prepare_cache_for_generation = no_cache
    message = "own _prepare_cache_for_generation must leave the TreeCache that it finds.* NoneType"
    with pytest.raises(ValueError, match=message):
        hf.enable(model).generate(**make_prompts(batch=1), **GREEDY)
