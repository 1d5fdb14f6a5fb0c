# SPDX-License-Identifier: BSD-3-Clause
"""Refuses models that are not transformers', cannot generate text, or that others have split."""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationMixin, PreTrainedModel

from .mesh import Mesh
from .split import mesh_of


def check_model(op: str, model: Any) -> Mesh | None:
    """Raises TypeError or ValueError unless `op` is given a model that can generate text.

    Returns:
        The groups that share its weights where they are split by this package, or None.
    """
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise TypeError(
            f"{op}: model is wrapped by torch.compile; {op} the model itself, and then compile "
            "its forward: model.forward = torch.compile(model.forward)"
        )
    if not isinstance(model, PreTrainedModel):
        inner = None
        if isinstance(model, nn.Module):
            inner = next((x for x in model.modules() if isinstance(x, PreTrainedModel)), None)
        way = ""
        if hasattr(model, "merge_and_unload"):
            way = f"; {op} what model.merge_and_unload() returns, with the adapters merged"
        elif inner is not None:
            way = f" around a {type(inner).__name__}; {op} that one, if its weights are whole, or "
            way += "load it with tree_attention.hf.from_pretrained(path, tensor_parallel_size=...)"
        raise TypeError(f"{op}: model must be a PreTrainedModel of transformers, got {name}{way}")
    if not isinstance(model, GenerationMixin):
        raise ValueError(
            f"{op}: {name} has no generate; {op} the model with the language head, whose class "
            "ends in ForCausalLM"
        )
    _check_whole(op, model)
    return mesh_of(model)


def _check_whole(op: str, model: PreTrainedModel) -> None:
    """Refuses weights that somebody else has split or moved away."""
    split = None
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            ranks = f"{parameter.device_mesh.size()} ranks"
            split = f"{name} is a DTensor over {ranks}, as tp_plan and FSDP make them"
        elif hasattr(parameter, "ds_id"):
            split = f"{name} belongs to DeepSpeed's ZeRO-3"
        elif parameter.is_meta and op == "parallelize":
            split = f"{name} is on the meta device, as where device_map offloads it"
        if split is not None:
            break
    devices = {x for x in getattr(model, "hf_device_map", {}).values() if x not in ("cpu", "disk")}
    if split is None and len(devices) > 1:
        split = f"device_map spread its layers over {', '.join(sorted(map(str, devices)))}"
    if split is None and (getattr(model, "_tp_size", None) or 1) > 1:
        split = f"tp_plan of transformers split them over {model._tp_size} ranks"
    if split is not None:
        raise ValueError(
            f"{op}: the weights of this {type(model).__name__} are split already: {split}; load "
            "the model with tree_attention.hf.from_pretrained(path, tensor_parallel_size=...), "
            "which splits them and the cache over the ranks, or whole"
        )
