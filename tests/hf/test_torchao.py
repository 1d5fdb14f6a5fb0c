# SPDX-License-Identifier: BSD-3-Clause
"""Weights that torchao has quantised, beside a cache of 8 bits: people who want one want both."""

from __future__ import annotations

import pytest

from distributed import on_ranks
from tiers import by_world

pytest.importorskip("transformers")
pytest.importorskip("torchao")

from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import PreTrainedModel

from hf_models import make_model, make_prompts
from tree_attention import ExchangeError, hf

GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


def _quantised_model() -> PreTrainedModel:
    model = make_model("llama")
    quantize_(model, Int8WeightOnlyConfig())
    return model


@by_world([2], [1])
@on_ranks()
def test_quantised_weights(rank: int, world_size: int) -> None:
    prompts = make_prompts()
    model = _quantised_model()
    expected = model.generate(**prompts, **GREEDY)
    for kv_dtype in (None, "int8"):
        hf.enable(model, kv_dtype=kv_dtype)
        assert model.generate(**prompts, **GREEDY).equal(expected)


@on_ranks(2)
def test_ranks_with_other_quantised_weights(rank: int, world_size: int) -> None:
    model = hf.enable(_quantised_model())
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.scale.mul_(1 + rank)
    with pytest.raises(ExchangeError, match="weights"):
        model.generate(**make_prompts(), **GREEDY)


@on_ranks(2)
def test_quantised_weights_are_not_split(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"o_proj: its weight is quantised: Int8Tensor"):
        hf.parallelize(_quantised_model())
