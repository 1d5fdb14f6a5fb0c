# SPDX-License-Identifier: BSD-3-Clause
"""Queries of which each rank of a context group computes a part, before all gather them.

The mistakes these tests are for: parts in another order than the ranks', outputs that two ranks
compute, or none; a packed projection whose parts change places; ranks whose queries differ in a
bit; a projection that every rank has whole although it is large, or waits for although it is small.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import run_ranks

pytest.importorskip("transformers")

import hf_models
from hf_families import FAMILIES_TO_SPLIT, make_model
from tree_attention import hf, shares
from tree_attention.hf import CACHE_NAME
from tree_attention.shares import pays_to_gather
from tree_attention.weights.mesh import Mesh
from tree_attention.weights.plan import plan

# The projection of each way to cut queries: alone, out of latents, with gates, next to keys and
# values in blocks, by heads, in runs of heads; with a norm over all of them.
PROJECTIONS = {
    "CodeGen": "qkv_proj",
    "DeepSeek-V3": "q_b_proj",
    "GPT-2": "c_attn",
    "GPT-NeoX": "query_key_value",
    "Llama": "q_proj",
    "OLMo 2": "q_proj",
    "Phi-3": "qkv_proj",
    "Qwen3-Next": "q_proj",
}
IDS = torch.arange(3, 40)[None]


def _outputs(model: Any, projection: str) -> list[Tensor]:
    """What the projection gives in each layer that has it."""
    found: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, args, output: found.append(output))
        for name, module in model.named_modules()
        if name.endswith(f".{projection}")
    ]
    with torch.no_grad():
        model(IDS, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def _sizes(model: Any, projection: str) -> list[int]:
    return [x.numel() for n, x in model.named_parameters() if n.endswith(f".{projection}.weight")]


def _column(size: int, rank: int) -> Mesh:
    """One rank of a tensor group, as a plan takes it."""
    mesh = Mesh(None, 1)
    mesh.world_size = mesh.tensor_parallel_size = size
    mesh.rank = mesh.tensor_rank = rank
    return mesh


def _on_rank(
    rank: int, world_size: int, size: int, given: list[int] | None
) -> dict[str, tuple[list[Tensor], list[int]]]:
    found = {}
    for family, projection in PROJECTIONS.items():
        model = make_model(FAMILIES_TO_SPLIT[family])
        with mock.patch.object(shares, "LEAST_SAVED", 0):
            hf.parallelize(model, tensor_parallel_size=size, shares=given)
        found[family] = _outputs(model, projection), _sizes(model, projection)
    return found


@pytest.mark.deep
@pytest.mark.parametrize(
    "world_size, size, given",
    [(2, 1, None), (3, 1, [1, 2, 0]), (3, 1, None), (4, 2, None), (4, 2, [3, 3, 1, 1])],
)
def test_ranks_compute_parts_and_have_the_same_queries(
    world_size: int, size: int, given: list[int] | None
) -> None:
    ranks = run_ranks(_on_rank, world_size, size, given)
    for family, projection in PROJECTIONS.items():
        whole = make_model(FAMILIES_TO_SPLIT[family])
        expected, sizes = _outputs(whole, projection), _sizes(whole, projection)
        outputs, numels = zip(*(found[family] for found in ranks), strict=True)
        assert len(expected) == len(sizes) > 0
        for layer, total in enumerate(sizes):
            parts = [found[layer] for found in numels]
            assert sum(parts) == total  # each number on one rank
            for rank, share in enumerate(given or [1] * world_size):
                most = total * share / sum(given or [1] * world_size)
                granule = 16 * total // expected[layer].shape[-1]
                assert parts[rank] <= most + granule, (family, parts)
            for rank, found in enumerate(outputs):
                assert torch.equal(found[layer], outputs[rank % size][layer]), family
            with mock.patch.object(shares, "LEAST_SAVED", math.inf):
                uncut = plan(whole, _column(size, 0)), plan(whole, _column(size, size - 1))
            for made, rank in zip(uncut, (0, size - 1), strict=True):
                cuts = [cut for n, cut in made.cuts.items() if n.endswith(f".{projection}.weight")]
                own = torch.cat([expected[layer][..., a:b] for a, b in cuts[layer].ranges], dim=-1)
                torch.testing.assert_close(outputs[rank][layer], own, atol=1e-5, rtol=1e-5)


def test_from_which_size_on_they_are_gathered() -> None:
    """Projections of keys and values, and the weight out of latents, are whole at any size."""
    # Of Llama 3.1 8B and 70B.
    assert not pays_to_gather(4096 * 4096, 64)
    assert pays_to_gather(8192 * 8192, 2)
    assert pays_to_gather(2 * shares.LEAST_SAVED, 2)
    assert not pays_to_gather(2 * shares.LEAST_SAVED - 1, 2)
    assert not pays_to_gather(1 << 40, 1)
    model = make_model(FAMILIES_TO_SPLIT["DeepSeek-V3"])
    mesh = Mesh(None, 1)
    mesh.world_size = mesh.context_size = 2
    for least, gathered in ((0, ["q_b_proj"]), (shares.LEAST_SAVED, [])):
        with mock.patch.object(shares, "LEAST_SAVED", least):
            made = plan(model, mesh)
        for name, heads in made.heads.items():
            assert [*heads.gathered] == gathered
            whole = model.get_submodule(name).kv_b_proj.weight.shape[0]
            assert made.cuts[f"{name}.kv_b_proj.weight"].size == whole


def _compiled(rank: int, world_size: int) -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with mock.patch.object(shares, "LEAST_SAVED", 0):
        model = hf.enable(hf.parallelize(hf_models.make_model("llama", num_hidden_layers=1)))
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager", dynamic=True)
    caches = [hf.TreeCache(model.config, hf.mesh(model).context_group) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(IDS, **{CACHE_NAME: cache})
        for token in IDS[0, :12, None, None]:
            expected = model(token, **{CACHE_NAME: caches[0]}).logits
            logits = compiled(token, **{CACHE_NAME: caches[1]}).logits
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.deep
def test_they_are_gathered_in_a_compiled_graph() -> None:
    found = run_ranks(_compiled, 2)
    assert max(found) < 4, found
