# SPDX-License-Identifier: BSD-3-Clause
"""Which weights of a model are split, and along which axis, by the names of its linear layers.

Attention is cut by heads (`heads`), each MLP and each expert along its inner width, the embedding
and the head along the vocabulary. Layers that keep a state, routers and norms stay whole.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .checkpoint.reading import some
from .heads import (
    LATENT,
    HeadPlanner,
    HeadSplit,
    axes_of,
    is_attention,
    is_rms_norm,
    why_not_linear,
)
from .mesh import Mesh
from .parts import Cut, Range
from .text import text_of

# The linear layers of an MLP: the ones that compute its inner features (one layer may compute
# several groups of them, joined), and the one that takes these as its inputs.
_MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("input_linear",), "output_linear"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
_EXPERTS = ("gate_up_proj", "up_proj"), "down_proj"
# Blocks of experts whose output is a linear function of what these children give, so that one sum
# serves all of them. Any other child, like a norm, may need a sum of its own before it.
_ROUTED, _SHARED = "experts", ("shared_experts", "shared_expert")
_MIXTURE = {_ROUTED, *_SHARED, "gate", "router", "shared_expert_gate"}
# Experts of LongCat-Flash that hand on what they get.
_IDENTITY = "identity_expert"


class CannotSplitError(ValueError):
    """A model has a module that cannot be split."""


@dataclass
class WeightPlan:
    """The part of each module that every rank gets, by the module's name."""

    cuts: dict[str, Cut] = field(default_factory=dict)  # by parameter; of others, all
    heads: dict[str, HeadSplit] = field(default_factory=dict)
    summed: list[str] = field(default_factory=list)  # modules that are added up over the ranks
    # Norms over features that are split, and how many ranks hold the same of them.
    norms: dict[str, int] = field(default_factory=dict)
    # Attributes that have other values than in the whole module.
    sizes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)  # give zeros here, as the first rank does them
    # Weights of linear layers, and tensors of experts, that may have fewer bits.
    linears: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)
    embedding: str = ""
    head: str = ""


def plan(model: PreTrainedModel, mesh: Mesh) -> WeightPlan:
    """The split of `model`, which is whole, over the ranks of `mesh`, or CannotSplitError."""
    return _Planner(model, mesh).plan()


def whole_parts(parameters: Iterable[tuple[str, Tensor]], cut: Container[str]) -> tuple[int, str]:
    """Bytes of the parameters that are not cut, and the modules with most of them by name."""
    sizes = Counter[str]()
    for name, parameter in parameters:
        if name not in cut:
            module = name.rpartition(".")[0]
            sizes[re.sub(r"\.\d+\b", ".*", module)] += parameter.nbytes  # of all layers
    most = [name for name, size in sizes.most_common() if 20 * size > sizes.total()]
    return sizes.total(), some(most)


class _Planner:
    def __init__(self, model: PreTrainedModel, mesh: Mesh) -> None:
        self._model, self._mesh, self._made = model, mesh, WeightPlan()
        self._modules: dict[str, Any] = dict(model.named_modules())
        self._of_text = {*text_of(model).modules()}  # the others stay whole

    def plan(self) -> WeightPlan:
        for name, module in self._modules.items():
            if module not in self._of_text:
                continue
            if is_attention(module):
                self._cut_attention(name, module)
            elif (found := _mlp_of(module)) is not None:
                self._cut_features(name, *found)
            elif _are_experts(module):
                self._cut_experts(name, module)
        if not self._made.heads:
            raise self._refusal("the model", "it has no attention whose projections are known")
        self._join_sums()
        self._cut_vocabulary()
        return self._made

    def _cut_attention(self, name: str, attention: Any) -> None:
        def refusal(child: str, reason: str) -> CannotSplitError:
            return self._refusal(f"{name}.{child}".rstrip("."), reason)

        found = HeadPlanner(attention, self._mesh, type(self._model).__name__, refusal).split()
        self._made.heads[name] = found
        for child in (*found.projections, found.output, *found.shared):
            self._check_linear(f"{name}.{child}")
        for child, ranges in found.projections.items():
            self._cut_linear(f"{name}.{child}", ranges)
        # Attention multiplies queries by the weight out of latents.
        self._made.linears.discard(f"{name}.{LATENT}.weight")
        self._made.cuts |= {f"{name}.{own}": cut for own, cut in found.cuts.items()}
        self._add_up(f"{name}.{found.output}")
        self._made.norms |= {f"{name}.{own}": self._mesh.context_size for own in found.norms}
        self._made.sizes[name] = found.sizes

    def _cut_features(self, name: str, columns: tuple[str, ...], row: str) -> None:
        *firsts, row = (f"{name}.{child}" for child in (*columns, row))
        for child in (*firsts, row):
            self._check_linear(child)
        linear = self._modules[row]
        axis = axes_of(linear)[1]
        size = linear.weight.shape[axis]
        begin, end = part = self._mesh.slice(size)
        for column in firsts:  # which give the features once, or several times
            outputs = self._modules[column].weight.shape[axes_of(self._modules[column])[0]]
            if outputs % size:
                found = f"it has {outputs} outputs, which are no multiple of {size}"
                raise self._refusal(column, found)
            self._cut_linear(column, tuple((x + begin, x + end) for x in range(0, outputs, size)))
        self._made.cuts[f"{row}.weight"] = Cut(axis, (part,))
        self._add_up(row)
        for child, module in self._modules[name].named_children():
            for own, parameter in module.named_parameters():
                path = f"{name}.{child}.{own}"
                if path in self._made.cuts or path == f"{row}.bias" or size not in parameter.shape:
                    continue
                if not (is_rms_norm(module) and parameter.shape == (size,)):
                    found = f"its shape {list(parameter.shape)} is not independent of the slice"
                    raise self._refusal(path, found)
                self._made.cuts[path] = Cut(0, (part,))
                self._made.norms[f"{name}.{child}"] = 1

    def _cut_experts(self, name: str, experts: Any) -> None:
        """Cuts each expert along its inner width, so that one token is equal work for all ranks."""
        if getattr(experts, "has_post_expert_norm", False):
            raise self._refusal(name, "a norm of each expert's output needs all of its inner width")
        columns = next(x for x in _EXPERTS[0] if hasattr(experts, x))
        rows = _EXPERTS[1]
        first, last = getattr(experts, columns).shape, getattr(experts, rows).shape
        # [experts, outputs, inputs], or transposed: both have the axis of the model's hidden size.
        # Modules that have one kind of product only (Llama 4) do not say whether it is transposed.
        is_transposed = getattr(experts, "is_transposed", first[2] != last[1])
        dim = 1 if is_transposed else 2
        if first[dim] != last[3 - dim]:
            found = f"its shape {list(first)} does not fit that of {rows}, {list(last)}"
            raise self._refusal(f"{name}.{columns}", found)
        size, outputs = last[dim], first[3 - dim]
        begin, end = part = self._mesh.slice(size)
        if outputs == 2 * size and not getattr(experts, "is_concatenated", True):
            ranges: tuple[Range, ...] = ((2 * begin, 2 * end),)
        elif outputs in (size, 2 * size):
            ranges = tuple((first + begin, first + end) for first in range(0, outputs, size))
        else:
            found = f"it has {outputs} outputs and {rows} takes {size}"
            raise self._refusal(f"{name}.{columns}", found)
        cuts = {columns: Cut(3 - dim, ranges), rows: Cut(dim, (part,))}
        cuts[f"{columns}_bias"] = Cut(1, ranges)
        for own, parameter in experts.named_parameters():
            if own == f"{rows}_bias":
                cuts[own] = self._once(parameter)
            elif own not in cuts:
                raise self._refusal(f"{name}.{own}", "no such parameter of experts is known")
            self._made.cuts[f"{name}.{own}"] = cuts[own]
        if hasattr(experts, "is_transposed"):  # those whose product can be chosen
            self._made.experts |= {f"{name}.{columns}", f"{name}.{rows}"}
        if hasattr(experts, _IDENTITY) and self._mesh.rank > 0:
            self._made.silent.append(f"{name}.{_IDENTITY}")
        self._made.summed.append(name)

    def _add_up(self, name: str) -> None:
        """Adds up the outputs of a linear layer, and its bias on the first rank alone."""
        if getattr(self._modules[name], "bias", None) is not None:
            self._made.cuts[f"{name}.bias"] = self._once(self._modules[name].bias)
        self._made.summed.append(name)

    def _once(self, bias: Tensor) -> Cut:
        """A vector, or one for each expert, that only the first rank adds."""
        size = bias.shape[-1]
        dim = bias.dim() - 1
        return Cut(dim, ((0, size),)) if self._mesh.rank == 0 else Cut(dim, (), zeros=size)

    def _join_sums(self) -> None:
        """One sum for the experts that a router chooses and those that all tokens share."""
        for name, block in self._modules.items():
            children = dict(block.named_children())
            shared = [child for child in _SHARED if children.get(child) is not None]
            if f"{name}.{_ROUTED}" not in self._made.summed or len(shared) != 1:
                continue
            inner = [x for x in self._made.summed if x.startswith(f"{name}.{shared[0]}.")]
            if children.keys() <= _MIXTURE and len(inner) == 1:
                joined = {inner[0], f"{name}.{_ROUTED}"}
                self._made.summed = [x for x in self._made.summed if x not in joined] + [name]

    def _cut_vocabulary(self) -> None:
        """Cuts the embedding and the head."""
        embedding = self._name_of("get_input_embeddings", nn.Embedding)
        head = self._name_of("get_output_embeddings", nn.Linear)
        table, linear = self._modules[embedding], self._modules[head]
        size = table.num_embeddings
        if linear.out_features != size:
            found = linear.out_features
            raise self._refusal(head, f"it has {found} outputs for a vocabulary of {size}")
        part = self._mesh.slice(size)
        # The tokens of other ranks find a row of zeros, also where the head has the same weight.
        self._made.cuts[f"{embedding}.weight"] = Cut(0, (part,), zeros=1)
        self._cut_linear(head, (part,), zeros=int(linear.weight is table.weight))
        self._made.embedding, self._made.head = embedding, head

    def _name_of(self, getter: str, kind: type[nn.Module]) -> str:
        module = getattr(self._model, getter)()
        if not isinstance(module, kind):
            raise self._refusal(getter, f"gives no {kind.__name__}, but {type(module).__name__}")
        return next(name for name, other in self._modules.items() if other is module)

    def _cut_linear(self, name: str, ranges: tuple[Range, ...], zeros: int = 0) -> None:
        linear = self._modules[name]
        self._made.cuts[f"{name}.weight"] = Cut(axes_of(linear)[0], ranges, zeros)
        if linear.bias is not None:
            self._made.cuts[f"{name}.bias"] = Cut(0, ranges, zeros)
        if isinstance(linear, Conv1D):
            self._made.sizes[name] = {"nf": sum(end - begin for begin, end in ranges)}

    def _check_linear(self, name: str) -> None:
        module = self._modules[name]
        if (reason := why_not_linear(module)) is not None:
            raise self._refusal(name, reason)
        if type(module) is nn.Linear:
            self._made.linears.add(f"{name}.weight")

    def _refusal(self, name: str, reason: str) -> CannotSplitError:
        return CannotSplitError(
            f"{self._mesh.op}: {type(self._model).__name__} cannot be split: {name}: {reason}; "
            "use enable(model), with whole weights on every rank"
        )


def _mlp_of(module: nn.Module) -> tuple[tuple[str, ...], str] | None:
    """The linear layers of a module that is an MLP, or None."""
    children = {name for name, child in module.named_children() if child is not None}
    return next(((c, row) for c, row in _MLPS if {*c, row} <= children), None)


def _are_experts(module: nn.Module) -> bool:
    own = {name for name, x in module.named_parameters(recurse=False) if x.dim() == 3}
    return _EXPERTS[1] in own and any(name in own for name in _EXPERTS[0])
