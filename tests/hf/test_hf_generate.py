# SPDX-License-Identifier: BSD-3-Clause
"""`enable(model).generate(...)` over 1, 2 and 3 ranks equals transformers in one process.

The mistakes these tests are for: a key on the wrong rank or in the wrong slot, a range off by one
on some shard, a mask, window, softcap or sink that is lost on the way, ranks that part.
"""

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import by_world, tiers_of

pytest.importorskip("transformers")

from generations import nan_in_new_memory
from hf_models import CONFIGS, PAD, VOCAB_SIZE, make_model, make_prompts
from tree_attention import BlockCyclic, ContiguousThenCyclic, ShardLayout, hf
from tree_attention.hf import CACHE_NAME, attention
from tree_attention.hf.cache import shard

NUM_TOKENS = 24
GREEDY = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
SAMPLED = GREEDY | {"do_sample": True, "temperature": 0.9, "top_k": 50}
LOGITS = {"output_logits": True, "return_dict_in_generate": True}
SEED = 5

worlds = by_world([3], [1, 2])


def _layout(world_size: int) -> ShardLayout:
    # Prompts have 37 slots: with blocks of 4 every rank holds some, and their shares are uneven.
    return BlockCyclic(world_size, 4)


plain_model = cache(make_model)


@cache
def _model_to_enable(name: str) -> Any:
    return make_model(name)


@cache
def _expected(name: str) -> tuple[Tensor, Tensor, float]:
    """Tokens of transformers, their logits [steps, batch, vocab] in float64, and how far those of
    transformers in float32 are from these."""
    output = plain_model(name).generate(**make_prompts(), **GREEDY, **LOGITS)
    logits = torch.stack(output.logits)
    exact = _logits_in_float64(name, output.sequences)
    # Two tokens that are as good as equal would make the comparison of tokens a lottery, and one
    # token over and over would prove little.
    best = exact.topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 1e-3
    assert len(output.sequences[0, -NUM_TOKENS:].unique()) > NUM_TOKENS // 2
    return output.sequences, exact, (logits - exact).abs().max().item()


@torch.no_grad()
def _logits_in_float64(name: str, sequences: Tensor) -> Tensor:
    model = make_model(name).double()
    rows = []
    for row in sequences:  # without padding, whose masked scores are no numbers in eager attention
        ids = row[row != PAD]
        rows.append(model(ids[None], use_cache=False).logits[0, -NUM_TOKENS - 1 : -1])
    return torch.stack(rows, dim=1)


def _greedy(
    rank: int, world_size: int, name: str, tokens: Tensor, exact: Tensor, bound: float
) -> None:
    model = hf.enable(_model_to_enable(name), layout=_layout(world_size))
    with nan_in_new_memory():
        output = model.generate(**make_prompts(), **GREEDY, **LOGITS)
    assert isinstance(output[CACHE_NAME], hf.TreeCache)
    assert torch.equal(output.sequences, tokens)
    error = (torch.stack(output.logits) - exact).abs().max().item()
    assert error <= bound, f"logits differ by {error}, bound {bound}"


@worlds
@pytest.mark.parametrize("name", tiers_of(CONFIGS, quick=["llama", "gemma2"]))
def test_greedy_equals_transformers(name: str, world_size: int) -> None:
    """A left-padded batch of 3, every kind of attention: equal tokens, and logits as accurate.

    The error of the logits is a maximum over some 14,000, after two layers that amplify what
    differs; that of transformers' own attention functions varies by more than two.
    """
    tokens, exact, error = _expected(name)
    run_ranks(_greedy, world_size, name, tokens, exact, 4 * error)


# Arguments of generate, by case. Seeds: the reference draws after manual_seed(SEED), the ranks
# start from different ones and agree on the first rank's.
CASES: dict[str, dict[str, Any]] = {
    "beams": GREEDY | {"num_beams": 3},
    "sampling": SAMPLED,
    "return_sequences": SAMPLED | {"num_return_sequences": 3},
    "sampled_beams": SAMPLED | {"num_beams": 4, "num_return_sequences": 2},
    "chunks_of_1": GREEDY | {"prefill_chunk_size": 1},
    "chunks_of_7": GREEDY | {"prefill_chunk_size": 7},
    "chunks_of_28": GREEDY | {"prefill_chunk_size": 28},
    "one_chunk": GREEDY | {"prefill_chunk_size": 64},
    "chunked_beams": GREEDY | {"prefill_chunk_size": 7, "num_beams": 3},
    "without_cache": GREEDY | {"use_cache": False},
}


@cache
def _expected_tokens(case: str) -> Tensor:
    torch.manual_seed(SEED)
    arguments = {**CASES[case]}
    arguments.pop("prefill_chunk_size", None)
    return plain_model("llama").generate(**make_prompts(), **arguments)


def _generate(rank: int, world_size: int, arguments: dict[str, Any], tokens: Tensor) -> None:
    model = hf.enable(_model_to_enable("llama"), layout=_layout(world_size))
    if arguments["do_sample"]:
        hf.seed_ranks(seed=SEED + rank)
    with nan_in_new_memory():
        assert torch.equal(model.generate(**make_prompts(), **arguments), tokens)


@worlds
@pytest.mark.parametrize("case", tiers_of(CASES, quick=["chunks_of_7"]))
def test_ways_to_generate(case: str, world_size: int) -> None:
    run_ranks(_generate, world_size, CASES[case], _expected_tokens(case))


def _generate_with_options(
    rank: int, world_size: int, options: dict[str, Any], tokens: Tensor
) -> None:
    model = hf.enable(_model_to_enable("llama"), **options)
    with torch.inference_mode():
        assert torch.equal(model.generate(**make_prompts(), **GREEDY), tokens)
    hf.enable(model)


OPTIONS: dict[str, dict[str, Any]] = {
    "block_of_1": {"layout": BlockCyclic(3, 1)},
    "everything_on_one_rank": {"layout": BlockCyclic(3, 64)},
    "uneven_then_cyclic": {"layout": ContiguousThenCyclic((0, 20, 20, 37), 2)},
    "default_chunks": {"prefill_chunk_size": 7},
    "three_allreduce": {"strategy": "three_allreduce"},
    "synchronized_logits": {"synchronize_logits": True},
}


@pytest.mark.parametrize(
    "name",
    tiers_of(OPTIONS, quick=["uneven_then_cyclic", "three_allreduce", "synchronized_logits"]),
)
def test_options_of_enable(name: str) -> None:
    run_ranks(_generate_with_options, 3, OPTIONS[name], _expected_tokens("without_cache"))


def _small_messages(rank: int, world_size: int, tokens: Tensor) -> None:
    model = hf.enable(_model_to_enable("llama"), layout=_layout(world_size))
    num_queries: list[int] = []
    tree_decode = shard.tree_decode

    def recording(q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        num_queries.append(q.shape[2])
        return tree_decode(q, *args, **options)

    limit = 10 * 4 * 3 * 8 * (8 + 1)  # ten queries of the batch
    with (
        mock.patch.object(attention, "_MAX_STATE_BYTES", limit),
        mock.patch.object(shard, "tree_decode", recording),
    ):
        assert torch.equal(model.generate(**make_prompts(), **GREEDY), tokens)
    assert num_queries[:4] == [10, 10, 10, 7]


def test_long_prompts_are_exchanged_in_pieces() -> None:
    run_ranks(_small_messages, 2, _expected_tokens("without_cache"))


def _two_turns(
    rank: int, world_size: int, first: Tensor, second: Tensor, prompts: list[dict[str, Tensor]]
) -> None:
    model = hf.enable(_model_to_enable("llama"), layout=_layout(world_size))
    cache = hf.TreeCache(model.config, layout=_layout(world_size), growth=16)
    for _ in range(2):  # the second time in the memory of the first
        assert torch.equal(model.generate(**prompts[0], **GREEDY, **{CACHE_NAME: cache}), first)
        assert cache.get_seq_length() == first.shape[1] - 1  # the last token was never fed
        tokens = model.generate(**prompts[1], **GREEDY, **{CACHE_NAME: cache})
        assert torch.equal(tokens, second)
        cache.reset()
        assert cache.get_seq_length() == 0


@by_world([], [3, 1, 2])
def test_second_turn_on_the_same_cache(world_size: int) -> None:
    prompts = make_prompts()
    first = plain_model("llama").generate(**prompts, **GREEDY)
    answer = torch.randint(3, VOCAB_SIZE, (3, 9), generator=torch.Generator().manual_seed(2))
    longer = {
        "input_ids": torch.cat((first, answer), dim=-1),
        "attention_mask": torch.nn.functional.pad(
            prompts["attention_mask"], (0, NUM_TOKENS + 9), value=1
        ),
    }
    second = plain_model("llama").generate(**longer, **GREEDY)
    run_ranks(_two_turns, world_size, first, second, [prompts, longer])


def _prompt_lookup(rank: int, world_size: int, prompt: Tensor, tokens: Tensor) -> int:
    model = hf.enable(_model_to_enable("llama"), layout=_layout(world_size))
    crops = []
    crop = hf.TreeCache.crop

    def counting_crop(cache: hf.TreeCache, tokens_to_remove: Any) -> None:
        before = cache.get_seq_length()
        crop(cache, tokens_to_remove)
        crops.append(before - cache.get_seq_length())

    hf.TreeCache.crop = counting_crop
    try:
        found = model.generate(prompt, **GREEDY, prompt_lookup_num_tokens=4)
    finally:
        hf.TreeCache.crop = crop
    assert torch.equal(found, tokens)
    return max(crops)


@by_world([], [3, 1, 2])
def test_prompt_lookup(world_size: int) -> None:
    """Candidates that are refused are cropped from the cache, on ranks that hold them and not."""
    prompt = make_prompts(batch=1)["input_ids"]
    tokens = plain_model("llama").generate(prompt, **GREEDY)
    # The answer lies in the prompt, but goes on differently after half of it.
    answer = tokens[:, prompt.shape[1] :]
    prompt = torch.cat((prompt, answer[:, : NUM_TOKENS // 2], prompt, answer[:, :4]), dim=-1)
    tokens = plain_model("llama").generate(prompt, **GREEDY)
    largest = run_ranks(_prompt_lookup, world_size, prompt, tokens)
    assert max(largest) >= 2


def _assisted(rank: int, world_size: int, prompt: Tensor, tokens: Tensor) -> None:
    model = hf.enable(_model_to_enable("llama"), layout=_layout(world_size))
    found = model.generate(prompt, **GREEDY, assistant_model=plain_model("mistral"))
    assert torch.equal(found, tokens)


@pytest.mark.deep
def test_an_assistant_model() -> None:
    """Every rank runs the whole assistant; its candidates are cropped like those of a lookup."""
    prompt = make_prompts(batch=1)["input_ids"]
    run_ranks(_assisted, 2, prompt, plain_model("llama").generate(prompt, **GREEDY))


class _Collect:
    """A streamer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def _stream(rank: int, world_size: int, tokens: list[int]) -> None:
    model = hf.enable(_model_to_enable("llama"), layout=_layout(world_size))
    streamer = _Collect() if rank == 0 else None
    model.generate(make_prompts(batch=1)["input_ids"], **GREEDY, streamer=streamer)
    if streamer is not None:
        assert streamer.tokens == tokens
        assert streamer.ended


def test_streaming_on_the_first_rank() -> None:
    tokens = plain_model("llama").generate(make_prompts(batch=1)["input_ids"], **GREEDY)
    run_ranks(_stream, 2, tokens[0].tolist())
