# SPDX-License-Identifier: BSD-3-Clause
"""Models whose weights are split over ranks say what transformers says in one process.

The mistakes these tests are for: a slice of a weight that is off by a row, a bias added on every
rank, heads that meet other heads' keys, a token of another rank's vocabulary, ranks that part.
"""

from __future__ import annotations

import copy
import gc
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import on_ranks, run_ranks
from tiers import tiers

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, PhiConfig

from split_models import (
    GREEDY,
    PROMPT_LENGTH,
    VOCAB_SIZE,
    make_model,
    make_prompts,
)
from tree_attention import hf
from tree_attention.hf import CACHE_NAME

LOGITS = {"output_logits": True, "return_dict_in_generate": True}
SEED = 5

# (world size, tensor_parallel_size): context groups alone, tensor groups alone, and both.
MESHES = pytest.mark.parametrize("world_size, size", tiers([(2, 2)], [(3, 1), (4, 2)]))


def _forward(rank: int, world_size: int, size: int) -> Tensor:
    whole = make_model("gpt_oss")
    prompts = make_prompts(padded=False)
    expected_logits = whole(**prompts, use_cache=False).logits
    model = hf.parallelize(copy.deepcopy(whole), tensor_parallel_size=size)
    cache = hf.TreeCache(model.config, hf.mesh(model).context_group)
    logits = [
        model(**prompts, use_cache=False).logits,
        model(**prompts, **{CACHE_NAME: cache}).logits,
        model(**prompts).logits,  # with a cache of transformers' own
    ]
    for found in logits:
        assert found.shape[-1] == VOCAB_SIZE
        torch.testing.assert_close(found, expected_logits, atol=2e-3, rtol=1e-4)
    return torch.stack(logits)


@MESHES
def test_a_forward_pass_has_the_logits_of_all_positions_and_tokens(
    world_size: int, size: int
) -> None:
    first, *others = run_ranks(_forward, world_size, size)
    assert all(torch.equal(first, other) for other in others)


_LARGER = {"vocab_size": 4096, "hidden_size": 96}


def _parts(rank: int, world_size: int, size: int) -> dict[str, int]:
    model = make_model("llama", **_LARGER)
    whole = [weakref.ref(parameter) for parameter in model.parameters() if parameter.dim() > 1]
    hf.parallelize(model, tensor_parallel_size=size)
    gc.collect()
    assert all(parameter() is None for parameter in whole)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


@MESHES
def test_every_rank_has_its_part_alone(world_size: int, size: int) -> None:
    """Parts add up to the whole, those of q, k and v as often as there are context ranks."""
    whole = {
        name: x.numel()
        for name, x in make_model("llama", vocab_size=4096, hidden_size=96).named_parameters()
    }
    ranks = run_ranks(_parts, world_size, size)
    for name, count in whole.items():
        parts = [sizes[name] for sizes in ranks]
        if "norm" in name:
            assert parts == [count] * world_size
        elif any(kind in name for kind in ("q_proj", "k_proj", "v_proj")):
            assert sum(parts) == count * world_size // size
        else:
            extra = 96 * world_size if "embed_tokens" in name else 0  # the rows of zeros
            assert sum(parts) == count + extra
            assert max(parts) < 0.6 * count


def _some_ranks(rank: int, world_size: int, wanted: Tensor) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 0])]
    for size in (1, 2):
        # Rank 0 is in both groups, each with a model whose weights are split over it.
        for ranks, group in zip(([0, 1], [2, 0]), groups, strict=True):
            if rank in ranks:
                model = hf.parallelize(make_model("llama"), group=group, tensor_parallel_size=size)
                assert torch.equal(hf.enable(model).generate(**make_prompts(), **GREEDY), wanted)
    # Ranks have taken part in different numbers of groups, and yet meet in the next ones.
    model = hf.parallelize(make_model("llama"), tensor_parallel_size=2)
    assert torch.equal(hf.enable(model).generate(**make_prompts(), **GREEDY), wanted)
    everyone = dist.new_group(timeout=timedelta(seconds=10))
    dist.barrier(everyone)


@pytest.mark.deep
def test_groups_of_some_ranks() -> None:
    """The others take no part, and groups that are made afterwards are made."""
    run_ranks(_some_ranks, 4, make_model("llama").generate(**make_prompts(), **GREEDY))


@on_ranks(2)
def test_a_tied_head_with_a_bias(rank: int, world_size: int) -> None:
    """The row of zeros of an embedding that is the head's weight needs a bias, too."""
    config = PhiConfig(
        **{"hidden_size": 48, "intermediate_size": 104, "num_hidden_layers": 1},
        **{"num_attention_heads": 6, "vocab_size": VOCAB_SIZE, "tie_word_embeddings": True},
    )
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.lm_head.bias.data.normal_()
    prompts = make_prompts(padded=False)
    expected_logits = model(**prompts).logits
    found = hf.parallelize(model)(**prompts).logits
    torch.testing.assert_close(found, expected_logits, atol=1e-4, rtol=1e-4)


@on_ranks(1)
def test_a_world_of_one(rank: int, world_size: int) -> None:
    """It has no groups, also under torch.distributed, and runs outside of no_grad as others do."""
    model = hf.parallelize(make_model("llama"))
    mesh = hf.mesh(model)
    assert (mesh.group, mesh.tensor_group, mesh.context_group) == (None, None, None)
    assert mesh.tensor_parallel_size == 1
    assert torch.is_grad_enabled()
    tokens = model(**make_prompts(), use_cache=False).logits.argmax(-1)
    assert tokens.shape == (3, PROMPT_LENGTH)
    assert len(model.state_dict()) > 0


def _half(rank: int, world_size: int, path: str, dtypes: dict[str, torch.dtype]) -> None:
    model = hf.from_pretrained(path, dtype=torch.float16)
    assert all(x.dtype == dtypes[name] for name, x in model.named_parameters())
    logits = model.generate(**make_prompts(), **GREEDY, **LOGITS).logits
    assert all(x.isfinite().all() for x in logits)


def test_weights_that_stay_in_float32(tmp_path: Path) -> None:
    """The norms of GPT-OSS do in transformers when the other weights are float16."""
    make_model("gpt_oss").save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    dtypes = {name: x.dtype for name, x in whole.named_parameters()}
    assert set(dtypes.values()) == {torch.float16, torch.float32}
    run_ranks(_half, 2, str(tmp_path), dtypes)
