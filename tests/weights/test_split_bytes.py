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


@by_world([4], [2])
@pytest.mark.parametrize("name", SHAPES)
def test_a_rank_keeps_its_share(name: str, world_size: int) -> None:
    """At most 3 % of the whole beside it, where the heads are split too."""
    model = _model(name)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    for rank in range(world_size):
        mesh = Mesh(None, 1)
        mesh.world_size = mesh.tensor_parallel_size = world_size
        mesh.rank = mesh.tensor_rank = rank
        cuts = plan(model, mesh).cuts
        kept = 0
        for parameter_name, parameter in model.named_parameters():
            shape = list(parameter.shape)
            if (cut := cuts.get(parameter_name)) is not None:
                shape[cut.dim] = cut.size
            kept += math.prod(shape) * parameter.itemsize
        assert kept <= (1 / world_size + 0.03) * whole
