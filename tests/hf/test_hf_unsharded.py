# SPDX-License-Identifier: BSD-3-Clause
"""A model over ranks whose keys no `TreeCache` shares: right, and said once."""

import warnings

import pytest
import torch

pytest.importorskip("transformers")

from distributed import run_ranks
from hf_families import WORKING
from hf_families import make_model as make_model_of_family
from hf_models import make_model, make_prompts
from tree_attention import hf
from tree_attention.hf import attention


def forward(rank: int, world_size: int, enabled: bool) -> list[str]:
    attention._warn_if_not_sharded.cache_clear()
    model = make_model("llama", "tree_attention")
    if enabled:
        hf.enable(model)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(**make_prompts())
        if enabled:  # which shards the cache, and so has nothing to warn of
            model.generate(**make_prompts(), max_new_tokens=2, do_sample=False)
    return [str(w.message) for w in caught if "tree_attention" in str(w.message)]


@pytest.mark.parametrize("enabled", [False, True])
def test_keys_in_no_tree_cache_are_warned_about_once(enabled: bool) -> None:
    for messages in run_ranks(forward, 2, enabled):
        assert len(messages) == 1
        assert messages[0].startswith("tree_attention: each of 2 ranks attends to all keys by")
    assert run_ranks(forward, 1, enabled) == [[]]


def generate(rank: int, world_size: int) -> list[str]:
    attention._warn_if_not_sharded.cache_clear()
    model = hf.enable(make_model("llama", "tree_attention"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.generate(**make_prompts(), max_new_tokens=2, do_sample=False)
    return [str(w.message) for w in caught if "tree_attention" in str(w.message)]


def test_a_sharded_cache_is_not_warned_about() -> None:
    assert run_ranks(generate, 2) == [[], []]


@torch.no_grad()
def test_experts_whose_outputs_are_normalised() -> None:
    """As those of Muse Spark, in one process, where nothing is planned and so nothing refused."""
    model = make_model_of_family(WORKING["Mixtral"])
    for layer in model.model.layers:
        layer.mlp.experts.has_post_expert_norm = True
        layer.mlp.experts.post_expert_norm = torch.nn.RMSNorm(model.config.hidden_size)
    model.set_experts_implementation("grouped_mm")
    ids = torch.arange(20)[None]
    expected = model(ids, use_cache=False).logits
    found = hf.parallelize(model)(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
