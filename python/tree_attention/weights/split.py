# SPDX-License-Identifier: BSD-3-Clause
"""Cutting the weights of a model, and the exchanges that its modules then need."""

import functools
import logging
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .heads import eps_of
from .mesh import Mesh
from .parts import part_of
from .plan import WeightPlan, whole_parts
from .text import text_config

# Attributes of a split model; its attention modules have the first.
_MESH, _PLAN, _DIGEST = "_tree_attention_mesh", "_tree_attention_plan", "_tree_attention_digest"
# An attribute of attention modules that compute with all heads of their tensor group to the end.
_KEEPS_ALL = "_tree_attention_keeps_all_heads"
# A buffer of its embedding.
_ROWS = "rows_of_tokens"
# The user is told of weights that are not cut from this share of a rank's on.
_MUCH = 0.1


def split(model: PreTrainedModel, mesh: Mesh, made: WeightPlan) -> None:
    """Replaces the parameters of `model` by this rank's parts of them.

    Linear layers whose inputs are split then add up their outputs over the ranks, the embedding
    adds up what one rank found, queries and logits are gathered, and attention goes on with this
    rank's heads.
    """
    embedding: Any = model.get_submodule(made.embedding)
    head: Any = model.get_submodule(made.head)
    is_tied = head.weight is embedding.weight
    whole_sizes = {name: model.get_parameter(f"{name}.weight").numel() for name in made.norms}
    for name, cut in made.cuts.items():
        if not (is_tied and name == f"{made.head}.weight"):
            whole = model.get_parameter(name)
            part = part_of(whole.detach(), cut, whole.dtype, whole.device)
            set_tensor(model, name, nn.Parameter(part))
    if is_tied:
        head.weight = embedding.weight

    for name in made.summed:
        module: Any = model.get_submodule(name)
        module.register_forward_hook(functools.partial(_add_up, mesh))
        if isinstance(module, Conv1D) and module.weight.shape[0] == 0:
            vars(module)["forward"] = MethodType(_of_no_inputs, module)
    for name, copies in made.norms.items():
        norm, size = model.get_submodule(name), whole_sizes[name]
        norm.register_forward_hook(functools.partial(_norm_over_ranks, mesh, size, copies))
    for name, attributes in made.sizes.items():
        for attribute, value in attributes.items():
            setattr(model.get_submodule(name), attribute, value)
    for name in made.silent:
        model.get_submodule(name).register_forward_hook(_silence)
    parts = mesh.slices(embedding.num_embeddings)
    begin, end = parts[mesh.rank]
    # The row of each token in this rank's part; tokens of other ranks take a row of zeros.
    rows = torch.full((embedding.num_embeddings,), end - begin, device="cpu")
    rows[begin:end] = torch.arange(end - begin, device="cpu")
    if not embedding.weight.is_meta:  # else from_pretrained fills the model and moves all of it
        rows = rows.to(embedding.weight.device)
    embedding.register_buffer(_ROWS, rows, persistent=False)
    embedding.padding_idx = None  # which matters to gradients alone, and may be another rank's
    embedding.register_forward_pre_hook(_own_tokens)
    embedding.register_forward_hook(functools.partial(_add_up, mesh))
    counts = tuple(end - begin for begin, end in parts)
    head.register_forward_hook(functools.partial(_gather_logits, mesh, counts))
    if any(heads.gathered for heads in made.heads.values()):
        mesh.connect_for_queries()
    for name, heads in made.heads.items():
        attention: Any = model.get_submodule(name)
        vars(attention)[_MESH] = mesh
        for child, counts in heads.gathered.items():
            gather = functools.partial(_gather_queries, mesh, counts)
            attention.get_submodule(child).register_forward_hook(gather)
        if heads.own_columns is not None:
            vars(attention)[_KEEPS_ALL] = True
            own = functools.partial(_own_columns, *heads.own_columns)
            attention.get_submodule(heads.output).register_forward_pre_hook(own)


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Gives `model` another parameter or buffer of this name, maybe of another shape."""
    module, _, own = name.rpartition(".")
    setattr(model.get_submodule(module), own, tensor)


def attach(
    model: PreTrainedModel,
    mesh: Mesh,
    made: WeightPlan | None,
    digest: str,
    *,
    is_quantised: bool = False,
) -> None:
    """Notes on `model` how it is split, refuses what then cannot work, and warns of large weights
    that are not cut."""
    vars(model).update({_MESH: mesh, _PLAN: made, _DIGEST: digest})
    model.requires_grad_(False)
    refusals = dict.fromkeys(_OF_FLOATS, _refuse_quantised) if is_quantised else {}
    if mesh.world_size > 1:
        refusals |= dict.fromkeys(_OF_WHOLE, _refuse)
    for module in model.modules():  # the model without its head can be asked, too
        if isinstance(module, PreTrainedModel):
            for name, refuse in refusals.items():
                vars(module)[name] = MethodType(functools.partial(refuse, name), module)
    if mesh.world_size > 1:
        vars(model)["train"] = MethodType(_train, model)
    if made is not None:
        for parameter in made.cuts:  # also where a part of the model is asked alone
            module = model.get_submodule(parameter.rpartition(".")[0])
            module.register_state_dict_pre_hook(functools.partial(_refuse, "state_dict"))
            module.register_load_state_dict_pre_hook(functools.partial(_refuse, "load_state_dict"))
    if mesh.context_size > 1:
        model.register_forward_pre_hook(_check_attention)
    whole, names = whole_parts(model.named_parameters(), split_tensors(model)[0])
    held = sum(parameter.nbytes for parameter in model.parameters())
    if made is not None and mesh.rank == 0 and whole > _MUCH * held:
        logging.getLogger("tree_attention").warning(
            f"{mesh.op}: {whole / held:.0%} of this rank's {held / 1e6:,.1f} MB of weights are not "
            f"cut, and are the same on every rank: {names}"
        )


def mesh_of(module: nn.Module) -> Mesh | None:
    """The mesh that a split model, or one of its attention modules, belongs to."""
    return vars(module).get(_MESH)


def own_heads(module: nn.Module, num_heads_q: int) -> tuple[int, int] | None:
    """Query heads that this rank keeps after attention; None: all."""
    found = mesh_of(module)
    if found is None or found.context_size == 1 or _KEEPS_ALL in vars(module):
        return None
    return found.own_heads(num_heads_q)


def mesh(model: PreTrainedModel) -> Mesh:
    """The groups that share a split model.

    Returns:
        An object with the attributes `group`, `tensor_group` and `context_group`, process groups or
        in a world of one None, and `tensor_parallel_size`. A `TreeCache` made by hand is one over
        the `context_group`.

    Raises:
        ValueError: the model is not split.

    For example::

        from transformers import AutoModelForCausalLM
        from tree_attention import hf

        model = hf.parallelize(AutoModelForCausalLM.from_pretrained("examples/passkey-llama"))
        print(hf.mesh(model).tensor_parallel_size)  # 1
    """
    found = mesh_of(model)
    if found is None:
        raise ValueError(
            f"mesh: {type(model).__name__} is not split; load it with tree_attention.hf."
            "from_pretrained, or call tree_attention.hf.parallelize(model)"
        )
    return found


def split_tensors(model: nn.Module) -> tuple[frozenset[str], str]:
    """The names of the parameters and buffers that differ from rank to rank, and the digest of the
    whole parameters."""
    made: WeightPlan | None = vars(model).get(_PLAN)
    if made is None:
        return frozenset(), ""
    # Quantised weights and experts have scales, which are cut like them.
    scales = [f"{x.removesuffix('weight')}scale" for x in made.linears]
    scales += [f"{x}_scale" for x in made.experts]
    return frozenset((*made.cuts, *scales, f"{made.embedding}.{_ROWS}")), vars(model)[_DIGEST]


def _add_up(mesh: Mesh, module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):  # of a block of experts, with the logits of its router (Llama 4)
        return _add_up(mesh, module, args, output[0]), *output[1:]
    return mesh.sums.all_reduce(output, timeout=mesh.timeout)


def _of_no_inputs(self: Any, x: Tensor) -> Tensor:
    """Computes `Conv1D` of inputs without columns too, whose view in `Conv1D` has no size."""
    result: Tensor = x @ self.weight + self.bias
    return result


def _norm_over_ranks(
    mesh: Mesh, size: int, copies: int, module: nn.Module, args: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    """Normalises by the mean of squares of all `size` features instead of this rank's; `copies`
    ranks hold each feature."""
    eps = eps_of(module) or 0.0
    squares = args[0].float().square().sum(dim=-1, keepdim=True)
    mean = mesh.sums.all_reduce(squares, timeout=mesh.timeout) / (copies * size)
    own = squares / args[0].shape[-1]
    return (output.float() * ((own + eps) / (mean + eps)).sqrt()).to(output.dtype)


def _gather_queries(
    mesh: Mesh, counts: tuple[int, ...], module: nn.Module, args: Any, output: Tensor
) -> Tensor:
    assert mesh.queries is not None  # as some are gathered
    return mesh.queries.all_gather(output, counts, timeout=mesh.timeout)


def _own_columns(begin: int, end: int, module: nn.Module, args: tuple[Tensor, ...]) -> Any:
    return args[0][..., begin:end], *args[1:]


def _silence(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return torch.zeros_like(output)


def _own_tokens(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    ids, *others = args
    # index_select refuses ids beyond the vocabulary, as the embedding would.
    rows = getattr(module, _ROWS).index_select(0, ids.flatten()).view(ids.shape)
    return rows, *others


def _gather_logits(
    mesh: Mesh, counts: tuple[int, ...], module: nn.Module, args: Any, output: Tensor
) -> Tensor:
    own = output[..., : counts[mesh.rank]]  # a weight that is the embedding's has one row more
    return mesh.logits.all_gather(own, counts, timeout=mesh.timeout)


# Methods that need unsplit weights, and methods that need weights of floating point.
_OF_WHOLE = ("save_pretrained", "resize_token_embeddings")
_OF_FLOATS = ("save_pretrained", "set_experts_implementation")


def _refuse(name: str, model: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        f"{name}: each rank has only its part of the weights of this {type(model).__name__}, which "
        "was split by tree_attention.hf; use a model that was loaded with transformers alone"
    )


def _refuse_quantised(name: str, model: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        f"{name}: the weights of this {type(model).__name__} were quantised by from_pretrained, "
        "for products of tree_attention.hf alone; use a model that was loaded without weights="
    )


def _check_attention(model: PreTrainedModel, args: Any) -> None:
    implementation = text_config(model.config)._attn_implementation
    if implementation != "tree_attention":
        raise ValueError(
            f"attention {implementation!r} does not merge the ranks' results, which this "
            f"{type(model).__name__} needs, as its weights are split; call "
            "model.set_attn_implementation('tree_attention')"
        )


def _train(self: nn.Module, mode: bool = True) -> nn.Module:
    if mode:
        _refuse("train", self)
    return type(self).train(self, mode)
