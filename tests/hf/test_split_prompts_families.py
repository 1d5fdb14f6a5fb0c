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
from tiers import tiers

pytest.importorskip("transformers")

from generations import generated, left_padded
from hf_families import OWN_ATTENTION, VOCAB_SIZE, WORKING, make_model
from tree_attention import BlockCyclic, hf
from tree_attention.hf.cache.token_split import TokenSplit
from tree_attention.hf.prompts import split_attention

PROMPT_LENGTH = 29
GREEDY = {
    "max_new_tokens": 6,
    "min_new_tokens": 6,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
}
SPLIT = WORKING | {"XGLM": OWN_ATTENTION["XGLM"]}
FAMILIES = [name for name, family in SPLIT.items() if family.exists]


def _prompts() -> dict[str, Tensor]:
    """Three, padded on the left to one length."""
    return left_padded(VOCAB_SIZE, PROMPT_LENGTH, (0, 9, 4), seed=4)


@cache
def _expected(name: str) -> tuple[Tensor, Tensor, float]:
    return generated(make_model(SPLIT[name]), _prompts(), **GREEDY)


def _generate(
    rank: int, world_size: int, expected: dict[str, tuple[Tensor, Tensor, float]]
) -> None:
    shared = TokenSplit.of_last_rank
    for name, (tokens, logits, margin) in expected.items():
        model = make_model(SPLIT[name])
        # In blocks of 4 each rank computes the tokens that it keeps; blocks of 1000 are all of one
        # rank, and tokens go round the ranks.
        for block in (4, 1000):
            layout = BlockCyclic(world_size, block)
            hf.enable(model, layout=layout, prefill="split", prefill_chunk_size=6)
            with mock.patch.object(
                TokenSplit, "of_last_rank", autospec=True, side_effect=shared
            ) as calls:
                output = model.generate(**_prompts(), **GREEDY)
            assert calls.call_count == len(range(0, PROMPT_LENGTH, 12)), f"{name} was not split"
            assert torch.equal(output.sequences, tokens), name
            error = (torch.stack(output.logits) - logits).abs().max().item()
            assert error < margin / 10, f"{name}: logits differ by {error}, best two by {margin}"


@pytest.mark.parametrize("first", tiers([0], range(8, len(FAMILIES), 8)))
def test_tokens_equal_those_of_transformers(first: int) -> None:
    names = FAMILIES[first : first + 8]
    run_ranks(_generate, 2, {name: _expected(name) for name in names}, timeout=120)


def test_gathered_keys_begin_where_cuda_reads_them() -> None:
    """Its kernels take keys and values at multiples of 16 bytes."""
    rows, scales = torch.zeros(1, 3, 9, 16, dtype=torch.int8), torch.zeros(1, 3, 9)
    buffers = {"k_scale": scales, "v_scale": scales, "keys": rows, "values": rows}
    for count in (1, 5):
        num_bytes = sum(split_attention._num_bytes(x, count) for x in buffers.values())
        views = split_attention._views(torch.zeros(num_bytes, dtype=torch.uint8), buffers, count)
        assert all(x.data_ptr() % 16 == 0 for x in views.values())
        for number, x in enumerate(views.values()):
            x.fill_(number)
        assert [x.double().mean() for x in views.values()] == [0, 1, 2, 3]
