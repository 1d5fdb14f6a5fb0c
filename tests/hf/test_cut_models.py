# SPDX-License-Identifier: BSD-3-Clause
"""Models of which layers were taken away after loading, as pruning and debugging do."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import run_ranks
from tiers import by_world

pytest.importorskip("transformers")

from transformers import PreTrainedModel

from hf_families import HYBRIDS, WORKING, make_model
from tree_attention import hf
from tree_attention.hf import CACHE_NAME

GREEDY = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
_IDS = torch.arange(5, 25)[None]


def _model(name: str) -> PreTrainedModel:
    """Four layers, of which the first two have the kinds of the family's."""
    family = {**WORKING, **HYBRIDS}[name]
    options: dict[str, Any] = {**family.options, "num_hidden_layers": 4}
    if "layer_types" in options:
        options["layer_types"] = [*options["layer_types"]] * 2
    return make_model(dataclasses.replace(family, options=options))


def _cut(model: PreTrainedModel, case: str) -> PreTrainedModel:
    layers = model.model.layers
    if case in ("both", "layers alone"):
        model.model.layers = layers[:2]
    if case in ("both", "configuration alone", "gap"):
        model.config.num_hidden_layers = 2
    if case == "gap":
        model.model.layers = nn.ModuleList([layers[0], layers[3]])
    if case == "shared":
        model.model.layers = nn.ModuleList([layers[0], layers[1]] * 2)
    if case == "reversed":
        model.model.layers = layers[::-1]
    if case in ("copied", "deeper"):  # and each copy has a copy of the configuration
        order = {"copied": [0, 1, 2, 3], "deeper": [0, 1, 0, 1, 2, 3]}[case]
        model.model.layers = nn.ModuleList(copy.deepcopy(layers[i]) for i in order)
        model.config.num_hidden_layers = len(order)
        if getattr(model.config, "layer_types", None) is not None:
            model.config.layer_types = [model.config.layer_types[i] for i in order]
        for i, layer in enumerate(model.model.layers):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = i
    if case == "larger":  # than layer_types has kinds
        model.config.num_hidden_layers = 6
    return model


def _generate(rank: int, world_size: int, name: str, expected: dict[str, Tensor]) -> None:
    for case, tokens in expected.items():
        model = hf.enable(_cut(_model(name), case))
        output = model.generate(_IDS, **GREEDY, return_dict_in_generate=True)
        assert torch.equal(output.sequences, tokens), case
        longer = torch.cat([tokens, tokens[:, :3]], dim=1)  # another turn with its cache
        whole = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
        found = model.generate(**whole, **GREEDY, **{CACHE_NAME: output[CACHE_NAME]})
        assert torch.equal(found, hf.disable(model).generate(**whole, **GREEDY)), case


_FAMILIES = [
    *("Qwen3-Next", "Llama", "LFM2", "Qwen3", "Gemma 2", "DeepSeek-V3", "GPT-OSS", "SmolLM3"),
    *("OLMo 3", "Cohere 2", "Gemma 3"),
]


@by_world([], [2, 1])
@pytest.mark.parametrize("name", _FAMILIES)
def test_fewer_layers_than_the_configuration_had(world_size: int, name: str) -> None:
    cases = ["both", "copied", "deeper"]
    if name not in ("GPT-OSS", "Cohere 2"):  # which transformers runs to the end anyhow
        cases.append("configuration alone")
    if name in ("Qwen3", "LFM2"):  # others' own caches do not take it
        cases.append("larger")
    expected = {case: _cut(_model(name), case).generate(_IDS, **GREEDY) for case in cases}
    run_ranks(_generate, world_size, name, expected)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("layers alone", "names 4 layers, and no layer has the layer_idx 2, 3; set .*num_hidden_l"),
        ("shared", "names 4 layers, and no layer has the layer_idx 2, 3; set"),
        ("reversed", "ForCausalLM run in the order of layer_idx 3, 2, 1, 0; set layer_idx of each"),
        ("gap", "names 2 layers, and no layer has the layer_idx 1; set .* and layer_idx of each"),
    ],
)
@pytest.mark.parametrize("name", ["Llama", "LFM2"])
def test_layers_that_the_cache_would_not_fit(name: str, case: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^enable: the .* of this .*{sentence}"):
        hf.enable(_cut(_model(name), case))
    model = hf.enable(_model(name))
    _cut(model, case)
    with pytest.raises(ValueError, match=f"^generate: the .* of this .*{sentence}"):
        model.generate(_IDS, **GREEDY)
