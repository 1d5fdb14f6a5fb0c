# SPDX-License-Identifier: BSD-3-Clause
"""BLOOM, MPT and XGLM, whose attention modules get another forward.

The mistakes these tests are for: slopes of other heads or of rounded positions, a bias that meets
the slots of another rank, a forward that stays after `disable`, an argument that has no effect.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import tiers_of

pytest.importorskip("transformers")

from generations import generated, left_padded
from hf_families import OWN_ATTENTION, VOCAB_SIZE, make_model
from tree_attention import BlockCyclic, hf
from tree_attention.hf.release import CACHE_NAME

GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
of_each = pytest.mark.parametrize("name", OWN_ATTENTION)


def _prompts() -> dict[str, Tensor]:
    return left_padded(VOCAB_SIZE, 21, (0, 7), seed=4)


def _in_bfloat16(name: str) -> Any:
    return make_model(OWN_ATTENTION[name]).bfloat16()


@of_each
@pytest.mark.parametrize(
    "options", [{"max_length": 40}, {"deterministic": 8}, {"prefill_chunk_size": 5}]
)
def test_options_of_enable(name: str, options: dict[str, Any]) -> None:
    model = make_model(OWN_ATTENTION[name])
    tokens, logits, margin = generated(model, _prompts(), **GREEDY)
    found, its_logits, _ = generated(hf.enable(model, **options), _prompts(), **GREEDY)
    assert torch.equal(found, tokens)
    assert (its_logits - logits).abs().max() < margin / 10


def _with_cache_of_8_bits_and_saved(rank: int, world_size: int, name: str, path: Path) -> None:
    """Two turns, of which the second one begins with a cache from a file."""
    model = hf.enable(
        make_model(OWN_ATTENTION[name]), kv_dtype="int8", layout=BlockCyclic(world_size, 4)
    )
    prompts = {key: x[:1] for key, x in _prompts().items()}
    whole = model.generate(**prompts, **GREEDY)
    cache = model.generate(**prompts, **GREEDY, return_dict_in_generate=True)[CACHE_NAME]
    cache.crop(-7)
    cache.save(path)
    loaded = hf.TreeCache.load(path, model.config, layout=BlockCyclic(world_size, 4))
    ids = whole[:, :24]
    options: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    options |= {"attention_mask": torch.ones_like(ids), CACHE_NAME: loaded}
    found = model.generate(ids, **options)
    assert torch.equal(found, whole)


@pytest.mark.parametrize("name", tiers_of(OWN_ATTENTION, quick=["BLOOM"]))
def test_saved_cache_of_8_bits_on_shards(name: str, tmp_path: Path) -> None:
    run_ranks(_with_cache_of_8_bits_and_saved, 2, name, tmp_path)


@of_each
@torch.no_grad()
def test_bfloat16_is_as_near_as_transformers(name: str) -> None:
    """Both round, and neither is nearer by chance to what float32 gives."""
    prompts = _prompts()
    exact = _in_bfloat16(name).float()(**prompts).logits
    model = _in_bfloat16(name)
    visible = prompts["attention_mask"].bool()
    theirs = (model(**prompts).logits - exact)[visible].norm()
    ours = (hf.enable(model)(**prompts).logits - exact)[visible].norm()
    assert 0 < ours < 1.2 * theirs


@of_each
@torch.no_grad()
def test_disable_gives_back_the_forward(name: str) -> None:
    model = make_model(OWN_ATTENTION[name])
    expected, forwards = model(**_prompts()).logits, _own_forwards(model)
    copied = copy.deepcopy(hf.enable(model))
    assert model.config._attn_implementation == "tree_attention"
    assert forwards == [] and len(_own_forwards(model)) == 2  # one for each layer
    hf.disable(model)
    assert model.config._attn_implementation == "eager"
    assert _own_forwards(model) == []
    assert torch.equal(model(**_prompts()).logits, expected)
    # The copy has forwards of its own, with the copied weights.
    for module in copied.modules():
        forward = vars(module).get("forward")
        assert getattr(forward, "__self__", module) is module


def _own_forwards(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The attention modules with one; the model has one while prompts are split."""
    return [x for x in model.modules() if x is not model and "forward" in vars(x)]


@of_each
def test_what_is_refused(name: str) -> None:
    model = hf.enable(make_model(OWN_ATTENTION[name]))
    with pytest.raises(NotImplementedError, match="output_attentions is not supported"):
        model.generate(**_prompts(), **GREEDY, output_attentions=True)
    with pytest.raises(NotImplementedError, match="computes no gradients"):
        model(**_prompts())


@torch.no_grad()
def test_states_of_an_encoder_are_refused() -> None:
    family = OWN_ATTENTION["XGLM"]
    model = make_model(replace(family, options=family.options | {"add_cross_attention": True}))
    arguments = {"encoder_hidden_states": torch.ones(2, 3, 64), "use_cache": False}
    model(**_prompts(), **arguments)  # which enable alone makes impossible
    with pytest.raises(NotImplementedError, match="without encoder_hidden_states"):
        hf.enable(model)(**_prompts(), **arguments)
