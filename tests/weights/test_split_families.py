# SPDX-License-Identifier: BSD-3-Clause
"""Every family's weights are split, and say what transformers says with whole ones.

The mistakes these tests are for: a packed projection cut across its parts, a bias of experts added
by every rank, a norm over a part of the heads, a gate that meets other heads than its own.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import tiers_of

pytest.importorskip("transformers")

from generations import generated, left_padded
from hf_families import HYBRIDS, LATENT, REFUSED, VOCAB_SIZE, WORKING, make_model
from hf_refusal import no_longer_refused
from tree_attention import BlockCyclic, hf

LATER = no_longer_refused(REFUSED)
FAMILIES = {name: x for name, x in (WORKING | HYBRIDS | LATER).items() if x.exists}
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
# One of each way to cut attention, an MLP and experts.
QUICK = (
    *("CodeGen", "Llama", "DeepSeek-V3", "GPT-OSS", "GPT-2", "OLMoE", "Phi-3"),
    *("Qwen3-Next", "Qwen2-MoE"),
)
# Families that share the time it takes to start ranks.
_EACH = 9
NAMES = sorted(FAMILIES)
PARTS = [tuple(NAMES[i : i + _EACH]) for i in range(0, len(NAMES), _EACH)]


def sizes_of(name: str, world_size: int) -> list[int]:
    """Every tensor_parallel_size that divides the world and the heads that it divides."""
    heads = {"GPT-BigCode": 1, **dict.fromkeys((*LATENT, *LATER, "Kimi Linear"), 4)}.get(name, 2)
    return [n for n in (1, 2, 4) if world_size % n == 0 and heads % n == 0]


def _prompts() -> dict[str, Tensor]:
    return left_padded(VOCAB_SIZE, 13, (0, 5), seed=7)


@cache
def _expected(name: str) -> tuple[Tensor, Tensor, float]:
    return generated(make_model(FAMILIES[name]), _prompts(), **GREEDY)


def _compare(model: Any, wanted: tuple[Tensor, Tensor, float], what: str) -> Tensor:
    tokens, logits, margin = wanted
    found, its_logits, _ = generated(model, _prompts(), **GREEDY)
    error = (its_logits - logits).abs().max().item()
    # Far less than what would change a token: none is equal by chance.
    assert error < margin / 5, f"{what}: logits differ by {error}, the best two by {margin}"
    assert torch.equal(found, tokens), what
    return its_logits


def _from_memory(
    rank: int, world_size: int, wanted: dict[str, tuple[Tensor, Tensor, float]]
) -> list[Tensor]:
    found = []
    for name, tokens in wanted.items():
        for size in sizes_of(name, world_size):
            model = hf.parallelize(make_model(FAMILIES[name]), tensor_parallel_size=size)
            hf.enable(model, layout=BlockCyclic(world_size // size, 2))
            found.append(_compare(model, tokens, f"{name}, tensor_parallel_size {size}"))
    return found


def _same_on_all_ranks(results: list[list[Tensor]]) -> None:
    first, *others = results
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


CASES = tiers_of(
    [(QUICK, 1), (QUICK, 2), *((part, world_size) for world_size in (2, 3, 4) for part in PARTS)],
    [(QUICK, 2)],
)


@pytest.mark.parametrize("names, world_size", CASES)
def test_tokens_equal_those_of_transformers(names: tuple[str, ...], world_size: int) -> None:
    wanted = {name: _expected(name) for name in names if name in FAMILIES}
    _same_on_all_ranks(run_ranks(_from_memory, world_size, wanted, timeout=180.0))


def _from_file(
    rank: int,
    world_size: int,
    path: Path,
    wanted: dict[str, tuple[Tensor, Tensor, float]],
) -> list[Tensor]:
    found = []
    for name, tokens in wanted.items():
        size = sizes_of(name, world_size)[-1]
        model = hf.from_pretrained(path / name, tensor_parallel_size=size)
        found.append(_compare(model, tokens, name))
    return found


@pytest.mark.parametrize("names", tiers_of(((x,) for x in PARTS), [(QUICK,)]))
def test_checkpoints_as_they_are_published(names: tuple[str, ...], tmp_path: Path) -> None:
    """Experts one by one under the names that each family has for them."""
    # Those that AutoModelForCausalLM makes, as `from_pretrained` does.
    names = [x for x in names if x in FAMILIES and FAMILIES[x].auto == "AutoModelForCausalLM"]
    for name in names:
        make_model(FAMILIES[name]).save_pretrained(tmp_path / name)
    wanted = {name: _expected(name) for name in names}
    _same_on_all_ranks(run_ranks(_from_file, 2, tmp_path, wanted, timeout=180.0))
