# SPDX-License-Identifier: BSD-3-Clause
"""Experts whose weights are read once by the tokens that were sent to them.

transformers' modules of experts keep all of them in two tensors, and let the product with these be
chosen by name. This one multiplies each expert that is hit with its tokens, of any dtype on a CPU.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from .parts import Cut, Lazy
from .quantised import Matrix

NAME = "tree_attention"


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Sums of the experts that each token of `hidden_states [tokens, hidden]` is sent to.

    Equivalent PyTorch::

        for token, choices in enumerate(top_k_index):
            for k, expert in enumerate(choices):
                out[token] += top_k_weights[token, k] * experts[expert](hidden_states[token])
    """
    if hidden_states.device.type != "cpu":
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    tokens, num_choices = top_k_index.shape
    experts = top_k_index.reshape(-1)
    inner = _product(self, "gate_up_proj" if self.has_gate else "up_proj", hidden_states, experts)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    out = _product(self, "down_proj", inner, experts)
    if getattr(self, "has_post_expert_norm", False):
        out = self.post_expert_norm(out)
    out = out.unflatten(0, (tokens, num_choices)) * top_k_weights[..., None]
    return out.sum(dim=1).to(hidden_states.dtype)


def _product(module: Any, name: str, x: Tensor, experts: Tensor) -> Tensor:
    """Multiplies the rows of `x`, equally many for each choice, by the experts chosen for them."""
    weight = getattr(module, name)
    out = torch.ops.tree_attention.linear_of_experts(
        x,
        experts,
        weight,
        getattr(module, f"{name}_scale", None),
        getattr(module, f"{name}_front", 0),
        weight.is_floating_point() and module.is_transposed,
    )
    bias = getattr(module, f"{name}_bias", None)
    return out if bias is None else out + bias[experts]


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def choose_experts(model: PreTrainedModel) -> None:
    """Lets a model's experts take `experts_forward` where nothing else was chosen."""
    if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
        model.set_experts_implementation(NAME)


def quantise_experts(
    experts: Any, name: str, source: Lazy, cut: Cut | None, scheme: str, dtype: torch.dtype
) -> nn.Parameter:
    """Quantises one of the two tensors of experts, and gives the module its scales."""
    is_transposed = getattr(experts, "is_transposed", False)
    count = source.shape[0]
    for expert in range(count):
        matrix = Matrix(source, cut, (expert,), is_transposed)
        made = matrix.quantised(scheme, dtype)
        if expert == 0:  # the others are as large, and none is kept twice
            data, scales = (x.new_empty((count, *x.shape)) for x in (made.data, made.scale))
        data[expert], scales[expert] = made.data, made.scale
    setattr(experts, f"{name}_scale", nn.Parameter(scales, requires_grad=False))
    setattr(experts, f"{name}_front", made.front)
    return nn.Parameter(data, requires_grad=False)
