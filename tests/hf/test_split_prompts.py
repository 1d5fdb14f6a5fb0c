# SPDX-License-Identifier: BSD-3-Clause
"""Who computes which tokens of a prompt, what ranks send for it, and which are not split."""

from __future__ import annotations

import copy
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import on_ranks, run_ranks
from tiers import by_world, tiers, tiers_of

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from hf_models import CONFIGS, VOCAB_SIZE, make_model, make_prompts
from tree_attention import BlockCyclic, Contiguous, ContiguousThenCyclic, ExchangeError, hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.prompts import split_attention

LAST = {"logits_to_keep": 1}


def _ids(length: int, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCAB_SIZE, (batch, length), generator=generator)


@torch.no_grad()
def _logits_of_chunks(
    model: Any, ids: Tensor, chunks: list[int], layout: Any = None, **options: Any
) -> Tensor:
    """Of the last position of each chunk: `[chunks, batch, 1, vocabulary]`."""
    cache = hf.TreeCache(model.config, layout=layout)
    outputs = [
        model(chunk, **{CACHE_NAME: cache}, **LAST, **options) for chunk in ids.split(chunks, 1)
    ]
    assert cache.get_seq_length() == sum(chunks)
    return torch.stack([output.logits for output in outputs])


def _ways(rank: int, world_size: int, name: str, chunks: list[int]) -> list[Tensor]:
    """Logits by pass-Q, by pass-KV and by both in turn, each in one piece and in many."""
    layout = BlockCyclic(world_size, 4)
    model = hf.enable(make_model(name), layout=layout, prefill="split")
    found = []
    for ways in ([True], [False], [False, True]):
        for num_bytes in (split_attention._MAX_PIECE_BYTES, 1000):
            with (
                mock.patch.object(split_attention, "_passes_queries", side_effect=cycle(ways)),
                mock.patch.object(split_attention, "_MAX_PIECE_BYTES", num_bytes),
            ):
                found.append(_logits_of_chunks(model, _ids(sum(chunks), 2), chunks, layout))
    return found


@pytest.mark.parametrize("name", tiers_of(CONFIGS, quick=["mistral_window", "deepseek"]))
def test_passing_queries_or_keys(name: str) -> None:
    with torch.no_grad():
        logits = make_model(name)(_ids(37, 2)).logits
    exact = torch.stack([logits[:, end - 1 : end] for end in (11, 37)])
    by_rank = run_ranks(_ways, 3, name, [11, 26])
    for number, found in enumerate(by_rank[0]):
        torch.testing.assert_close(found, exact, atol=1e-3, rtol=1e-3)
        assert all(torch.equal(found, ways[number]) for ways in by_rank)


def _shares(rank: int, world_size: int, prefill: str, chunks: list[int]) -> list[list[int]]:
    """How many tokens of each chunk the layers of this rank compute, by layout."""
    model = make_model("llama")
    counts: list[int] = []
    model.model.layers[1].mlp.register_forward_hook(
        lambda _, args, __: counts.append(args[0].shape[1])
    )
    found = []
    for layout in (
        None,
        BlockCyclic(world_size, 8),
        BlockCyclic(world_size, 1000),
        Contiguous((*range(world_size), 1000)),
        ContiguousThenCyclic((*range(world_size), 1000)),
    ):
        hf.enable(model, layout=layout, prefill=prefill)
        _logits_of_chunks(model, _ids(sum(chunks)), chunks, layout)
        found.append([*counts])
        counts.clear()
    return found


@by_world([3], [2, 4])
@pytest.mark.parametrize("prefill", tiers(["auto"], ["split", "replicated"]))
def test_ranks_share_the_work(world_size: int, prefill: str) -> None:
    threshold = {"auto": 64 * world_size, "split": world_size, "replicated": 10**6}[prefill]
    chunks = [64 * world_size, world_size, 64 * world_size - 1, world_size - 1, 1, 300]
    for by_layout in zip(*run_ranks(_shares, world_size, prefill, chunks), strict=True):
        for length, counts in zip(chunks, zip(*by_layout, strict=True), strict=True):
            if length >= max(2, threshold):
                assert sum(counts) == length
                assert min(counts) > 0 and max(counts) - min(counts) <= 64
            else:
                assert counts == (length,) * world_size


def _bytes(rank: int, world_size: int, passes_queries: bool, is_by_owner: bool) -> list[int]:
    """What this rank sent for each of two chunks."""
    config = copy.deepcopy(CONFIGS["llama"])
    # With a head of keys for each query head, or with one for all.
    config.num_key_value_heads = 8 if passes_queries else 1
    layout = BlockCyclic(world_size, 4 if is_by_owner else 1000)
    model = LlamaForCausalLM(config).eval()
    hf.enable(model, layout=layout, prefill="split")
    cache = hf.TreeCache(model.config, layout=layout)
    comm = cache.shard.comm
    ids = _ids(240, 2)
    counts = []
    with torch.no_grad():
        model(ids[:, :48], **{CACHE_NAME: cache}, **LAST)  # whose first call tests the delivery
        for begin, end in ((48, 144), (144, 240)):
            before = comm.bytes_sent
            model(ids[:, begin:end], **{CACHE_NAME: cache}, **LAST)
            counts.append(comm.bytes_sent - before)
    return counts


@pytest.mark.parametrize("is_by_owner", [True, False])
@pytest.mark.parametrize("passes_queries", [True, False])
@by_world([2], [3])
def test_bytes_are_those_of_the_formula(
    world_size: int, passes_queries: bool, is_by_owner: bool
) -> None:
    batch, tokens, layers, head_dim, itemsize = 2, 96, 2, 8, 4
    sent = run_ranks(_bytes, world_size, passes_queries, is_by_owner)
    for number, counts in enumerate(zip(*sent, strict=True)):
        if passes_queries:
            per_layer = tokens * 8 * (head_dim * itemsize + 4 * (head_dim + 1))
        else:
            per_layer = (48 + tokens * (number + 1)) * 1 * 2 * head_dim * itemsize
        expected = (world_size - 1) * batch * layers * per_layer
        if not is_by_owner:  # keys and values of the tokens that rank 0 did not compute
            moved = tokens * (world_size - 1) // world_size
            expected += (
                layers * batch * moved * (8 if passes_queries else 1) * 2 * head_dim * itemsize
            )
        expected += (world_size - 1) * batch * VOCAB_SIZE * itemsize  # the logits
        assert sum(counts) == expected


@on_ranks(2)
def test_which_forwards_are_split(rank: int, world_size: int) -> None:
    model = hf.enable(make_model("llama"), layout=BlockCyclic(world_size, 4), prefill="split")
    counts: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(
        lambda _, args, __: counts.append(args[0].shape[1])
    )
    prompts = make_prompts()
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for is_split, options in (
        (True, LAST),
        (True, LAST | {"attention_mask": mask, "position_ids": positions}),
        (True, LAST | {"attention_mask": torch.ones_like(mask)}),
        (False, {}),
        (False, {"logits_to_keep": 0}),
        (False, {"logits_to_keep": 2}),
        (False, {"logits_to_keep": torch.tensor([1])}),
        (False, LAST | {"attention_mask": mask}),
        (False, LAST | {"output_hidden_states": True}),
        (False, LAST | {"return_dict": False}),
    ):
        counts.clear()
        cache = hf.TreeCache(model.config, layout=BlockCyclic(world_size, 4))
        with torch.no_grad():
            output = model(input_ids=ids, **{CACHE_NAME: cache}, **options)
        assert (counts[0] < ids.shape[1]) == is_split, options
        if "output_hidden_states" in options:
            assert output.hidden_states[0].shape[1] == ids.shape[1]
    counts.clear()
    with torch.no_grad():
        model(ids, None, None, cache, **LAST)  # by position, in a second turn
        embeds = model.get_input_embeddings()(ids)
        model(inputs_embeds=embeds, **{CACHE_NAME: cache}, **LAST)
        hf.disable(model)
        model.set_attn_implementation("tree_attention")
        model(ids, **{CACHE_NAME: cache}, **LAST)
    assert counts[0] < 37 and counts[1] < 37 and counts[2] == 37


@on_ranks(2)
def test_chunks_are_counted_by_rank(rank: int, world_size: int) -> None:
    """A rank computes as many tokens in a forward pass as `enable` was told, split or not."""
    counts: list[int] = []
    model = make_model("llama")
    model.model.layers[0].mlp.register_forward_hook(
        lambda _, args, __: counts.append(args[0].shape[1])
    )
    for prefill, options, expected in (
        ("split", {}, [8, 8, 2]),
        ("split", {"prefill_chunk_size": 20}, [10, 8]),
        ("split", {"output_hidden_states": True}, [36]),
        ("split", {"output_hidden_states": True, "prefill_chunk_size": 20}, [20, 16]),
        ("replicated", {}, [8, 8, 8, 8, 4]),
    ):
        layout = BlockCyclic(world_size, 2)
        hf.enable(model, layout=layout, prefill=prefill, prefill_chunk_size=8)
        counts.clear()
        model.generate(_ids(36), max_new_tokens=1, **options)
        assert counts == expected


@on_ranks(2)
def test_hidden_states_are_those_of_the_whole_prompt(rank: int, world_size: int) -> None:
    model = make_model("llama")
    wanted = {"max_new_tokens": 2, "output_hidden_states": True, "return_dict_in_generate": True}
    expected = model.generate(_ids(36), **wanted).hidden_states
    for prefill in ("auto", "split", "replicated"):
        hf.enable(model, layout=BlockCyclic(2, 2), prefill=prefill, prefill_chunk_size=8)
        found = model.generate(_ids(36), **wanted).hidden_states
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@on_ranks(2)
def test_copies_compute_with_their_own_weights(rank: int, world_size: int) -> None:
    model = hf.enable(make_model("llama"), layout=BlockCyclic(world_size, 4), prefill="split")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-0.5)
    ids, layout = _ids(37), BlockCyclic(world_size, 4)
    assert other.forward.__self__ is other
    plain = hf.disable(copy.deepcopy(other))
    with torch.no_grad():
        expected = plain(ids).logits[:, -1:]
    found = _logits_of_chunks(other, ids, [37], layout)[0]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(_logits_of_chunks(model, ids, [37], layout)[0], expected, atol=1e-1)


@pytest.mark.deep
@on_ranks(2)
def test_compiled_forwards_are_not_split(rank: int, world_size: int) -> None:
    """A compiled forward is not split, whatever it is given."""
    model = hf.enable(make_model("llama"), prefill="split")
    ids = _ids(37)
    expected = _logits_of_chunks(model, ids, [20, 17])
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    with mock.patch("tree_attention.hf.attention.attend_split", side_effect=AssertionError):
        found = _logits_of_chunks(model, ids, [20, 17])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    forward = model.forward
    with pytest.raises(ValueError, match="its forward was replaced"):
        hf.enable(model, prefill="split")
    hf.disable(model)
    assert vars(model)["forward"] is forward


class _WithoutPositions(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, cache: Any = None, logits_to_keep: int = 0) -> Any:
        return super().forward(input_ids, **{CACHE_NAME: cache}, logits_to_keep=logits_to_keep)


def _with_dynamic_rope() -> Any:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=20, hidden_size=16, num_attention_heads=2, rope_parameters=rope)
    )


def _replaced() -> Any:
    model = make_model("llama")
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: _WithoutPositions(CONFIGS["llama"]), "_WithoutPositions: its forward takes no po"),
        (_with_dynamic_rope, "its rotary embedding, 'dynamic', depends on all positions"),
        (_replaced, "its forward was replaced, by torch.compile or by hooks"),
    ],
)
def test_models_that_cannot_be_split(make: Any, reason: str) -> None:
    model = make()
    forward = vars(model).get("forward")
    with pytest.raises(ValueError, match=f"^enable: prefill='split' is not possible .*{reason}"):
        hf.enable(model, prefill="split")
    hf.enable(model)
    assert vars(model).get("forward") is forward
    hf.disable(model)
    assert vars(model).get("forward") is forward


def test_prefill_is_checked() -> None:
    message = "enable: prefill must be one of auto, split, replicated, got 'both'"
    with pytest.raises(ValueError, match=message):
        hf.enable(make_model("llama"), prefill="both")


@on_ranks(2)
def test_ranks_that_differ(rank: int, world_size: int) -> None:
    model = hf.enable(make_model("llama"), prefill="split" if rank else "auto")
    with pytest.raises(ExchangeError, match="prefill"):
        model.generate(**make_prompts(), max_new_tokens=2)
    hf.enable(model, prefill="split")
    ids = _ids(20)
    mask, positions = torch.ones_like(ids), torch.arange(20)[None]
    mask[0, 0] = rank
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_attention_heads = (8, 16)[rank]
    other = hf.enable(LlamaForCausalLM(config).eval(), prefill="split")
    for field, of_rank, arguments in (
        ("first slot and number of tokens of the chunk", model, {"input_ids": ids[:, rank:]}),
        ("batch", model, {"input_ids": ids.repeat(1 + rank, 1)}),
        ("digest of the padding mask", model, {"attention_mask": mask, "position_ids": positions}),
        ("numbers of the model's configuration", other, {}),
    ):
        cache = hf.TreeCache(model.config)
        with torch.no_grad(), pytest.raises(ExchangeError, match=field):
            of_rank(**{"input_ids": ids, CACHE_NAME: cache, **LAST, **arguments})
    # Nothing was sent.
    assert _logits_of_chunks(model, ids, [20]).isfinite().all()


@on_ranks(2)
def test_a_chunk_beyond_the_layout(rank: int, world_size: int) -> None:
    layout = Contiguous((0, 8, 16))
    model = hf.enable(make_model("llama"), layout=layout, prefill="split")
    with pytest.raises(ValueError, match="has no rank for slot 16; use ContiguousThenCyclic"):
        _logits_of_chunks(model, _ids(17), [17], layout)
    assert _logits_of_chunks(model, _ids(16), [16], layout).isfinite().all()


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
