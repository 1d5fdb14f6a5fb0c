# SPDX-License-Identifier: BSD-3-Clause
"""Families of models with their prompts split over ranks say what transformers says.

The mistakes these tests are for: a family that computes with all tokens of a chunk in one place, or
that counts the positions of its tokens itself.
"""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import run_ranks

pytest.importorskip("transformers")

from hf_families import PAD, VOCAB_SIZE, WORKING, make_model
from tree_attention import BlockCyclic, hf
from tree_attention.hf.deal import Deal

PROMPT_LENGTH = 29
GREEDY = {
    "max_new_tokens": 6,
    "min_new_tokens": 6,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
}
FAMILIES = [name for name, family in WORKING.items() if family.exists]


def _prompts() -> dict[str, Tensor]:
    """Three, padded on the left to one length."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCAB_SIZE, (3, PROMPT_LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 9, 4)):
        ids[row, :padding] = PAD
        mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@cache
def _expected(name: str) -> tuple[Tensor, Tensor, float]:
    """Tokens of transformers, their logits, and how far apart the best two are at least."""
    output = make_model(WORKING[name]).generate(**_prompts(), **GREEDY)
    logits = torch.stack(output.logits)
    best = logits.topk(2).values
    return output.sequences, logits, (best[..., 0] - best[..., 1]).min().item()


def _generate(
    rank: int, world_size: int, expected: dict[str, tuple[Tensor, Tensor, float]]
) -> None:
    shared = Deal.of_last_rank
    for name, (tokens, logits, margin) in expected.items():
        model = make_model(WORKING[name])
        # In blocks of 4 each rank computes the tokens that it keeps; blocks of 1000 are all of one
        # rank, and tokens are dealt in turn.
        for block in (4, 1000):
            layout = BlockCyclic(world_size, block)
            hf.enable(model, layout=layout, prefill="split", prefill_chunk_size=6)
            with mock.patch.object(
                Deal, "of_last_rank", autospec=True, side_effect=shared
            ) as deals:
                output = model.generate(**_prompts(), **GREEDY)
            assert deals.call_count == len(range(0, PROMPT_LENGTH, 12)), f"{name} was not split"
            assert torch.equal(output.sequences, tokens), name
            error = (torch.stack(output.logits) - logits).abs().max().item()
            assert error < margin / 10, f"{name}: logits differ by {error}, best two by {margin}"


@pytest.mark.parametrize("first", range(0, len(FAMILIES), 8))
def test_tokens_equal_those_of_transformers(first: int) -> None:
    names = FAMILIES[first : first + 8]
    run_ranks(_generate, 2, {name: _expected(name) for name in names}, timeout=120)
