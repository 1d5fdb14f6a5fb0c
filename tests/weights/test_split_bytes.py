# SPDX-License-Identifier: BSD-3-Clause
"""Bytes of weights that a rank keeps of models in their published sizes, by the plan of loading."""

import math
from typing import Any

import pytest
import torch

from tiers import by_world

pytest.importorskip("transformers")

import transformers
from transformers import AutoModelForCausalLM

from benchmarks.harness.published_shapes import SHAPES
from tree_attention.shares import ModelShares
from tree_attention.weights.mesh import Mesh
from tree_attention.weights.plan import plan


def _model(name: str) -> Any:
    """The model with all of its layers and no numbers."""
    shape = SHAPES[name]
    fields = {**shape.fields, "num_hidden_layers": shape.published_layers}
    fields.pop("layer_types", None)
    with torch.device("meta"):
        config = getattr(transformers, shape.config)(**fields)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _split_bytes(model: Any, mesh: Mesh) -> tuple[int, int, int]:
    """Bytes of the parameters that are not split, of those that are, and what `mesh.rank` keeps
    of the latter."""
    cuts = plan(model, mesh).cuts
    whole = split = kept = 0
    for name, parameter in model.named_parameters():
        cut = cuts.get(name)
        if cut is None or cut.size == parameter.shape[cut.dim]:  # the latter: of one tensor group
            whole += parameter.nbytes
            continue
        shape = list(parameter.shape)
        shape[cut.dim] = cut.size
        split += parameter.nbytes
        kept += math.prod(shape) * parameter.itemsize
    return whole, split, kept


@pytest.mark.deep
@pytest.mark.parametrize("name", SHAPES)
def test_a_rank_keeps_what_shares_say(name: str) -> None:
    model = _model(name)
    for rank, share in enumerate((0.75, 0.25)):
        mesh = Mesh(None, 1)
        mesh.world_size = mesh.context_size = 2
        mesh.rank = mesh.context_rank = rank
        mesh.take(ModelShares(weights=(3, 1)))
        _, split, kept = _split_bytes(model, mesh)
        assert kept == pytest.approx(share * split, rel=0.05)


@by_world([4], [2])
@pytest.mark.parametrize("name", SHAPES)
def test_a_rank_keeps_its_share(name: str, world_size: int) -> None:
    """At most 3 % of the whole beside it, where the heads are split too."""
    model = _model(name)
    for rank in range(world_size):
        mesh = Mesh(None, 1)
        mesh.world_size = mesh.tensor_parallel_size = world_size
        mesh.rank = mesh.tensor_rank = rank
        whole, split, kept = _split_bytes(model, mesh)
        assert whole + kept <= (1 / world_size + 0.03) * (whole + split)
