# SPDX-License-Identifier: BSD-3-Clause
"""Models whose rotary embedding has other frequencies beyond a length of the text.

The mistake these tests are for: keys of one prompt that are turned by the frequencies of several
chunks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks

pytest.importorskip("transformers")

from generations import left_padded
from hf_families import VOCAB_SIZE, WORKING, Family, make_model
from tree_attention import BlockCyclic, hf

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
                found = model.generate(**_prompts(length), **GREEDY, **arguments)
                assert torch.equal(found, tokens[way, length]), (name, way, length)


@pytest.mark.parametrize("world_size", [1, 2])
def test_tokens_equal_those_of_transformers(world_size: int) -> None:
    """On every way there."""
    run_ranks(_generate, world_size, {name: _expected(name) for name in NAMES})
