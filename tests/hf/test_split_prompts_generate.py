# SPDX-License-Identifier: BSD-3-Clause
"""Prompts whose tokens are split over ranks: generations equal those of transformers.

The mistakes these tests are for: a token that no rank or two compute, its key in the wrong slot or
on the wrong rank, a query that meets another's range of keys, ranks that part at the last position.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import by_world

pytest.importorskip("transformers")

from generations import nan_in_new_memory
from hf_models import CONFIGS, VOCAB_SIZE, make_model, make_prompts
from tree_attention import BlockCyclic, Contiguous, ContiguousThenCyclic, ShardLayout, hf

GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
LOGITS = {"output_logits": True, "return_dict_in_generate": True}
SEED = 5

worlds = by_world([3], [1, 2, 4])

# Arguments of generate, by case.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "beams": GREEDY | {"num_beams": 3},
    "sampling": GREEDY | {"do_sample": True, "temperature": 0.9, "top_k": 50},
    "lookup": GREEDY | {"prompt_lookup_num_tokens": 4},
    "without_cache": GREEDY | {"use_cache": False},
}


def _layouts(world_size: int) -> list[ShardLayout | None]:
    """For prompts of 37 tokens and what follows: shares that are even, uneven, of one rank alone
    (the default) and empty ones."""
    uneven = (0, *(10 + 5 * rank for rank in range(world_size)))
    return [
        BlockCyclic(world_size, 4),
        BlockCyclic(world_size, 8),
        None,
        Contiguous((*uneven[:-1], 100)),
        ContiguousThenCyclic((0, *[20] * (world_size - 1), 30), 2),
    ]


plain_model = cache(make_model)


@cache
def _expected(name: str, way: str, batch: int = 3) -> Tensor:
    torch.manual_seed(SEED)
    return plain_model(name).generate(**make_prompts(batch), **WAYS[way])


def _greedy(rank: int, world_size: int, expected: dict[str, Tensor]) -> list[Tensor]:
    """Every model, layout and chunk; the logits of all."""
    found = []
    for name, tokens in expected.items():
        model = make_model(name)
        layouts = _layouts(world_size)[:: 1 if name == "llama" else 2]
        for layout, size in product(layouts, (None, 12 // world_size)):  # of a rank
            hf.enable(model, layout=layout, prefill="split", prefill_chunk_size=size)
            with nan_in_new_memory():
                output = model.generate(**make_prompts(), **GREEDY, **LOGITS)
            assert torch.equal(output.sequences, tokens), (name, layout, size)
            found += output.logits
    return found


@by_world([], [2, 1, 3, 4])
def test_greedy_equals_transformers(world_size: int) -> None:
    """Padded batches, with windows, soft-caps and sinks. Ranks have the same bits."""
    expected = {name: _expected(name, "greedy") for name in CONFIGS}
    logits = run_ranks(_greedy, world_size, expected, timeout=200)
    for others in logits[1:]:
        assert all(torch.equal(x, y) for x, y in zip(logits[0], others, strict=True))


def _ways(rank: int, world_size: int, expected: dict[str, Tensor]) -> None:
    model = hf.enable(
        make_model("llama"),
        layout=BlockCyclic(world_size, 4),
        prefill="split",
        prefill_chunk_size=None,
    )
    for way, tokens in expected.items():
        batch = 1 if way == "lookup" else 3
        hf.seed_ranks(seed=SEED)
        assert torch.equal(model.generate(**make_prompts(batch), **WAYS[way]), tokens), way
    tokens = expected["lookup"]
    prompts = make_prompts(1)
    assistant = make_model("mistral")
    found = model.generate(**prompts, **GREEDY, assistant_model=assistant)
    assert torch.equal(found, tokens)


@worlds
def test_ways_to_generate(world_size: int) -> None:
    expected = {way: _expected("llama", way, 1 if way == "lookup" else 3) for way in WAYS}
    run_ranks(_ways, world_size, expected)


def _two_turns(
    rank: int, world_size: int, prompts: list[dict[str, Tensor]], expected: list[Tensor]
) -> None:
    model = make_model("llama")
    for layout in _layouts(world_size):
        hf.enable(model, layout=layout, prefill="split", prefill_chunk_size=16 // world_size)
        cache = hf.TreeCache(model.config, layout=layout, growth=16)
        with torch.inference_mode():
            for prompt, tokens in zip(prompts, expected, strict=True):
                found = model.generate(**prompt, **GREEDY, past_key_values=cache)
                assert torch.equal(found, tokens)


@worlds
def test_second_turn_on_the_same_cache(world_size: int) -> None:
    first = _expected("llama", "greedy")
    answer = torch.randint(3, VOCAB_SIZE, (3, 9), generator=torch.Generator().manual_seed(2))
    ids, mask = torch.cat((first, answer), dim=-1), make_prompts()["attention_mask"]
    new = ids.shape[1] - mask.shape[1]
    longer = {"input_ids": ids, "attention_mask": torch.nn.functional.pad(mask, (0, new), value=1)}
    second = plain_model("llama").generate(**longer, **GREEDY)
    run_ranks(_two_turns, world_size, [make_prompts(), longer], [first, second])
