# SPDX-License-Identifier: BSD-3-Clause
"""Attention modules cut by heads, in each form that their projections have.

A rank gets the heads of keys and values of its tensor group, and all query heads that attend to
these; of their results, it goes on with those that its place in the context group gives it. Ranks
of a context group need the same queries: where their projection is large, each computes some of its
outputs, whatever heads these are of, and all gather them before anything else is done with them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..shares import pays_to_gather
from .mesh import Mesh
from .parts import Cut, Range

_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")
LATENT = "kv_b_proj"
# Projections into latents that all heads share, and norms of these.
_SHARED = ("q_a_proj", "kv_a_proj_with_mqa")
_SHARED_NORMS = ("q_a_layernorm", "kv_a_layernorm", "k_rope_only_layernorm")
# What chooses the keys of each query, for all heads, and stays whole.
_INDEXER = "indexer"
# Queries of each head next to a gate of its output (A.X K2).
_QUERIES_AND_GATES = "q_gate_proj"
# A module with scales of the queries of each head (Mistral Large 4).
_SCALES = "softmax_scaling"
# A parameter with one score for each query head (GPT-OSS).
_SINKS = "sinks"
# Attributes by which modules cut their activations into heads.
_SIZES_OF_QUERIES = ("num_heads", "num_attention_heads")
_SIZES_OF_KEYS = ("num_key_value_heads", "kv_heads")
_WIDTHS_OF_QUERIES, _WIDTH_OF_KEYS = ("split_size", "embed_dim"), "kv_dim"
# The number of runs of heads in a packed projection, each with its queries, values and keys
# (CodeGen).
_RUNS = "mp_num"


@dataclass(frozen=True)
class HeadSplit:
    """The cut of one attention module, by names of its parameters, children and attributes."""

    projections: Mapping[str, tuple[Range, ...]]  # into heads, and the outputs that are kept
    # Projections whose outputs are gathered, and how many of these each rank of the context group
    # computes.
    gathered: Mapping[str, tuple[int, ...]]
    output: str
    shared: tuple[str, ...]  # projections that stay whole
    cuts: Mapping[str, Cut]  # of all other parameters
    # The columns of the output's input that are this rank's, if the module computes with all heads
    # of the tensor group after attention, too; None if attention gives this rank's alone.
    own_columns: Range | None
    norms: tuple[str, ...]  # over the features of all heads, which are cut
    sizes: Mapping[str, Any]  # attributes that are other than in the whole module


class ConfigOfHeads:
    """A configuration with other numbers of heads, for modules that take these from it."""

    def __init__(self, config: Any, **own: int) -> None:
        vars(self).update(own, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # while it is copied
            raise AttributeError(name)
        return getattr(self._config, name)


def is_attention(module: nn.Module) -> bool:
    """True for modules that call an attention function, which layers with a state do not."""
    return hasattr(module, "is_causal") and _output_of(module) is not None


def _output_of(module: nn.Module) -> str | None:
    return next((name for name in _OUTPUTS if _child(module, name) is not None), None)


def axes_of(linear: nn.Module) -> tuple[int, int]:
    """The axes of a linear layer's weight that are its outputs and its inputs."""
    return (1, 0) if isinstance(linear, Conv1D) else (0, 1)


@dataclass(frozen=True)
class _Block:
    """Consecutive outputs of a projection: `size` outputs for each query head, or each KV head."""

    is_query: bool
    begin: int
    size: int


class HeadPlanner:
    """Splits one attention module; ValueError if `tensor_parallel_size` does not divide its heads,
    `refusal(child, reason)` if a parameter or a projection of it cannot be cut by heads."""

    def __init__(
        self, attention: Any, mesh: Mesh, model_name: str, refusal: Callable[[str, str], Exception]
    ) -> None:
        self._module, self._mesh, self._refusal = attention, mesh, refusal
        self._output = _output_of(attention) or ""
        self._is_latent = isinstance(getattr(attention, LATENT, None), nn.Module)
        output = self._linear(self._output)
        features = output.weight.shape[axes_of(output)[1]]
        name = "head_dim" if hasattr(attention, "head_dim") else "head_size"
        self._head_dim = attention.v_head_dim if self._is_latent else getattr(attention, name)
        if features % self._head_dim:
            reason = f"its {features} inputs are no multiple of head_dim {self._head_dim}"
            raise refusal(self._output, reason)
        self._num_heads_q = features // self._head_dim
        self._num_heads_kv = self._num_heads_q
        self._blocks = dict(self._find_blocks())
        self._cuts: dict[str, Cut] = {}
        size = mesh.tensor_parallel_size
        kind = "query heads" if self._is_latent else "heads of keys and values"
        runs = getattr(attention, _RUNS, size)
        for number, what in ((self._num_heads_kv, kind), (runs, "runs of heads")):
            if number % size:
                raise ValueError(
                    f"{mesh.op}: tensor_parallel_size must divide the {number} {what} of "
                    f"{model_name}, got {size}"
                )
        # All ranks of a context group have the same heads of keys and values.
        count = self._num_heads_kv // size
        self._kv = mesh.tensor_rank * count, (mesh.tensor_rank + 1) * count
        # The query heads that attend to these.
        first, last = (head * self._num_heads_q // self._num_heads_kv for head in self._kv)
        self._q = first, last

    def _find_blocks(self) -> Iterator[tuple[str, list[_Block]]]:
        """The projections whose outputs are heads, and finds the number of heads of keys."""
        module, head_dim, heads = self._module, self._head_dim, self._num_heads_q
        width = heads * head_dim
        if self._is_latent:
            of_latents = (x for x in ("q_b_proj", _QUERIES_AND_GATES) if _child(module, x))
            for name in (next(of_latents, "q_proj"), LATENT):
                yield name, [_Block(True, 0, self._outputs(name) // heads)]
        elif _child(module, "q_proj"):
            outputs = self._outputs("k_proj")
            if _child(module, "v_proj") and (found := self._outputs("v_proj")) != outputs:
                reason = f"it has {found} outputs, and k_proj {outputs}: values of another width"
                raise self._refusal("v_proj", reason)
            self._num_heads_kv = outputs // head_dim
            yield "q_proj", [_Block(True, 0, self._outputs("q_proj") // heads)]
            for name in ("k_proj", "v_proj"):
                if _child(module, name):  # values may be the keys (Gemma 4)
                    yield name, [_Block(False, 0, head_dim)]
        elif (packed := self._packed_by_heads()) is not None:
            if (outputs := self._outputs(packed)) != 3 * width:
                raise self._refusal(packed, f"it has {outputs} outputs, not {3 * width}")
            yield packed, [_Block(True, 0, 3 * head_dim)]
        else:
            names = [x for x in ("qkv_proj", "c_attn") if _child(module, x)]
            if not names:
                raise self._refusal("", "none of its projections is known")
            both = self._outputs(names[0]) - width
            self._num_heads_kv = both // (2 * head_dim)
            keys = [_Block(False, begin, head_dim) for begin in (width, width + both // 2)]
            yield names[0], [_Block(True, 0, head_dim), *keys]

    def _packed_by_heads(self) -> str | None:
        """The projection, if any, in which the outputs of each head lie next to each other."""
        module = self._module
        if _child(module, "query_key_value"):
            return "query_key_value"
        if getattr(module, "multi_query", True) is False:
            return "c_attn"
        return "qkv_proj" if hasattr(module, _RUNS) else None

    def _linear(self, name: str) -> Any:
        linear = _child(self._module, name)
        reason = "it is not there" if linear is None else why_not_linear(linear)
        if reason is not None:
            raise self._refusal(name, reason)
        return linear

    def _outputs(self, name: str) -> int:
        linear = self._linear(name)
        size: int = linear.weight.shape[axes_of(linear)[0]]
        return size

    def split(self) -> HeadSplit:
        module, head_dim = self._module, self._head_dim
        first, last = self._q
        begin, end = self._mesh.own_heads(last - first)
        own = first + begin, first + end
        axis = axes_of(getattr(module, self._output))[1]
        self._cuts[f"{self._output}.weight"] = Cut(axis, (_times(head_dim, own),))
        known = {*self._blocks, self._output, _INDEXER, _SCALES}
        if (scales := _child(module, _SCALES)) is not None:
            names = [name for name, _ in scales.named_parameters()]
            self._cuts |= {f"{_SCALES}.{name}": Cut(0, (self._q,)) for name in names}
        if self._is_latent:
            known |= {*_SHARED, *_SHARED_NORMS}
        others = {name: x for name, x in module.named_children() if name not in known}
        sizes = (1, head_dim)  # one for each head's output (LFM3), or for each column (HunYuan 4)
        gates = {
            name: x.out_features // self._num_heads_q
            for name, x in others.items()
            if type(x) is nn.Linear and x.out_features in [n * self._num_heads_q for n in sizes]
        }
        follows, norms = self._cut_norms({x: others[x] for x in others if x not in gates})
        # After attention it may compute with all heads: a gate of each comes out of the queries'
        # projection (Qwen3-Next), or a norm follows (BitNet).
        queries = () if self._is_latent else self._blocks.get("q_proj", ())
        needs_all = follows or any(block.size == 2 * head_dim for block in queries)
        needs_all |= _QUERIES_AND_GATES in self._blocks
        # Entries of each query head kept after attention.
        of_heads = {_SINKS: 1} if getattr(module, _SINKS, None) is not None else {}
        for name, size in gates.items():
            of_heads |= {f"{name}.{x}": size for x, _ in others[name].named_parameters()}
        for name, size in of_heads.items():
            self._cuts[name] = Cut(0, (_times(size, self._q if needs_all else own),))
        for name, _ in module.named_parameters(recurse=False):
            if name not in self._cuts:
                raise self._refusal(name, "no such parameter of attention is known")
        projections = {name: self._ranges(blocks) for name, blocks in self._blocks.items()}
        gathered = {}
        for name in projections:
            if (parts := self._shared_out(name, projections[name])) is not None:
                gathered[name] = tuple(end - begin for begin, end in parts)
                projections[name] = _within(projections[name], parts[self._mesh.context_rank])
        return HeadSplit(
            projections=projections,
            gathered=gathered,
            output=self._output,
            shared=tuple(x for x in _SHARED if self._is_latent and _child(module, x) is not None),
            cuts=self._cuts,
            own_columns=_times(head_dim, (begin, end)) if needs_all else None,
            norms=tuple(norms) if self._mesh.tensor_parallel_size > 1 else (),
            sizes=self._sizes(),
        )

    def _ranges(self, blocks: Iterable[_Block]) -> tuple[Range, ...]:
        """The outputs of a projection that are this rank's."""
        heads = {True: self._q, False: self._kv}
        parts = ((x.begin, _times(x.size, heads[x.is_query])) for x in blocks)
        return tuple((first + begin, first + end) for first, (begin, end) in parts)

    def _shared_out(self, name: str, ranges: Sequence[Range]) -> list[Range] | None:
        """The parts of a tensor group's outputs that ranks of a context group compute; None: each
        computes all."""
        # The weight out of latents is multiplied with queries and with results, in place of inputs.
        if name == LATENT or not any(block.is_query for block in self._blocks[name]):
            return None
        linear = self._linear(name)
        outputs = sum(end - begin for begin, end in ranges)
        numbers = outputs * linear.weight.shape[axes_of(linear)[1]]
        if not pays_to_gather(numbers, self._mesh.context_size):
            return None
        return self._mesh.context_slices(outputs)

    def _cut_norms(self, norms: Mapping[str, nn.Module]) -> tuple[bool, list[str]]:
        """Cuts all norms but those that are the same for every head. Returns whether one of them
        follows attention, and the names of the norms over the features of all heads."""
        is_any_after, over_heads = False, []
        for child, module in norms.items():
            is_after, of_keys = not child.startswith(("q", "k")), child.startswith("k")
            count = self._num_heads_kv if of_keys else self._num_heads_q
            begin, end = self._kv if of_keys else self._q
            for own, parameter in module.named_parameters():
                path, shape = f"{child}.{own}", tuple(parameter.shape)
                if shape == (self._head_dim,) and "." not in own:  # else each head has a module
                    continue
                if shape == (count, self._head_dim):  # of each head its own (Cohere)
                    self._cuts[path] = Cut(0, ((begin, end),))
                elif shape == (count * self._head_dim,) and is_rms_norm(module):
                    self._cuts[path] = Cut(0, (_times(self._head_dim, (begin, end)),))
                    over_heads.append(child)
                elif self._mesh.tensor_parallel_size > 1 or is_after:
                    found = f"{list(shape)} of {type(module).__name__}"
                    reason = f"it is no norm of [{self._head_dim}] for all heads, but {found}"
                    raise self._refusal(path, reason)
                else:
                    continue
                is_any_after |= is_after
        return is_any_after, over_heads

    def _sizes(self) -> dict[str, Any]:
        """The attributes by which the module cuts its activations, where they change."""
        module, head_dim = self._module, self._head_dim
        num_q, num_kv = self._q[1] - self._q[0], self._kv[1] - self._kv[0]
        width = self._num_heads_q * head_dim
        found: dict[str, Any] = {}
        for names, whole, part in (
            (_SIZES_OF_QUERIES, self._num_heads_q, num_q),
            (_SIZES_OF_KEYS, self._num_heads_kv, num_kv),
            (_WIDTHS_OF_QUERIES, width, num_q * head_dim),
            ((_WIDTH_OF_KEYS,), self._num_heads_kv * head_dim, num_kv * head_dim),
        ):
            found |= dict.fromkeys((x for x in names if getattr(module, x, None) == whole), part)
        if num_q < self._num_heads_q and "qkv_proj" in self._blocks:
            own = {"num_attention_heads": num_q, "num_key_value_heads": num_kv}
            found["config"] = ConfigOfHeads(module.config, **own)
        if hasattr(module, _RUNS):
            found[_RUNS] = getattr(module, _RUNS) // self._mesh.tensor_parallel_size
        return found


def _times(size: int, heads: Range) -> Range:
    """The entries of a run of heads with so many each."""
    return size * heads[0], size * heads[1]


def _within(ranges: Iterable[Range], part: Range) -> tuple[Range, ...]:
    """The ranges of an axis that make `part` of some ranges joined."""
    found, first = [], 0  # of the range at hand, among all
    for begin, end in ranges:
        low, high = (min(max(x - first, 0), end - begin) for x in part)
        if low < high:
            found.append((begin + low, begin + high))
        first += end - begin
    return tuple(found)


def is_rms_norm(module: nn.Module) -> bool:
    """True for a norm whose only statistic is the mean of squares."""
    names = [name for name, _ in module.named_parameters()]
    return "RMSNorm" in type(module).__name__ and names == ["weight"] and eps_of(module) is not None


def eps_of(norm: nn.Module) -> float | None:
    """The number that a norm adds to the mean of squares."""
    found: float | None = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return found


def why_not_linear(module: nn.Module) -> str | None:
    """The reason why a module is no linear layer that can be cut, or None."""
    kind = type(module)
    if kind not in (nn.Linear, Conv1D):
        found = f"it is no torch.nn.Linear, but {kind.__module__}.{kind.__qualname__}"
        if hasattr(module, "base_layer"):
            found += "; merge the adapter into the weights first, with merge_and_unload"
        return found
    if hasattr(module.weight, "__tensor_flatten__"):
        return f"its weight is quantised: {type(module.weight).__name__}"
    return None


def _child(module: nn.Module, name: str) -> Any:
    """A child that the module has, or None."""
    found = getattr(module, name, None)
    return found if isinstance(found, nn.Module) else None
