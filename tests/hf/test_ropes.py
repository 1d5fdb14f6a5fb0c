# SPDX-License-Identifier: BSD-3-Clause
"""Models whose rotary embedding has other frequencies beyond a length of the text.

The mistakes these tests are for: keys of one prompt that are turned by the frequencies of several
chunks, and a cache that the model drops, for one that is not sharded, where frequencies change.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import on_ranks, run_ranks
from tiers import by_world

pytest.importorskip("transformers")

from transformers import DynamicCache, LlamaForCausalLM

from generations import left_padded
from hf_families import VOCAB_SIZE, WORKING, Family, make_model
from hf_models import make_model as make_llama
from hf_models import make_prompts
from tree_attention import BlockCyclic, hf
from tree_attention.hf.release import CACHE_NAME

SWITCH = 32  # tokens from which on frequencies differ
GREEDY = {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False}


def _longrope(name: str, half: int, **rope: Any) -> Family:
    rope |= {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [2.0 + i for i in range(half)],
        "factor": 8.0,
        "original_max_position_embeddings": SWITCH,
    }
    options = {"original_max_position_embeddings": SWITCH, "rope_parameters": rope}
    return replace(WORKING[name], options=WORKING[name].options | options)


FAMILIES = {
    "Phi-3": _longrope("Phi-3", 8),
    "Phi-3.5-MoE": _longrope("Phi-3.5-MoE", 8, short_mscale=1.0, long_mscale=1.3),
    "MiniCPM3": _longrope("MiniCPM3", 4),
    "Llama": replace(
        WORKING["Llama"],
        options={
            "max_position_embeddings": SWITCH,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
}
NAMES = [name for name, family in FAMILIES.items() if family.exists]
# Lengths of prompts: the switch is in the prompt, or amid what is generated.
LENGTHS = (45, SWITCH - 5)
# Arguments of `enable` and of `generate`.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chunks": ({"prefill_chunk_size": 12}, {}),
    "static": ({"max_length": LENGTHS[0] + 13}, {}),
    "beams": ({}, {"num_beams": 2}),
}


def _prompts(length: int) -> dict[str, Tensor]:
    """Padded on the left to one length."""
    return left_padded(VOCAB_SIZE, length, (0, 6), seed=4)


@cache
def _expected(name: str) -> dict[tuple[str, int], Tensor]:
    model = make_model(FAMILIES[name])
    return {
        (way, length): model.generate(**_prompts(length), **GREEDY, **arguments)
        for way, (_, arguments) in WAYS.items()
        for length in LENGTHS
    }


def _generate(rank: int, world_size: int, expected: dict[str, Any]) -> None:
    layout = BlockCyclic(world_size, 4)
    for name, tokens in expected.items():
        model = make_model(FAMILIES[name])
        for way, (options, arguments) in WAYS.items():
            hf.enable(model, layout=layout, **options)
            for length in LENGTHS:
                output = model.generate(
                    **_prompts(length), **GREEDY, **arguments, return_dict_in_generate=True
                )
                assert torch.equal(output.sequences, tokens[way, length]), (name, way, length)
                held = output[CACHE_NAME]
                assert isinstance(held, hf.TreeCache), (name, way)
                assert int(held.get_seq_length()) == length + GREEDY["max_new_tokens"] - 1


@by_world([], [2, 1])
def test_tokens_equal_those_of_transformers(world_size: int) -> None:
    """On every way there, and in a cache that is sharded."""
    run_ranks(_generate, world_size, {name: _expected(name) for name in NAMES})


@on_ranks(2)
def test_a_given_cache_is_filled_anew(rank: int, world_size: int) -> None:
    """It is short of the length at which keys change, and the next turn is beyond."""
    layout = BlockCyclic(world_size, 4)
    plain = make_model(FAMILIES["Phi-3"])
    model = hf.enable(make_model(FAMILIES["Phi-3"]), layout=layout)
    held = hf.TreeCache(model.config, layout=layout)
    prompts = _prompts(SWITCH + 10)
    with torch.no_grad():
        model(prompts["input_ids"][:, :20], prompts["attention_mask"][:, :20], **{CACHE_NAME: held})
    new = prompts | {"input_ids": prompts["input_ids"][:, 3:]}
    with pytest.raises(ValueError, match="was not given the first 20, of which the cache holds"):
        model.generate(**new, **{CACHE_NAME: held}, **GREEDY)
    expected = plain.generate(**prompts, **GREEDY)
    assert torch.equal(model.generate(**prompts, **{CACHE_NAME: held}, **GREEDY), expected)
    assert held.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize(
    "changes,error",
    [
        (
            {CACHE_NAME: DynamicCache},
            "replaced the TreeCache of .* by a DynamicCache, which",
        ),
        (
            {"next_sequence_length": lambda: 2},
            "the cache must hold 38 tokens, .* and holds 39: transf",
        ),
    ],
)
def test_a_cache_of_other_tokens_is_an_error(
    changes: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model takes another cache, or is fed a token twice."""
    original = LlamaForCausalLM.prepare_inputs_for_generation

    def prepare(self: LlamaForCausalLM, ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        if ids.shape[1] > 37:
            kwargs |= {name: make() for name, make in changes.items()}
        return original(self, ids, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "prepare_inputs_for_generation", prepare)
    model = hf.enable(make_llama("llama"))
    with pytest.raises(RuntimeError, match=error):
        model.generate(**make_prompts(1), **GREEDY)
