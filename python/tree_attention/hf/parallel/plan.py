# SPDX-License-Identifier: BSD-3-Clause
"""Which weights of a model are split, and along which axis: from the model's own plan.

transformers gives each architecture a `base_model_tp_plan`: "colwise" modules give a slice of their
features, and the "rowwise" module beside them takes that slice and is summed over ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .mesh import Mesh

# Small modules that every rank keeps, whatever the plan calls them.
_WHOLE = {"replicated_with_grad_allreduce", "sequence_parallel"}
_QUERY, _KEY_VALUE = "q_proj", ("k_proj", "v_proj")
_ATTENTION = {_QUERY, *_KEY_VALUE}
# For families that plan their experts alone (GPT-OSS).
_ATTENTION_PLAN = {
    **{f"layers.*.self_attn.{name}": "colwise" for name in (_QUERY, *_KEY_VALUE)},
    "layers.*.self_attn.o_proj": "rowwise",
}
# A parameter of attention modules with one value for each query head (GPT-OSS).
_SINKS = "sinks"


class CannotSplitError(ValueError):
    """A model has a module that cannot be split."""


@dataclass(frozen=True)
class Cut:
    """The part [begin, end) along an axis of a parameter which this rank keeps, and how many zeros
    follow it there."""

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
class Plan:
    """What becomes of a model's modules, by their names.

    Attributes:
        cuts: the part of each parameter that this rank keeps; all of those not in it.
        attentions: the attention modules.
        summed: the linear layers whose results are added over the ranks.
        embedding, head: the token embedding and the layer that makes logits.
    """

    cuts: Mapping[str, Cut]
    attentions: tuple[str, ...]
    summed: tuple[str, ...]
    embedding: str
    head: str


def plan(model: PreTrainedModel, mesh: Mesh) -> Plan:
    """How `model`, which is whole, is split over the ranks of `mesh`.

    Raises:
        CannotSplitError: a module cannot be split.
        ValueError: tensor_parallel_size does not divide the heads of keys and values.
    """
    styles = _styles(model)
    modules = dict(model.named_modules())
    cuts: dict[str, Cut] = {}
    attentions, summed = [], []
    for parent, children in _by_parent(styles).items():
        columns = [name for name, style in children.items() if style == "colwise"]
        rows = [name for name, style in children.items() if style == "rowwise"]
        for name in (*columns, *rows):
            _check_linear(model, modules, f"{parent}.{name}")
        if not columns and not rows:
            continue
        if len(rows) != 1 or not columns:
            names = ", ".join(children)
            raise _refusal(model, parent, f"of {names} its plan makes {len(rows)} rowwise, not one")
        row = f"{parent}.{rows[0]}"
        summed.append(row)
        if _QUERY in columns:
            attentions.append(parent)
            cuts |= _of_attention(model, modules, parent, columns, row, mesh)
        else:
            cuts |= _of_features(model, modules, parent, columns, row, mesh)
    if not attentions:
        raise _refusal(model, "the attention", "its base_model_tp_plan names no q_proj")
    embedding = _name_of(model, modules, "get_input_embeddings", nn.Embedding)
    head = _name_of(model, modules, "get_output_embeddings", nn.Linear)
    begin, end = mesh.slice(modules[embedding].num_embeddings)
    if modules[head].out_features != modules[embedding].num_embeddings:
        raise _refusal(
            model,
            head,
            f"it has {modules[head].out_features} outputs for a vocabulary of "
            f"{modules[embedding].num_embeddings}",
        )
    cuts |= _parameters(modules, head, Cut(0, begin, end))
    # The tokens of other ranks find a row of zeros, also where the head has the same weight.
    cuts[f"{embedding}.weight"] = Cut(0, begin, end, zeros=1)
    if modules[head].weight is modules[embedding].weight:
        cuts[f"{head}.weight"] = cuts[f"{embedding}.weight"]
    return Plan(cuts, tuple(attentions), tuple(summed), embedding, head)


def _styles(model: PreTrainedModel) -> dict[str, str]:
    """The style that the plan gives to each of the model's modules which is there."""
    config = model.config
    patterns = getattr(config, "base_model_tp_plan", None)
    if patterns is None and getattr(config, "base_model_ep_plan", None) is not None:
        patterns = _ATTENTION_PLAN
    if not patterns:
        raise _refusal(model, "the model", "its configuration has no base_model_tp_plan")
    prefix = f"{model.base_model_prefix}."
    found = {}
    for name, _ in model.named_modules():
        if not name.startswith(prefix):
            continue
        style = patterns.get(re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix(prefix)))
        # Experts stay whole: which of them a token needs is known only as it runs.
        if style is None or style in _WHOLE or ".experts" in name:
            continue
        if style not in ("colwise", "rowwise"):
            raise _refusal(model, name, f"its plan must be colwise or rowwise, got {style!r}")
        found[name] = style
    return found


def _by_parent(styles: Mapping[str, str]) -> dict[str, dict[str, str]]:
    result: dict[str, dict[str, str]] = {}
    for name, style in styles.items():
        parent, _, child = name.rpartition(".")
        result.setdefault(parent, {})[child] = style
    return result


def _of_attention(
    model: PreTrainedModel,
    modules: Mapping[str, Any],
    parent: str,
    columns: list[str],
    row: str,
    mesh: Mesh,
) -> dict[str, Cut]:
    attention = modules[parent]
    if set(columns) != _ATTENTION:
        names = ", ".join(columns)
        raise _refusal(
            model, parent, f"its colwise modules are {names}, not q_proj, k_proj, v_proj"
        )
    head_dim = attention.head_dim
    num_heads_q = attention.q_proj.out_features // head_dim
    num_heads_kv = attention.k_proj.out_features // head_dim
    if num_heads_kv % mesh.tensor_parallel_size:
        raise ValueError(
            f"parallelize: tensor_parallel_size must divide the {num_heads_kv} heads of keys and "
            f"values of {type(model).__name__}, got {mesh.tensor_parallel_size}"
        )
    result: dict[str, Cut] = {}
    kv = mesh.kv_heads(num_heads_kv)
    group_size = num_heads_q // num_heads_kv
    first, last = (bound * group_size for bound in kv)  # query heads of those heads
    own = tuple(first + bound for bound in mesh.own_heads(last - first))
    heads = {_QUERY: (num_heads_q, (first, last)), **dict.fromkeys(_KEY_VALUE, (num_heads_kv, kv))}
    for name, (count, part) in heads.items():
        size = modules[f"{parent}.{name}"].out_features // count
        result |= _parameters(modules, f"{parent}.{name}", Cut(0, *(size * x for x in part)))
    size = modules[row].in_features // num_heads_q
    result[f"{row}.weight"] = Cut(1, size * own[0], size * own[1])
    for name, parameter in attention.named_parameters(recurse=False):
        if name != _SINKS or parameter.shape != (num_heads_q,):
            raise _refusal(model, parent, f"it is unknown how its parameter {name!r} is split")
        result[f"{parent}.{name}"] = Cut(0, *own)
    for name, parameter in attention.named_parameters():
        # Norms of single heads stay whole, as every head has the same; those of all heads cannot.
        if f"{parent}.{name}" not in (*result, f"{row}.bias") and parameter.shape != (head_dim,):
            shape = list(parameter.shape)
            raise _refusal(model, f"{parent}.{name}", f"its shape {shape} is not that of one head")
    return result


def _of_features(
    model: PreTrainedModel,
    modules: Mapping[str, Any],
    parent: str,
    columns: list[str],
    row: str,
    mesh: Mesh,
) -> dict[str, Cut]:
    size = modules[row].in_features
    begin, end = mesh.slice(size)
    result = {f"{row}.weight": Cut(1, begin, end)}
    for name in columns:
        if modules[f"{parent}.{name}"].out_features != size:
            raise _refusal(
                model,
                f"{parent}.{name}",
                f"it has {modules[f'{parent}.{name}'].out_features} outputs and {row} takes {size}",
            )
        result |= _parameters(modules, f"{parent}.{name}", Cut(0, begin, end))
    return result


def _parameters(modules: Mapping[str, Any], name: str, cut: Cut) -> dict[str, Cut]:
    """The same cut for weight and bias."""
    own = modules[name].named_parameters(recurse=False)
    return {f"{name}.{parameter}": cut for parameter, _ in own}


def _name_of(model: Any, modules: Mapping[str, Any], getter: str, kind: type[nn.Module]) -> str:
    module = getattr(model, getter)()
    if not isinstance(module, kind):
        raise _refusal(model, getter, f"gives no {kind.__name__}, but {type(module).__name__}")
    return next(name for name, other in modules.items() if other is module)


def _check_linear(model: PreTrainedModel, modules: Mapping[str, Any], name: str) -> None:
    if type(modules[name]) is not nn.Linear:
        raise _refusal(model, name, f"it is no torch.nn.Linear, but {type(modules[name]).__name__}")


def _refusal(model: PreTrainedModel, name: str, reason: str) -> CannotSplitError:
    return CannotSplitError(
        f"parallelize: {type(model).__name__} cannot be split: {name}: {reason}; "
        "use enable(model), with whole weights on every rank"
    )
