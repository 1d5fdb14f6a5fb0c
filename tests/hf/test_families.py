# SPDX-License-Identifier: BSD-3-Clause
"""Families of models: those that work say what transformers says, the others are refused.

The mistakes these tests are for: a family whose attention is given another scale, other heads, a
mask or a cache that the operator does not have, and whose tokens are wrong without a word.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import tiers, tiers_of
from vllm_registry import served

pytest.importorskip("transformers")

import transformers
from transformers import PreTrainedModel

from generations import generated, left_padded
from hf_families import (
    CHOOSING,
    HYBRIDS,
    OWN_ATTENTION,
    REFUSED,
    VOCAB_SIZE,
    WINDOW,
    WORKING,
    Family,
    make_model,
)
from hf_refusal import Refusal
from tree_attention import BlockCyclic, hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.cache.build import state_kinds
from tree_attention.hf.cache.chosen_keys import BlockLayer, IndexedLatentLayer
from tree_attention.hf.cache.growing import TreeCacheLayer
from tree_attention.hf.cache.latent import LatentLayer
from tree_attention.hf.cache.window import WindowLayer
from tree_attention.hf.check_attention import check_split
from tree_attention.hf.own_attention import FORWARDS
from tree_attention.weights.mesh import Mesh
from tree_attention.weights.plan import CannotSplitError, plan

ROOT = Path(__file__).parents[2]
PROMPT_LENGTH = 29
NUM_TOKENS = 20
GREEDY = {
    "max_new_tokens": NUM_TOKENS,
    "min_new_tokens": NUM_TOKENS,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
}
MAX_PADDING = 9
assert PROMPT_LENGTH - MAX_PADDING > WINDOW

FAMILIES = WORKING | HYBRIDS | CHOOSING | OWN_ATTENTION
REFUSALS = {name: refusal for refusal in REFUSED for name in refusal.families}

# A family of each kind of cache: alone on one rank, and quick on two.
KINDS_OF_CACHE = ("Llama", "Mistral", "GPT-OSS", "DeepSeek-V3", "DeepSeek-V3.2", "Jamba")

assert FAMILIES.keys() >= set(KINDS_OF_CACHE)
CASES = tiers_of(
    [*((name, 1) for name in KINDS_OF_CACHE), *((name, 2) for name in FAMILIES)],
    ((name, 2) for name in KINDS_OF_CACHE),
)


def _prompts(family: Family) -> dict[str, Tensor]:
    """Three, padded on the left to one length."""
    paddings = (0, MAX_PADDING, 4) if family.is_padded else (0, 0, 0)
    return left_padded(VOCAB_SIZE, PROMPT_LENGTH, paddings, seed=4)


@cache
def _expected(name: str) -> tuple[Tensor, Tensor, float]:
    """What transformers generates, and a check that it is not one token over and over."""
    tokens, *others = generated(make_model(FAMILIES[name]), _prompts(FAMILIES[name]), **GREEDY)
    assert len(tokens[:, PROMPT_LENGTH:].unique()) >= NUM_TOKENS // 2
    return tokens, *others


def _generate(
    rank: int, world_size: int, name: str, tokens: Tensor, logits: Tensor, margin: float
) -> None:
    # With blocks of 4 every rank holds some slots of the prompt, and the ranks' shares are uneven.
    model = hf.enable(make_model(FAMILIES[name]), layout=BlockCyclic(world_size, 4))
    output = model.generate(**_prompts(FAMILIES[name]), **GREEDY)
    assert isinstance(output[CACHE_NAME], hf.TreeCache)
    assert torch.equal(output.sequences, tokens)
    # Far less than what would change a token: none was equal by chance.
    error = (torch.stack(output.logits) - logits).abs().max().item()
    assert error < margin / 10, f"logits differ by {error}, the best two by {margin}"


@pytest.mark.parametrize("name, world_size", CASES)
def test_tokens_equal_those_of_transformers(name: str, world_size: int) -> None:
    _skip_unless_known(name, FAMILIES[name].exists)
    if world_size == 1:
        _generate(0, 1, name, *_expected(name))
    else:
        run_ranks(_generate, world_size, name, *_expected(name))


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_the_reason(name: str) -> None:
    """By `enable`, or before the first token where only a forward pass shows it; or works."""
    refusal: Refusal = REFUSALS[name]
    family = refusal.families[name]
    _skip_unless_known(name, family.exists)
    model = make_model(family)
    if not refusal.applies:
        arguments = {**_prompts(family), "max_new_tokens": NUM_TOKENS, "do_sample": False}
        expected = model.generate(**arguments)
        found = hf.enable(model).generate(**arguments)
        assert torch.equal(found, expected)
        return
    with pytest.raises(
        (ValueError, NotImplementedError, hf.WrongAttentionError), match=refusal.says
    ):
        hf.enable(model).generate(**_prompts(family), max_new_tokens=1)


# What the page calls layers of a cache, and parameters and children of attention.
_LAYERS = {
    TreeCacheLayer: "keys",
    WindowLayer: "windows",
    LatentLayer: "latents",
    IndexedLatentLayer: "latents with an index",
    BlockLayer: "keys with an index",
}
_PACKED = {"qkv_proj", "query_key_value", "c_attn"}


def page_lists() -> str:
    """Return what docs/models.md says of families."""
    names = sorted(FAMILIES, key=str.lower)
    rows = [f"| {name} | {' | '.join(_row(FAMILIES[name]))} |" for name in names]
    refused = [f"| {', '.join(refusal.families)} | {refusal.why} |" for refusal in REFUSED]
    return "\n".join(
        [
            "| family | cache | prompt | T divides | experts | `weights=` of | attention has "
            "| vLLM |",
            f"|{' --- |' * 8}",
            *rows,
            "",
            "| refused | because |",
            "| --- | --- |",
            *refused,
        ]
    )


def _row(family: Family) -> list[str]:
    """Return what the library itself makes of a model of the family."""
    with torch.device("meta"):
        model = make_model(family)
    layers = [type(layer) for layer in hf.TreeCache(model.config).layers]
    cells = [text for kind, text in _LAYERS.items() if kind in layers]
    cells += ["states"] if state_kinds(model.config) else []
    try:
        check_split(model)
        prompt = "split"
    except ValueError:
        prompt = "whole"
    return [", ".join(cells), prompt, *_weights(model), served(type(model).__name__)]


def _weights(model: PreTrainedModel) -> list[str]:
    # As on the first of three ranks, which no number of heads here can be divided by, or of two.
    mesh = Mesh(None, 1)
    mesh.world_size = mesh.tensor_parallel_size = 3
    if any(type(module).__name__ in FORWARDS for module in model.modules()):
        with pytest.raises(
            CannotSplitError, match="it has no attention whose projections are known"
        ):
            plan(model, mesh)
        return ["not split", "", "nothing", "code of its own"]
    with pytest.raises(ValueError, match="tensor_parallel_size must divide") as raised:
        plan(model, mesh)
    found = re.search(r"the (\d+) (query heads|heads of keys and values) of", str(raised.value))
    assert found is not None
    mesh.world_size, mesh.tensor_parallel_size = 2, min(2, int(found[1]))
    made = plan(model, mesh)
    heads = list(made.heads.values())
    experts = ["chosen"] if any(".experts." in name for name in made.cuts) else []
    experts += ["shared"] if any(".shared_" in name for name in made.cuts) else []
    quantised = ["linear layers"] if made.linears else []
    quantised += ["experts"] if made.experts else []
    has = {
        "packed projections": any(_PACKED & {*x.projections} for x in heads),
        "norms over all heads": any(x.norms for x in heads),
        "gates or norms after it": any(x.own_columns for x in heads),
        "sinks": any("sinks" in x.cuts for x in heads),
    }
    divided = {"query heads": "query heads", "heads of keys and values": "key heads"}[found[2]]
    return [
        divided if int(found[1]) > 1 else "one key head",
        " and ".join(experts),
        ", ".join(quantised) or "nothing",
        ", ".join(text for text, is_so in has.items() if is_so),
    ]


@pytest.mark.deep
def test_page_lists_the_families() -> None:
    text = page_lists()
    page = ROOT / "docs/models.md"
    assert text in page.read_text(), f"docs/models.md does not contain:\n\n{text}"
    assert not FAMILIES.keys() & REFUSALS.keys()


def _skip_unless_known(name: str, exists: bool) -> None:
    if not exists:
        pytest.skip(f"this release of transformers has no {name}")


@pytest.mark.parametrize("name", tiers(["Llama"], ["GPT-OSS", "Gemma 2", "DeepSeek-V3"]))
def test_autocast_of_a_model_in_float32(name: str) -> None:
    """Keys and queries that were rotated are float32 there, and values bfloat16."""
    prompts = left_padded(VOCAB_SIZE, PROMPT_LENGTH, (0, MAX_PADDING), seed=2)
    model = make_model(WORKING[name])
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        for enabled in (model, hf.enable(copy.deepcopy(model))):
            logits = enabled.generate(**prompts, **GREEDY).logits
            found.append(logits[0].float())  # behind another token others may follow
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0.05 * found[0].abs().max().item())


@pytest.mark.parametrize("name", ["Gemma3Config", "LlavaConfig", "Mistral3Config"])
def test_of_a_configuration_of_several_models_the_text_counts(name: str) -> None:
    config = getattr(transformers, name)()
    assert len(hf.TreeCache(config).layers) == config.text_config.num_hidden_layers
