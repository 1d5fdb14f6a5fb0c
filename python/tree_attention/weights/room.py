# SPDX-License-Identifier: BSD-3-Clause
"""Weights that find no memory are refused on every rank, before one of them allocates any."""

import platform
from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from .._memory import free_bytes, in_words, pool_name, shared_bytes
from ..exchange import Note, ranks_text
from .mesh import Mesh
from .plan import WeightPlan

# What is free is the system's estimate, and it may find somewhat more.
_MARGIN = 1.05


def note_of_room(
    model: PreTrainedModel, made: WeightPlan, weights: str | None, device: torch.device
) -> Note:
    """The bytes that this rank's parts of a model on the meta device need at least, and those that
    are free."""
    few = set() if weights is None else made.linears | made.experts
    bits = 8 if weights == "int8" else 4
    sizes = (x.numel() * bits // 8 if n in few else x.nbytes for n, x in model.named_parameters())
    note: Note = {"bytes": sum(sizes), "free": free_bytes(device)}
    note |= {"device": str(device), "host": platform.node()}
    if device.type == "cpu" and (pool := pool_name()) is not None:
        note |= {"pool": pool, "shared": shared_bytes()}
    return note


def check_room(
    mesh: Mesh,
    notes: Sequence[Note],
    model: PreTrainedModel,
    weights: str | None,
    device: torch.device,
) -> None:
    """Raises torch.OutOfMemoryError, the same on every rank, where the parts of one rank, or of
    those that share the memory of a host, certainly do not fit."""
    pools: dict[str, list[int]] = defaultdict(list)
    for rank, note in enumerate(notes):
        if "pool" in note:
            pools[note["pool"]].append(rank)
    sets = [([rank], "free") for rank in range(mesh.world_size)]
    sets += [(ranks, "shared") for ranks in pools.values()]
    for ranks, kind in sets:
        num_bytes = sum(notes[rank]["bytes"] for rank in ranks)
        free = max((x for rank in ranks if (x := notes[rank][kind]) is not None), default=None)
        if free is not None and num_bytes > _MARGIN * free:
            place = notes[ranks[0]]["device"]
            hosts = [note["host"] for note in notes] if len(pools) > 1 else []
            where = f" on {ranks_text(ranks, hosts)}" if mesh.world_size > 1 else ""
            raise torch.OutOfMemoryError(
                f"from_pretrained: the weights of {type(model).__name__} need "
                f"{in_words(num_bytes)} of {place}{where}, and {in_words(free)} are free; "
                f"{_fewer_bits(model, weights, device)}split them over ranks on more hosts, or "
                f"take a {'host' if device.type == 'cpu' else 'GPU'} with more memory"
            )


def _fewer_bits(model: PreTrainedModel, weights: str | None, device: torch.device) -> str:
    """The arguments with which the weights take less memory."""
    names = ["dtype='bfloat16'"] if model.dtype == torch.float32 else []
    if device.type == "cpu" and weights != "int4":
        names += ["weights='int4'"] if weights == "int8" else ["weights='int8'", "weights='int4'"]
    if not names:
        return ""
    options = {"dtype": "--dtype", "weights": "--weight-dtype"}
    named = dict.fromkeys(options[name.partition("=")[0]] for name in names)
    ways = f"{' or '.join(names)}; on the command line {' or '.join(named)}"
    return f"take fewer bits ({ways}), "
