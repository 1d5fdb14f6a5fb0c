# SPDX-License-Identifier: BSD-3-Clause
"""A model with a module that cannot be split is refused in a sentence that names the module.

The mistakes these tests are for: a module that is like a known one but for a size or a parameter,
which is cut as if it were that, and whose numbers are wrong without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from hf_families import REFUSED, WORKING, make_model
from hf_refusal import no_longer_refused
from tree_attention.weights.mesh import Mesh
from tree_attention.weights.plan import CannotSplitError, plan


def _split(family: str, change: Callable[[Any], object], **options: Any) -> None:
    """Plans the split of a changed model over two ranks, with tensor_parallel_size 2."""
    known = WORKING[family]
    with torch.device("meta"):
        model = make_model(replace(known, options=known.options | options))
        change(model)
    mesh = Mesh(None, 1)
    mesh.world_size = mesh.tensor_parallel_size = 2
    plan(model, mesh)


def _attention(model: Any) -> Any:
    return model.get_decoder().layers[1].self_attn


def _mlp(model: Any) -> Any:
    return model.get_decoder().layers[1].mlp


def _no_attention(model: Any) -> None:
    for layer in model.model.layers:
        del layer.self_attn.is_causal


CASES: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "no attention": (
        "Llama",
        _no_attention,
        "the model: it has no attention whose projections are known",
    ),
    "a parameter": (
        "Llama",
        lambda m: _attention(m).register_parameter("gate", nn.Parameter(torch.ones(4))),
        "model.layers.1.self_attn.gate: no such parameter of attention is known",
    ),
    "other projections": (
        "Llama",
        lambda m: delattr(_attention(m), "q_proj"),
        "model.layers.1.self_attn: none of its projections is known",
    ),
    "no keys": (
        "Llama",
        lambda m: delattr(_attention(m), "k_proj"),
        "model.layers.1.self_attn.k_proj: it is not there",
    ),
    "values of another width": (
        "Llama",
        lambda m: setattr(_attention(m), "v_proj", nn.Linear(64, 16)),
        "self_attn.v_proj: it has 16 outputs, and k_proj 32: values of another width",
    ),
    "results of another width": (
        "Llama",
        lambda m: setattr(_attention(m), "o_proj", nn.Linear(56, 64)),
        "self_attn.o_proj: its 56 inputs are no multiple of head_dim 16",
    ),
    "a packed projection of another size": (
        "GPT-NeoX",
        lambda m: setattr(m.gpt_neox.layers[0].attention, "query_key_value", nn.Linear(64, 128)),
        r"layers.0.attention.query_key_value: it has 128 outputs, not 192",
    ),
    "a norm of two heads": (
        "Qwen3",
        lambda m: setattr(_attention(m).q_norm, "weight", nn.Parameter(torch.ones(32))),
        r"self_attn.q_norm.weight: it is no norm of \[16\] for all heads, but \[32\] of Qwen3RMSN",
    ),
    "features": (
        "Llama",
        lambda m: setattr(_mlp(m), "up_proj", nn.Linear(64, 100)),
        "mlp.up_proj: it has 100 outputs, which are no multiple of 96",
    ),
    "a norm of features": (
        "Llama",
        lambda m: _mlp(m).add_module("norm", nn.LayerNorm(96)),
        r"mlp.norm.weight: its shape \[96\] is not independent of the slice",
    ),
    "a norm of each expert": (
        "Mixtral",
        lambda m: setattr(_mlp(m).experts, "has_post_expert_norm", True),
        "mlp.experts: a norm of each expert's output needs all of its inner width",
    ),
    "a parameter of experts": (
        "Mixtral",
        lambda m: _mlp(m).experts.register_parameter("scales", nn.Parameter(torch.ones(4))),
        "mlp.experts.scales: no such parameter of experts is known",
    ),
    "experts of another size": (
        "Mixtral",
        lambda m: setattr(_mlp(m).experts, "gate_up_proj", nn.Parameter(torch.ones(4, 100, 64))),
        "mlp.experts.gate_up_proj: it has 100 outputs and down_proj takes 96",
    ),
    "experts of another hidden size": (
        "Mixtral",
        lambda m: setattr(_mlp(m).experts, "gate_up_proj", nn.Parameter(torch.ones(4, 192, 40))),
        r"gate_up_proj: its shape \[4, 192, 40\] does not fit that of down_proj, \[4, 64, 96\]",
    ),
    "no head": (
        "Llama",
        lambda m: setattr(m, "lm_head", nn.Identity()),
        "get_output_embeddings: gives no Linear, but Identity",
    ),
    "a head for more tokens": (
        "Llama",
        lambda m: setattr(m, "lm_head", nn.Linear(64, 98)),
        "lm_head: it has 98 outputs for a vocabulary of 97",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_split_is_named(case: str) -> None:
    family, change, says = CASES[case]
    _split(family, lambda model: None)  # which the change alone makes impossible
    with pytest.raises(CannotSplitError, match=f"cannot be split: .*{says}.*; use enable"):
        _split(family, change)


def test_a_norm_module_for_each_head() -> None:
    """It takes the heads in order, and those of another rank would meet the first ones' norms."""
    _split("StableLM", lambda model: None)
    says = (
        r"q_layernorm.norms.0.weight: it is no norm of \[16\] for all heads, but \[16\] of StableLm"
    )
    with pytest.raises(CannotSplitError, match=says):
        _split("StableLM", lambda model: None, qk_layernorm=True)


def test_runs_of_heads_stay_whole() -> None:
    """In each of four runs CodeGen's projection has the queries, values and keys of some heads."""
    family = no_longer_refused(REFUSED).get("CodeGen")
    if family is None:
        pytest.skip("this release of transformers hides the attention of CodeGen")
    with torch.device("meta"):
        model = make_model(replace(family, options=family.options | {"num_attention_heads": 8}))
    mesh = Mesh(None, 1)
    mesh.world_size = mesh.tensor_parallel_size = 8
    with pytest.raises(ValueError, match=r"must divide the 4 runs of heads of CodeGen.*, got 8"):
        plan(model, mesh)
