# SPDX-License-Identifier: BSD-3-Clause
"""A cache of fixed size: the same tokens in every way to generate, and never one slot too many."""

from __future__ import annotations

import copy
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import on_ranks, run_ranks
from tiers import by_world, tiers_of

pytest.importorskip("transformers")

from hf_models import CONFIGS, VOCAB_SIZE, make_model, make_prompts
from tree_attention import BlockCyclic, Contiguous, ContiguousThenCyclic, ShardLayout, hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.cache.growing import CROP_KEEPS
from tree_attention.hf.prompts import forward as prompts

LENGTH = 37  # of the prompts
GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
MAX_LENGTH = LENGTH + 11  # the last token is never fed

# What is generated how, by case: arguments of make_prompts, of generate, and of enable.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "padded": ({}, {}, {}),
    "one sequence": ({"batch": 1}, {}, {}),
    "beams": ({}, {"num_beams": 3}, {}),
    "chunks": ({}, {}, {"prefill_chunk_size": 7}),
    "prompt lookup": (
        {"batch": 1},
        {"prompt_lookup_num_tokens": 3},
        {"max_length": MAX_LENGTH + 2},
    ),
    "int8": ({}, {}, {"kv_dtype": "int8"}),
    "prompts split": ({}, {}, {"prefill": "split"}),
}

plain_model = cache(make_model)
model_to_enable = cache(lambda name: make_model(name))


def layout_of(world_size: int) -> ShardLayout:
    return BlockCyclic(world_size, 4)


def expected_tokens(name: str, case: str) -> Tensor:
    given, arguments, options = CASES[case]
    model = plain_model(name)
    if "kv_dtype" in options:  # which changes tokens
        model = hf.enable(model_to_enable(name), kv_dtype=options["kv_dtype"])
    return model.generate(**make_prompts(**given), **GREEDY, **arguments)


def generate(rank: int, world_size: int, name: str, case: str, expected: Tensor) -> None:
    given, arguments, options = CASES[case]
    options = {"max_length": MAX_LENGTH, "layout": layout_of(world_size), **options}
    model = hf.enable(model_to_enable(name), **options)
    arguments = {**make_prompts(**given), **GREEDY, **arguments, "return_dict_in_generate": True}
    patched = mock.patch.object(prompts, "_forward_own_tokens", wraps=prompts._forward_own_tokens)
    with patched as split_forward:
        output = model.generate(**arguments)
        assert torch.equal(output.sequences, expected)
        held = output[CACHE_NAME]
        assert held.is_compileable and held.get_max_length() == options["max_length"]
        assert int(held.get_seq_length()) == MAX_LENGTH
        held.reset()
        again = model.generate(**arguments, **{CACHE_NAME: held})
        assert torch.equal(again.sequences, expected)
    assert split_forward.called == (case == "prompts split" and world_size > 1)


@by_world([2], [1, 3])
@pytest.mark.parametrize(
    "name,case",
    tiers_of(
        [("llama", case) for case in CASES]
        + [(name, "prompts split") for name in CONFIGS if name != "llama"],
        [("llama", case) for case in ("padded", "prompt lookup", "int8", "prompts split")],
    ),
)
def test_tokens_are_those_of_transformers(name: str, case: str, world_size: int) -> None:
    run_ranks(generate, world_size, name, case, expected_tokens(name, case))


def generate_otherwise(rank: int, world_size: int, expected: Tensor) -> None:
    model = hf.enable(make_model("llama"), max_length=MAX_LENGTH)
    ids = make_prompts(batch=1)["input_ids"]
    assistant = hf.enable(make_model("mistral"), max_length=MAX_LENGTH)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **GREEDY), expected)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeds, **GREEDY), expected[:, LENGTH:])
    with pytest.raises(ValueError, match="need 49 slots"):
        model.generate(inputs_embeds=embeds, max_new_tokens=13)
    split = hf.enable(hf.parallelize(make_model("llama")), max_length=MAX_LENGTH)
    assert torch.equal(split.generate(ids, **GREEDY), expected)


@by_world([1], [2])
def test_assistants_embeddings_and_split_weights(world_size: int) -> None:
    expected = plain_model("llama").generate(**make_prompts(batch=1), **GREEDY)
    run_ranks(generate_otherwise, world_size, expected)


def tokens_of(begin: int, end: int, batch: int = 2) -> Tensor:
    """Keys that say which they are: row and global slot, in every channel of both heads."""
    rows = torch.arange(batch).view(-1, 1, 1, 1) * 1000.0
    return (rows + torch.arange(begin, end).view(1, 1, -1, 1)).repeat(1, 2, 1, 8)


def append(held: hf.TreeCache, count: int, batch: int = 2) -> None:
    begin = int(held.get_seq_length())
    keys = tokens_of(begin, begin + count, batch)
    for i in range(len(held)):
        held.update(keys + 100_000 * i, -keys, i)


def assert_holds(held: hf.TreeCache, length: int) -> None:
    assert held.common_length("test") == length
    buffers = [x for layer in held.layers for x in layer.buffers().values()]
    for x in (*buffers, held.layers[0].progress.length):
        # As torch._dynamo.mark_static_address leaves them: CUDA graphs write to them in place.
        assert x._dynamo_static_input_type == "unguarded"
    slots = held.shard.layout.local_slots(held.shard.rank, 0, length)
    expected = tokens_of(0, length)[:, :, slots]
    for i, layer in enumerate(held.layers):
        assert layer.key_rows.shape[2] == held.shard.count(held.max_length)
        assert torch.equal(layer.key_rows[:, :, : len(slots)], expected + 100_000 * i)
        assert torch.equal(layer.value_rows[:, :, : len(slots)], -expected)


def operate(rank: int, world_size: int, layouts: list[ShardLayout], directory: Path) -> None:
    held = hf.TreeCache(CONFIGS["llama"], layout=layouts[0], max_length=40)
    assert held.get_seq_length() == 0 and held.num_bytes == 0
    for count in (1, 7, 1, 20, 2):
        append(held, count)
    assert_holds(held, 31)
    addresses = [layer.key_rows.data_ptr() for layer in held.layers]
    length = held.get_seq_length()
    copied = copy.deepcopy(held)
    held.crop(-3)
    held.crop(torch.tensor(-2))
    append(held, 1)
    assert_holds(held, 27)
    assert [layer.key_rows.data_ptr() for layer in held.layers] == addresses
    assert length == 31  # what was returned does not go on

    held.batch_select_indices(torch.tensor([0, 0]))
    held.reorder_cache(torch.tensor([1, 0]))
    used = held.shard.count(27)
    for layer in held.layers:
        assert torch.equal(layer.key_rows[0, :, :used], layer.key_rows[1, :, :used])
    held.reset()
    append(held, 30)
    assert_holds(held, 30)
    held.reset()
    append(held, 3, batch=1)  # another batch
    held.batch_repeat_interleave(2)
    held.reset()

    with torch.inference_mode():
        append(copied, 1)
    append(copied, 1)
    assert_holds(copied, 33)
    for layout in layouts:
        copied.reshard(layout)
        assert_holds(copied, 33)
    append(copied, 2)
    copied.save(directory)
    load = partial(hf.TreeCache.load, directory, CONFIGS["llama"], layout=layouts[0])
    assert load().get_seq_length() == 35
    for max_length in (35, 50):
        loaded = load(max_length=max_length)
        assert_holds(loaded, 35)
    append(loaded, 15)
    assert_holds(loaded, 50)
    with pytest.raises(ValueError, match="max_length 34, and cannot hold 35 tokens"):
        load(max_length=34)


@by_world([2], [1, 3])
def test_operations(world_size: int, tmp_path: Path) -> None:
    layouts = [
        BlockCyclic(world_size, 4),
        ContiguousThenCyclic((0,) * world_size + (30,), 3),
        Contiguous((0,) + (20,) * (world_size - 1) + (40,)),
        BlockCyclic(world_size),  # all on the first rank
        BlockCyclic(world_size, 2, (*range(1, world_size), 3)),
    ]
    run_ranks(operate, world_size, layouts, tmp_path)


@by_world([1], [2])
@on_ranks()
def test_what_does_not_fit_is_refused(rank: int, world_size: int) -> None:
    layout = layout_of(world_size)
    held = hf.TreeCache(CONFIGS["llama"], layout=layout, max_length=20)
    append(held, 18)
    for count in (3, 40):
        with pytest.raises(ValueError, match=f"max_length 20, and cannot hold {18 + count} tok"):
            append(held, count)
    append(held, 2)
    assert_holds(held, 20)
    with pytest.raises(ValueError, match="max_length 20, and cannot hold 21 tokens"):
        append(held, 1)
    assert_holds(held, 20)

    model = hf.enable(make_model("llama"), layout=layout, max_length=MAX_LENGTH - 1)
    given = make_prompts()
    refused = partial(pytest.raises, ValueError)
    forward = mock.Mock()
    is_too_short = refused(match=r"has max_length 47, and .* need 48 slots")
    with mock.patch.object(model, "forward", forward), is_too_short:
        model.generate(**given, **GREEDY)
    forward.assert_not_called()
    tokens = model.generate(**given, **GREEDY, use_cache=False)
    assert tokens.shape[1] == LENGTH + 12

    held = hf.TreeCache(model.config, layout=layout, max_length=60)
    output = model.generate(**given, **GREEDY, **{CACHE_NAME: held})
    mask = torch.cat((given["attention_mask"], torch.ones(3, 12)), dim=1)
    # Another turn, with all the tokens and with the new ones only.
    for ids in (output, output[:, -1:]):
        turn = {"input_ids": ids, "attention_mask": mask, CACHE_NAME: held}
        with refused(match=r"has max_length 60, and .* need 61 slots"):
            model.generate(**turn, max_new_tokens=13)
        tokens = model.generate(**turn, max_new_tokens=12, min_new_tokens=12)
        assert tokens.shape[1] == ids.shape[1] + 12
        held.crop(-12)


def test_arguments() -> None:
    config = CONFIGS["llama"]
    with pytest.raises(ValueError, match=r"max_length must be an integer .* 1, got 0"):
        hf.TreeCache(config, max_length=0)
    with pytest.raises(ValueError, match="has no rank for slot 40"):
        hf.TreeCache(config, layout=Contiguous((0, 40)), max_length=41)
    held = hf.TreeCache(config, layout=Contiguous((0, 40)), max_length=40)
    append(held, 1)
    with pytest.raises(ValueError, match="has no rank for slot 39"):
        held.reshard(Contiguous((0, 39)))
    assert_holds(held, 1)


def test_an_interrupted_forward_pass_leaves_no_tokens() -> None:
    held = hf.TreeCache(CONFIGS["llama"], max_length=40)
    append(held, 5)
    held.update(tokens_of(5, 7), tokens_of(5, 7), 0)
    with pytest.raises(RuntimeError, match="did not reach the last layer"):
        append(held, 2)
    held.crop(held.get_seq_length() if CROP_KEEPS else 0)
    assert_holds(held, 5)
    append(held, 4)
    assert_holds(held, 9)


def test_masks_of_fixed_width() -> None:
    """A mask as wide as the cache says the same as one of the tokens so far."""
    model, given = make_model("llama", "tree_attention"), make_prompts()
    held = hf.TreeCache(model.config, max_length=MAX_LENGTH)
    mask = torch.ones(3, MAX_LENGTH, dtype=torch.int64)
    mask[:, :LENGTH] = given["attention_mask"]
    with torch.no_grad():
        expected = plain_model("llama")(**given).logits
        logits = model(given["input_ids"], attention_mask=mask, **{CACHE_NAME: held}).logits
        seen = given["attention_mask"].bool()
        torch.testing.assert_close(logits[seen], expected[seen], atol=1e-4, rtol=1e-4)
        token = given["input_ids"][:, -1:]
        again = copy.deepcopy(held)
        wide = model(token, attention_mask=mask, **{CACHE_NAME: held}).logits
        narrow = model(token, attention_mask=mask[:, : LENGTH + 1], **{CACHE_NAME: again}).logits
        assert torch.equal(wide, narrow)
        for width in (LENGTH, LENGTH + 1, LENGTH + 3):
            with pytest.raises(
                NotImplementedError, match=rf"new tokens\] = \[3, 39\], got \[3, {width}\]"
            ):
                model(token, attention_mask=mask[:, :width], **{CACHE_NAME: held})
            held.crop(0)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@on_ranks(2)
def test_a_chunk_that_is_padding_in_all_rows(rank: int, world_size: int, name: str) -> None:
    """A mask as wide as the cache tells of padding behind the chunk too: no query sees a slot."""
    length, generator = 340, torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB_SIZE, (2, length), generator=generator)
    mask = torch.ones(2, 1024, dtype=torch.int64)
    mask[0, :300] = mask[1, :310] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = []
    for prefill in ("split", "replicated"):
        model = hf.enable(make_model(name), prefill=prefill, max_length=1024)
        held = hf.TreeCache(model.config, max_length=1024)
        patched = mock.patch.object(
            prompts, "_forward_own_tokens", wraps=prompts._forward_own_tokens
        )
        with torch.no_grad(), patched as split_forward:
            for chunk in (slice(0, 256), slice(256, length)):
                found.append(
                    model(
                        ids[:, chunk],
                        attention_mask=mask,
                        position_ids=positions[:, chunk],
                        **{CACHE_NAME: held},
                        logits_to_keep=1,
                    ).logits
                )
        assert split_forward.call_count == (2 if prefill == "split" else 0)
    for split, replicated in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(split, replicated, atol=1e-3, rtol=1e-3)
