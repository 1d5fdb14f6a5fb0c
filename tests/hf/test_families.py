# SPDX-License-Identifier: BSD-3-Clause
"""Families of models: those that work say what transformers says, the others are refused.

The mistakes these tests are for: a family whose attention is given another scale, other heads, a
mask or a cache that the operator does not have, and whose tokens are wrong without a word.
"""

from __future__ import annotations

import textwrap
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import tiers_of

pytest.importorskip("transformers")

from generations import generated, left_padded
from hf_families import (
    HYBRIDS,
    REFUSED,
    VOCAB_SIZE,
    WINDOW,
    WORKING,
    Refusal,
    make_model,
)
from tree_attention import BlockCyclic, hf

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

FAMILIES = WORKING | HYBRIDS
REFUSALS = {name: refusal for refusal in REFUSED for name in refusal.families}

# One rank alone: quick for a family of each kind of cache.
KINDS_OF_CACHE = ("Llama", "Mistral", "GPT-OSS", "DeepSeek-V3", "Jamba")

# Those of which most checkpoints are in use, and one of each kind of cache.
QUICK = (*KINDS_OF_CACHE, "Qwen3", "Qwen3-MoE", "Qwen3-Next", "Gemma 3", "Phi-3", "OLMo 3")
assert FAMILIES.keys() >= set(QUICK)
CASES = tiers_of(
    ((name, world_size) for world_size in (1, 2) for name in FAMILIES),
    ((name, 2) for name in QUICK),
)


def _prompts() -> dict[str, Tensor]:
    """Three, padded on the left to one length."""
    return left_padded(VOCAB_SIZE, PROMPT_LENGTH, (0, MAX_PADDING, 4), seed=4)


@cache
def _expected(name: str) -> tuple[Tensor, Tensor, float]:
    """What transformers generates, and a check that it is not one token over and over."""
    tokens, *others = generated(make_model(FAMILIES[name]), _prompts(), **GREEDY)
    assert len(tokens[:, PROMPT_LENGTH:].unique()) >= NUM_TOKENS // 2
    return tokens, *others


def _generate(
    rank: int, world_size: int, name: str, tokens: Tensor, logits: Tensor, margin: float
) -> None:
    # With blocks of 4 every rank holds some slots of the prompt, and the ranks' shares are uneven.
    model = hf.enable(make_model(FAMILIES[name]), layout=BlockCyclic(world_size, 4))
    output = model.generate(**_prompts(), **GREEDY)
    assert isinstance(output.past_key_values, hf.TreeCache)
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
    """By `enable`, or before the first token where only a forward pass shows it."""
    refusal: Refusal = REFUSALS[name]
    family = refusal.families[name]
    _skip_unless_known(name, family.exists)
    model = make_model(family)
    with pytest.raises(
        (ValueError, NotImplementedError, hf.WrongAttentionError), match=refusal.says
    ):
        hf.enable(model).generate(**_prompts(), max_new_tokens=1)


def page_lists() -> str:
    """Return what docs/models.md says of families."""
    rows = [f"| {', '.join(refusal.families)} | {refusal.why} |" for refusal in REFUSED]
    return "\n".join(
        [
            _wrapped(f"{', '.join(WORKING)}."),
            "",
            _wrapped(
                f"With layers that keep a state, the same on every rank: {', '.join(HYBRIDS)}."
            ),
            "",
            "| refused | because |",
            "| --- | --- |",
            *rows,
        ]
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


def test_page_lists_the_families() -> None:
    text = page_lists()
    page = ROOT / "docs/models.md"
    assert text in page.read_text(), f"docs/models.md does not contain:\n\n{text}"
    assert f"[{len(FAMILIES)} families](docs/models.md)" in (ROOT / "README.md").read_text()
    assert not FAMILIES.keys() & REFUSALS.keys()


def _skip_unless_known(name: str, exists: bool) -> None:
    if not exists:
        pytest.skip(f"this release of transformers has no {name}")
