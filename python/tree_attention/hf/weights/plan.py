# SPDX-License-Identifier: BSD-3-Clause
"""Which weights of a model are split, and along which axis: from the model's own plan.

transformers gives each architecture a `base_model_tp_plan`: "colwise" modules give a slice of their
features, and the "rowwise" module beside them takes that slice and is summed over ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .mesh import Mesh

# Styles of small modules, which stay whole, and of the embedding, which is split without a plan.
_SKIPPED = {"replicated_with_grad_allreduce", "sequence_parallel", "embedding_rowwise"}
QUERY, KEY_VALUE = "q_proj", ("k_proj", "v_proj")
# For families that plan their experts alone (GPT-OSS).
_ATTENTION_PLAN = {
    **{f"layers.*.self_attn.{name}": "colwise" for name in (QUERY, *KEY_VALUE)},
    "layers.*.self_attn.o_proj": "rowwise",
}
# A parameter of attention modules with one value for each query head (GPT-OSS).
_SINKS = "sinks"


class CannotSplitError(ValueError):
    """A model has a module that cannot be split."""


@dataclass(frozen=True)
class Cut:
    """The part [begin, end) that this rank keeps of an axis of a parameter, and zeros behind it."""

    dim: int
    begin: int
    end: int
    zeros: int = 0

    def of(self, whole: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A copy of the part of `whole`, in memory of its own."""
        shape = list(whole.shape)
        size = self.end - self.begin
        shape[self.dim] = size + self.zeros
        part = torch.zeros(shape, dtype=dtype, device=device)
        part.narrow(self.dim, 0, size).copy_(whole.narrow(self.dim, self.begin, size))
        return part


@dataclass(frozen=True)
class WeightPlan:
    """The part of each module that every rank gets, by the module's name."""

    cuts: Mapping[str, Cut]  # by parameter; of others, all
    attentions: tuple[str, ...]
    summed: tuple[str, ...]  # linear layers whose results are added over the ranks
    embedding: str
    head: str


def plan(model: PreTrainedModel, mesh: Mesh) -> WeightPlan:
    """The split of `model`, which is whole, over the ranks of `mesh`, or CannotSplitError."""
    return _Planner(model, mesh).plan()


class _Planner:
    def __init__(self, model: PreTrainedModel, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh
        self._modules: dict[str, Any] = dict(model.named_modules())
        self._cuts: dict[str, Cut] = {}

    def plan(self) -> WeightPlan:
        if getattr(self._model.config, "kv_lora_rank", None) is not None:
            raise self._refusal("the attention", "latents have no heads of keys and values")
        attentions, summed = [], []
        for parent, styles in self._styles().items():
            columns = [f"{parent}.{name}" for name, style in styles.items() if style == "colwise"]
            rows = [f"{parent}.{name}" for name, style in styles.items() if style == "rowwise"]
            if not columns or len(rows) != 1:
                raise self._refusal(
                    parent, f"of {', '.join(styles)} its plan makes {len(rows)} rowwise, not one"
                )
            for name in (*columns, *rows):
                module = self._modules[name]
                kind = type(module)
                if kind is not nn.Linear:
                    found = f"it is no torch.nn.Linear, but {kind.__module__}.{kind.__qualname__}"
                    if hasattr(module, "base_layer"):
                        found += "; merge the adapter into the weights first, with merge_and_unload"
                    raise self._refusal(name, found)
                weight = module.weight
                if hasattr(weight, "__tensor_flatten__"):
                    raise self._refusal(name, f"its weight is quantised: {type(weight).__name__}")
            (row,) = rows
            summed.append(row)
            if f"{parent}.{QUERY}" in columns:
                attentions.append(parent)
                self._cut_attention(parent, columns, row)
            else:
                self._cut_features(parent, columns, row)
        if not attentions:
            raise self._refusal("the attention", "its base_model_tp_plan names no q_proj")
        return WeightPlan(self._cuts, tuple(attentions), tuple(summed), *self._cut_vocabulary())

    def _styles(self) -> dict[str, dict[str, str]]:
        """The styles that the model's plan gives to modules which are there, by their parents."""
        config = self._model.config
        patterns = getattr(config, "base_model_tp_plan", None)
        if patterns is None and getattr(config, "base_model_ep_plan", None) is not None:
            patterns = _ATTENTION_PLAN
        if not patterns:
            raise self._refusal("the model", "its configuration has no base_model_tp_plan")
        prefix = f"{self._model.base_model_prefix}."
        found: dict[str, dict[str, str]] = {}
        for name in self._modules:
            # The plan has a star for the number of a layer.
            style = patterns.get(re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix(prefix)))
            # Experts stay whole: which of them a token needs is known only as it runs.
            if style is None or style in _SKIPPED or ".experts" in name:
                continue
            if style not in ("colwise", "rowwise"):
                raise self._refusal(name, f"its plan must be colwise or rowwise, got {style!r}")
            parent, _, child = name.rpartition(".")
            found.setdefault(parent, {})[child] = style
        return found

    def _cut_attention(self, parent: str, columns: list[str], row: str) -> None:
        attention, mesh = self._modules[parent], self._mesh
        if {name.rpartition(".")[2] for name in columns} != {QUERY, *KEY_VALUE}:
            names = ", ".join(columns)
            raise self._refusal(
                parent, f"its colwise modules are {names}, not q_proj, k_proj, v_proj"
            )
        head_dim = attention.head_dim
        num_heads_q = attention.q_proj.out_features // head_dim
        num_heads_kv = attention.k_proj.out_features // head_dim
        if num_heads_kv % mesh.tensor_parallel_size:
            raise ValueError(
                f"{mesh.op}: tensor_parallel_size must divide the {num_heads_kv} heads of keys "
                f"and values of {type(self._model).__name__}, got {mesh.tensor_parallel_size}"
            )
        # All ranks of a context group have the same heads of keys and values.
        count = num_heads_kv // mesh.tensor_parallel_size
        kv = mesh.tensor_rank * count, (mesh.tensor_rank + 1) * count
        # The query heads that attend to these, and those of them that are this rank's afterwards.
        first, last = (head * num_heads_q // num_heads_kv for head in kv)
        own = tuple(first + head for head in mesh.own_heads(last - first))
        heads = {QUERY: (num_heads_q, (first, last))}
        heads |= dict.fromkeys(KEY_VALUE, (num_heads_kv, kv))
        for child, (num_heads, part) in heads.items():
            size = self._modules[f"{parent}.{child}"].out_features // num_heads
            self._cut_linear(f"{parent}.{child}", *(size * head for head in part))
        size = self._modules[row].in_features // num_heads_q
        self._cuts[f"{row}.weight"] = Cut(1, *(size * head for head in own))
        sinks = getattr(attention, _SINKS, None)
        if sinks is not None and sinks.shape == (num_heads_q,):
            self._cuts[f"{parent}.{_SINKS}"] = Cut(0, *own)
        # Norms of single heads stay whole, as every head has the same; those of all heads cannot.
        self._check_rest(parent, row, lambda shape: shape == (head_dim,), "that of one head")

    def _cut_features(self, parent: str, columns: list[str], row: str) -> None:
        size = self._modules[row].in_features
        begin, end = self._mesh.slice(size)
        for name in columns:
            found = self._modules[name].out_features
            if found != size:
                raise self._refusal(name, f"it has {found} outputs and {row} takes {size}")
            self._cut_linear(name, begin, end)
        self._cuts[f"{row}.weight"] = Cut(1, begin, end)
        self._check_rest(parent, row, lambda shape: size not in shape, "independent of the slice")

    def _cut_vocabulary(self) -> tuple[str, str]:
        """Cuts the embedding and the head, and returns their names."""
        embedding = self._name_of("get_input_embeddings", nn.Embedding)
        head = self._name_of("get_output_embeddings", nn.Linear)
        table, linear = self._modules[embedding], self._modules[head]
        size = table.num_embeddings
        if linear.out_features != size:
            found = linear.out_features
            raise self._refusal(head, f"it has {found} outputs for a vocabulary of {size}")
        begin, end = self._mesh.slice(size)
        # The tokens of other ranks find a row of zeros, also where the head has the same weight.
        self._cuts[f"{embedding}.weight"] = Cut(0, begin, end, zeros=1)
        self._cut_linear(head, begin, end, zeros=int(linear.weight is table.weight))
        return embedding, head

    def _name_of(self, getter: str, kind: type[nn.Module]) -> str:
        module = getattr(self._model, getter)()
        if not isinstance(module, kind):
            raise self._refusal(getter, f"gives no {kind.__name__}, but {type(module).__name__}")
        return next(name for name, other in self._modules.items() if other is module)

    def _cut_linear(self, name: str, begin: int, end: int, zeros: int = 0) -> None:
        for parameter, _ in self._modules[name].named_parameters(recurse=False):
            self._cuts[f"{name}.{parameter}"] = Cut(0, begin, end, zeros)

    def _check_rest(
        self, parent: str, row: str, may_be: Callable[[torch.Size], bool], what: str
    ) -> None:
        """Refuses parameters beside those that are cut, unless they may stay whole."""
        for own, parameter in self._modules[parent].named_parameters():
            name = f"{parent}.{own}"
            if name not in self._cuts and name != f"{row}.bias" and not may_be(parameter.shape):
                raise self._refusal(name, f"its shape {list(parameter.shape)} is not {what}")

    def _refusal(self, name: str, reason: str) -> CannotSplitError:
        return CannotSplitError(
            f"{self._mesh.op}: {type(self._model).__name__} cannot be split: {name}: {reason}; "
            "use enable(model), with whole weights on every rank"
        )
