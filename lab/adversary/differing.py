# SPDX-License-Identifier: BSD-3-Clause
"""One rank whose model, assistant or processors are unlike the others': refused, or no matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_models import CONFIGS, VOCAB_SIZE, make_model
from tree_attention import ExchangeError, hf

from . import model as truth
from .cases import Case
from .outcome import attempt
from .places import leave, place

_NUM_TOKENS = 10
_SECONDS = 10.0  # of an exchange: an error comes long before


class _Push(LogitsProcessor):
    """Makes a token likelier, by a number that ranks may compare or cannot see."""

    def __init__(self, seen: float = 0.0, hidden: float = 0.0, token: int = 5) -> None:
        self.seen, self._hidden, self.token = seen, hidden, token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.token] += self.seen + self._hidden
        return scores


class _StopAt(StoppingCriteria):
    def __init__(self, seen: int = 999, hidden: int = 999) -> None:
        self.seen, self._hidden = seen, hidden

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        is_done = input_ids.shape[1] >= min(self.seen, self._hidden)
        return torch.full((len(input_ids),), is_done)


class _Allowed:
    """A function of the prompt and what no rank can see of another."""

    def __init__(self, end: int) -> None:
        self._end = end

    def __call__(self, batch: int, ids: Tensor) -> list[int]:
        return list(range(self._end))


@dataclass
class Scene:
    """What a rank gives to `generate`; a spoil changes it on one rank."""

    name: str
    rng: Random
    model: PreTrainedModel
    assistant: PreTrainedModel
    arguments: dict[str, Any]

    @property
    def prompt_length(self) -> int:
        return int(self.arguments["input_ids"].shape[1])


def _make_assistant() -> PreTrainedModel:
    assistant = make_model("llama")
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


def _add_noise(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.03 * torch.randn_like(weight)


def _change_one_weight(scene: Scene, model: PreTrainedModel) -> None:
    names = [name for name, _ in model.named_parameters()]
    weight = dict(model.named_parameters())[scene.rng.choice(names)]
    with torch.no_grad():
        weight.view(-1)[scene.rng.randrange(weight.numel())] += scene.rng.choice([1.0, 50.0])


def _raise_a_row(scene: Scene, model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.lm_head.weight[scene.rng.randrange(3, VOCAB_SIZE)] *= 10.0


def _scale_a_buffer(scene: Scene, model: PreTrainedModel) -> None:
    buffers = [x for _, x in model.named_buffers() if x.is_floating_point()]
    scene.rng.choice(buffers).mul_(scene.rng.choice([0.5, 1.01, 2.0]))


def _change_an_attribute(scene: Scene, model: PreTrainedModel) -> None:
    """What is neither weight nor buffer nor configuration, and yet computes."""
    base, rng = model.model, scene.rng
    places: list[tuple[Any, str]] = [(base.layers[rng.randrange(2)].self_attn, "scaling")]
    for module in (base.norm, base.layers[0].input_layernorm):
        places += [(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)]
    places.append((base.rotary_emb, "attention_scaling"))
    owner, name = rng.choice([(o, n) for o, n in places if isinstance(getattr(o, n, None), float)])
    setattr(owner, name, getattr(owner, name) * rng.choice([0.5, 2.0]) + 0.1)


# Fields of a configuration that change tokens and no shapes.
_FIELDS: dict[str, Callable[[Any], Any]] = {
    "rms_norm_eps": lambda x: 0.1,
    "hidden_act": lambda x: "gelu",
    "hidden_activation": lambda x: "silu",
    "sliding_window": lambda x: None if x is None else x + 3,
    "attn_logit_softcapping": lambda x: 3.0,
    "final_logit_softcapping": lambda x: 2.0,
    "query_pre_attn_scalar": lambda x: 50,
    "rope_parameters": lambda x: {**x, "rope_theta": 100.0},
}


def _with_another_config(rng: Random, name: str) -> PreTrainedModel:
    config = CONFIGS[name].to_dict()
    fields = [field for field in _FIELDS if config.get(field) is not None]
    field = rng.choice(fields)
    other = type(CONFIGS[name]).from_dict(config | {field: _FIELDS[field](config[field])})
    with mock.patch.dict(CONFIGS, {name: other}):
        return make_model(name)


def _rebuild(scene: Scene) -> None:
    scene.model = _with_another_config(scene.rng, scene.name)


def _rebuild_assistant(scene: Scene) -> None:
    settings = scene.assistant.generation_config
    scene.assistant = _with_another_config(scene.rng, "llama")
    scene.assistant.generation_config = settings


def _set(scene: Scene, **arguments: Any) -> None:
    scene.arguments |= arguments


def _set_for_assistant(scene: Scene, **settings: Any) -> None:
    for name, value in settings.items():
        setattr(scene.assistant.generation_config, name, value)


def _processors(*processors: LogitsProcessor) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList(processors)}


def _criteria(*criteria: StoppingCriteria) -> dict[str, Any]:
    return {"stopping_criteria": StoppingCriteriaList(criteria)}


Spoil = Callable[[Scene], None]
# What all ranks have, and what one of them has in its place.
_OF_PROCESSORS: dict[str, tuple[dict[str, Any], Spoil]] = {
    "a seen number": (_processors(_Push()), lambda s: _set(s, **_processors(_Push(seen=99.0)))),
    "a hidden number": (_processors(_Push()), lambda s: _set(s, **_processors(_Push(hidden=99.0)))),
    "a hidden token": (
        _processors(_Push(9.0)), lambda s: _set(s, **_processors(_Push(9.0, token=7)))
    ),
    "no processor": (_processors(_Push(9.0)), lambda s: _set(s, logits_processor=None)),
    "another order": (
        _processors(_Push(9.0, token=5), _Push(0.0, 9.0, token=7)),
        lambda s: _set(s, **_processors(_Push(0.0, 9.0, token=7), _Push(9.0, token=5))),
    ),
    "allowed tokens": (
        {"prefix_allowed_tokens_fn": _Allowed(190)},
        lambda s: _set(s, prefix_allowed_tokens_fn=_Allowed(20)),
    ),
    "a closure": (
        {"prefix_allowed_tokens_fn": lambda batch, ids: [3, 4, 5]},
        lambda s: _set(s, prefix_allowed_tokens_fn=lambda batch, ids: [3, 4, 6]),
    ),
}  # fmt: skip
_OF_CRITERIA: dict[str, tuple[dict[str, Any], Spoil]] = {
    "a seen length": (
        _criteria(_StopAt()), lambda s: _set(s, **_criteria(_StopAt(seen=s.prompt_length + 3)))
    ),
    "a hidden length": (
        _criteria(_StopAt()),
        lambda s: _set(s, **_criteria(_StopAt(hidden=s.prompt_length + s.rng.choice([1, 4, 9])))),
    ),
    "no criterion": (_criteria(_StopAt(seen=4)), lambda s: _set(s, stopping_criteria=None)),
}  # fmt: skip
_OF_SETTINGS: dict[str, Spoil] = {
    "max_new_tokens": lambda s: _set(s, max_new_tokens=_NUM_TOKENS - 2, min_new_tokens=1),
    "repetition_penalty": lambda s: _set(s, repetition_penalty=1.7),
    "bad words": lambda s: _set(s, bad_words_ids=[[i] for i in range(3, 150)]),
    "prompt": lambda s: _set(s, input_ids=s.arguments["input_ids"].flip(1)),
    "a mask": lambda s: _set(s, attention_mask=torch.ones_like(s.arguments["input_ids"])
                             .index_fill(1, torch.tensor([0]), 0)),
    "chunks": lambda s: _set(s, prefill_chunk_size=5),
}  # fmt: skip
_OF_MODELS: dict[str, Callable[[Scene, PreTrainedModel], None]] = {
    "noise": lambda s, model: _add_noise(model),
    "a weight": _change_one_weight,
    "a row of lm_head": _raise_a_row,
    "a buffer": _scale_a_buffer,
    "an attribute": _change_an_attribute,
}


def world_size(case: Case) -> int:
    return case.first.choice([2, 2, 3])


def _draw(kind: str, rng: Random) -> tuple[str, dict[str, Any], Spoil]:
    """A name, what all ranks are given, and what one rank changes."""
    if kind in ("processors", "criteria"):
        table = _OF_PROCESSORS if kind == "processors" else _OF_CRITERIA
        name = rng.choice(list(table))
        return name, *table[name]
    if kind == "settings":
        name = rng.choice(list(_OF_SETTINGS))
        return name, {}, _OF_SETTINGS[name]
    if kind == "configurations":
        return "another field", {}, _rebuild
    name = rng.choice(list(_OF_MODELS))
    if kind == "models":
        return name, {}, lambda scene: _OF_MODELS[name](scene, scene.model)
    spoils: dict[str, Spoil] = {
        name: lambda scene: _OF_MODELS[name](scene, scene.assistant),
        "another field": _rebuild_assistant,
        "more candidates": lambda scene: _set_for_assistant(scene, num_assistant_tokens=5),
        "confidence": lambda scene: _set_for_assistant(scene, assistant_confidence_threshold=0.9),
    }
    chosen = rng.choice([name, name, name, *spoils])
    return chosen, {}, spoils[chosen]


def _generate(scene: Scene, kind: str, here: Any, options: dict[str, Any]) -> Any:
    """The outcome of the next call, which ranks begin at once."""
    hf.enable(scene.model, here.comm, timeout=_SECONDS, **options)
    arguments = dict(scene.arguments)
    if kind == "assistants":
        arguments["assistant_model"] = scene.assistant
    dist.barrier(here.group)
    with torch.no_grad():
        return attempt(scene.model.generate, **arguments)


def play(case: Case, rank: int) -> str:
    rng, size = case.rng, world_size(case)
    kind = case.draw({kind: (weight, kind) for kind, weight in _KINDS.items()})
    names = ["llama", "mistral_window", "gemma2"]
    name = rng.choice(names[:2] if kind == "assistants" else names)
    torch.manual_seed(rng.getrandbits(31))
    length = rng.choice([4, 12, 40])
    arguments: dict[str, Any] = {
        "input_ids": torch.randint(3, VOCAB_SIZE, (rng.choice([1, 1, 2]), length)),
        "max_new_tokens": _NUM_TOKENS,
        "min_new_tokens": _NUM_TOKENS if kind != "criteria" else None,
        "do_sample": False,
    }
    if kind == "assistants" or rng.random() < 0.2:
        arguments["input_ids"] = arguments["input_ids"][:1]
        if kind != "assistants":
            arguments["prompt_lookup_num_tokens"] = 3
    options = {
        "kv_dtype": rng.choice([None, None, "int8"]),
        "max_length": rng.choice([None, 100]),
        "prefill": rng.choice(["auto", "split"]),
        "synchronize_logits": rng.random() < 0.2,
    }
    what, common, spoil = _draw(kind, rng)
    scene = Scene(name, rng, make_model(name), _make_assistant(), arguments | common)
    victim, here = rng.randrange(size), place(size, rank)
    try:
        expected = _generate(scene, kind, here, options).result()
        if rank == victim:
            spoil(scene)
        outcome = _generate(scene, kind, here, options)
        try:
            if outcome.error is None:
                # Where all take rank 0's logits, its last layers and processors are right by
                # definition.
                is_rank_0s = options["synchronize_logits"] and victim == 0
                is_rank_0s = is_rank_0s and kind in ("models", "processors")
                is_equal = torch.equal(outcome.value, expected)
                assert is_equal or is_rank_0s, "other tokens, and no error"
                return f"accepted: {truth.bits(outcome.value)}"
            outcome.disagreement((ExchangeError, ValueError))
            here.probe()
        except AssertionError as error:
            how = {name: x for name, x in options.items() if x}
            raise AssertionError(
                f"{what} of {kind} on rank {victim} of {size}, {name}, {how}: {error}"
            ) from error
        return "refused"
    finally:
        leave(size)


_KINDS = {
    "models": 3.0,
    "configurations": 2.0,
    "assistants": 3.0,
    "processors": 2.0,
    "criteria": 2.0,
    "settings": 1.0,
}
