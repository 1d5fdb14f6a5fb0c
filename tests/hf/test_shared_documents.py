# SPDX-License-Identifier: BSD-3-Clause
"""One document, many questions: rows that share a document are answered as each is alone.

The mistakes these tests are for: a document that is stored or counted once for each row, a row that
sees another row's tokens or an empty slot of the block where the document ends, tokens of the cache
that was shared that overwrite what others read, bytes that a crop or a copy adds.
"""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import AMPLE_SECONDS, run_ranks
from tiers import tiers

pytest.importorskip("transformers")

import hf_families
from generations import nan_in_new_memory, same_on_all_ranks
from pairwise import by_tier
from questions import (
    DOCUMENT,
    KINDS,
    Answer,
    answers_alone,
    ask,
    check_answers,
    make_model,
    questions_behind,
)
from tree_attention import BlockCyclic, Contiguous, ContiguousThenCyclic, cascade, hf, lean_decode
from tree_attention.hf import CACHE_NAME, parts
from tree_attention.hf.cache import window
from tree_attention.hf.prompts import copies
from window_caches import crop, crop_to

HYBRIDS = ("Qwen3-Next", "LFM2", "Jamba")
QUICK = [("llama", None), ("llama", "int8"), ("Qwen3-Next", None)]
JAMBA = hf_families.HYBRIDS["Jamba"]
Kind = tuple[str, str | None]  # with the dtype of the keys
Case = tuple[str, str | None, int, int]  # a kind, the number of a layout, a world
KINDS_OF_KEYS = [
    *((name, None) for name in (*KINDS, *HYBRIDS)),
    *product(("llama", "gemma2", "deepseek", "BLOOM"), ("int8", "fp8")),
    *((name, "int8") for name in HYBRIDS),
    ("mistral_window", "int8"),
    ("gpt_oss", "int8"),
]


def _texts(name: str) -> list[dict[str, Tensor]]:
    """Three questions, and four others."""
    if name in HYBRIDS:  # whose questions have one length
        return [questions_behind((26,) * n, (5,) * n, is_common=True) for n in (3, 4)]
    return [
        questions_behind((26,) * len(sizes), sizes, is_common=True)
        for sizes in ((7, 4, 2), (1, 6, 5, 3))
    ]


def _read(model: Any, texts: dict[str, Tensor], layout: Any, kv_dtype: str | None) -> hf.TreeCache:
    """The document of the texts, in a cache of one row."""
    cache = hf.TreeCache(model.config, layout=layout, kv_dtype=kv_dtype, growth=16)
    with torch.no_grad():
        model(texts["input_ids"][:1, :DOCUMENT], **{CACHE_NAME: cache}, logits_to_keep=1)
    return cache


def _layouts(world_size: int, name: str) -> list[Any]:
    bounds = (*range(0, 10 * world_size, 10), 100)
    shares = (3, 1, 0)[:world_size]
    layouts = [BlockCyclic(world_size, 4, shares), BlockCyclic(world_size, 64), Contiguous(bounds)]
    if name not in ("BLOOM", "MPT"):  # whose key_layout it has not
        layouts.append(ContiguousThenCyclic((*bounds[:-1], max(10 * world_size, 20)), 3))
    return layouts


def _answered(
    rank: int, world_size: int, cases: list[Case], wanted: dict[Kind, Any]
) -> list[Tensor]:
    found = []
    for name, kv_dtype, number, _ in cases:
        layout = _layouts(world_size, name)[number]
        (texts, others), (first, second) = _texts(name), wanted[name, kv_dtype]
        model = hf.enable(make_model(name), layout=layout, kv_dtype=kv_dtype)
        with mock.patch.multiple(window, MARGIN=7, STEP=3), nan_in_new_memory():
            cache = _read(model, texts, layout, kv_dtype)
            shared, more = cache.share(3), cache.share(4)
            for _ in range(2):
                output = ask(model, texts, **{CACHE_NAME: shared})
                check_answers(output, first, kv_dtype)
                found.append(torch.stack(output.logits))
                if name in (*HYBRIDS, "mistral_window", "gemma2", "gpt_oss"):
                    shared = cache.share(3)  # states and windows of slots that are gone
                else:
                    crop(shared, int(shared.get_seq_length()) - DOCUMENT)
            # The document goes on, too, and what was shared before does not notice.
            one = {key: x[1:2] for key, x in texts.items()}
            if one["attention_mask"].all():
                check_answers(ask(model, one, **{CACHE_NAME: cache}), first[1:2], kv_dtype)
            output = ask(model, others, **{CACHE_NAME: more})
            check_answers(output, second, kv_dtype)
            found.append(torch.stack(output.logits))
    return found


@functools.cache
def _alone(name: str, kv_dtype: str | None) -> list[list[Answer]]:
    return [answers_alone(make_model(name), x, kv_dtype) for x in _texts(name)]


def _in_layouts(kinds: Sequence[Kind], worlds: Sequence[int]) -> list[Case]:
    return [
        (*kind, number, world_size)
        for kind, world_size in product(kinds, worlds)
        for number in range(len(_layouts(world_size, kind[0])))
    ]


@pytest.mark.parametrize(
    "cases",
    by_tier(
        _in_layouts(QUICK, [2]),
        _in_layouts(KINDS_OF_KEYS, [1, 2, 3]),
    ),
)
def test_rows_are_answered_as_each_is_alone(cases: list[Case]) -> None:
    wanted = {(name, kv_dtype): _alone(name, kv_dtype) for name, kv_dtype, *_ in cases}
    same_on_all_ranks(run_ranks(_answered, cases[0][-1], cases, wanted))


def _turns(name: str) -> list[Tensor]:
    """What three rows have said after each of two turns behind one document, by transformers."""
    model, generator = make_model(name), torch.Generator().manual_seed(3)
    said = torch.randint(3, 97, (1, 41), generator=generator).expand(3, -1)
    turns = list[Tensor]()
    for count in (6, 7):
        asked = torch.cat([said, torch.randint(3, 97, (3, count), generator=generator)], 1)
        said = model.generate(asked, attention_mask=torch.ones_like(asked), **_SHORT)
        turns += [asked, said]
    return turns


_SHORT: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def _turn_after_turn(rank: int, world_size: int, wanted: dict[str, list[Tensor]]) -> None:
    for (name, turns), is_split in product(wanted.items(), (False, True)):
        if is_split and name == "BLOOM":
            continue
        for shares in ((1, 0, 2)[:world_size], (0, 0, 1)[-world_size:]):
            model, layout = make_model(name), BlockCyclic(world_size, 4, shares)
            if is_split:
                model = hf.parallelize(model, shares=shares)
            hf.enable(model, layout=layout)
            with mock.patch.multiple(window, MARGIN=7, STEP=3), torch.no_grad():
                cache = hf.TreeCache(model.config, layout=layout, growth=16)
                model(turns[0][:1, :41], **{CACHE_NAME: cache}, logits_to_keep=1)
                shared = cache.share(3)
                for asked, said in zip(turns[::2], turns[1::2], strict=True):
                    mask = torch.ones_like(asked)
                    found = model.generate(
                        asked, attention_mask=mask, **{CACHE_NAME: shared}, **_SHORT
                    )
                    assert torch.equal(found, said), (name, shares, is_split)


@pytest.mark.deep
@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_go_on_for_a_second_turn(world_size: int) -> None:
    """With unequal shares of keys and of weights, some of which are empty."""
    names = ("llama", "gemma2", "deepseek", "BLOOM", "Qwen3-Next")
    wanted = {name: _turns(name) for name in names}
    run_ranks(_turn_after_turn, world_size, wanted, timeout=AMPLE_SECONDS)


def _storages(*caches: hf.TreeCache) -> dict[int, int]:
    """The bytes of all memory in which caches hold keys and values, by its address."""
    buffers = list[Tensor]()
    for layer in (layer for cache in caches for layer in cache.kv_layers):
        buffers += layer.buffers().values()
        buffers += layer.prefix.buffers.values() if layer.prefix is not None else ()
    storages = [x.untyped_storage() for x in buffers]
    return {x.data_ptr(): x.nbytes() for x in storages if x.nbytes() > 0}


def _append(cache: hf.TreeCache, keys: Tensor) -> None:
    for i in range(len(cache)):
        cache.update(keys, -keys, i)


def _in_memory(rank: int, world_size: int, kv_dtype: str | None) -> None:
    model = make_model("llama")
    config, generator = model.config, torch.Generator().manual_seed(1)
    cache = hf.TreeCache(config, layout=BlockCyclic(world_size, 16), kv_dtype=kv_dtype, growth=256)
    slot = 2 * 2 * 2 * (4 * 8 if kv_dtype is None else 8 + 4)  # layers, keys and values, heads
    document = torch.randn(1, 2, 1024 * world_size, 8, generator=generator)
    _append(cache, document)
    assert cache.num_bytes == 1024 * slot
    shared = cache.share(8)
    assert shared.num_bytes == 1024 * slot
    assert _storages(cache, shared) == _storages(cache)
    _append(shared, torch.randn(8, 2, 64 * world_size, 8, generator=generator))
    most = (1024 + 8 * 64) * slot
    assert shared.num_bytes == most == sum(_storages(cache, shared).values())
    assert repr(shared).startswith(f"TreeCache({1088 * world_size:,} tokens in 8 sequences")
    # Copies, beams and crop touch the rows' own tokens alone.
    held = {*_storages(cache)}
    copied = copy.deepcopy(shared)
    copied.reorder_cache(torch.tensor([7, *range(7)]))
    copied.batch_select_indices(torch.tensor([0, 3]))
    assert held < {*_storages(copied)}
    assert copied.num_bytes == (1024 + 2 * 64) * slot
    for layer, other in zip(shared.kv_layers, copied.kv_layers, strict=True):
        for name, x in layer.buffers().items():
            places = layer.held()
            assert len(places) == 64
            assert torch.equal(x[:, :, places][[7, 2]], other.buffers()[name][:, :, places])
    copied.batch_repeat_interleave(2)
    assert copied.num_bytes == (1024 + 4 * 64) * slot
    # The cache that was shared goes back, and others still read what it held.
    before = [x.clone() for layer in shared.kv_layers for x in layer.prefix.buffers.values()]
    crop(cache, 1000)
    _append(cache, torch.randn(1, 2, 1000, 8, generator=generator))
    again = cache.share(2)
    cache.reset()
    _append(cache, torch.randn(1, 2, 1500, 8, generator=generator))
    assert again.kv_layers[0].prefix.length == 1024 * world_size
    after = [x for layer in shared.kv_layers for x in layer.prefix.buffers.values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    # Without either, the memory is free.
    seen = weakref.ref(shared.kv_layers[0].prefix)
    shared.reset()
    assert shared.get_seq_length() == 0 and not shared.is_shared
    _append(shared, document)
    assert shared.num_bytes == 1024 * slot
    del layer, shared, copied, before, after
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("world_size", tiers([1], [2, 3]))
@pytest.mark.parametrize("kv_dtype", tiers([None], ["int8"]))
def test_the_document_is_stored_once(world_size: int, kv_dtype: str | None) -> None:
    run_ranks(_in_memory, world_size, kv_dtype)


def test_what_is_refused(tmp_path: Path) -> None:
    config = make_model("llama").config
    cache = hf.TreeCache(config)
    with pytest.raises(ValueError, match=r"TreeCache\.share: the cache holds no tokens; give them"):
        cache.share(2)
    keys = torch.randn(1, 2, 30, 8)
    _append(cache, keys)
    for batch, kind, got in (
        (0, ValueError, "0"),
        (-1, ValueError, "-1"),
        (2.0, TypeError, "2.0"),
        (True, TypeError, "True"),
        ("2", TypeError, "'2'"),
        (None, TypeError, "None"),
    ):
        with pytest.raises(kind, match=f"TreeCache: batch of share must be an int.*, got {got}"):
            cache.share(batch)
    shared = cache.share(3)
    calls = {
        "share": lambda: shared.share(2),
        "save": lambda: shared.save(tmp_path),
        "reshard": lambda: shared.reshard(BlockCyclic(1, 8)),
    }
    for name, call in calls.items():
        with pytest.raises(
            ValueError, match=rf"TreeCache\.{name}: the rows of this cache share their first tokens"
        ):
            call()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="holds 3 sequences, got new tokens of 2; repeat"):
        _append(shared, torch.randn(2, 2, 1, 8))
    _append(shared, torch.randn(3, 2, 4, 8))
    with pytest.raises(
        ValueError,
        match="can remove 4 of these 34 tokens, got 5: all rows share the first 30; crop the cache",
    ):
        crop(shared, 5)
    assert shared.get_seq_length() == 34
    with pytest.raises(RuntimeError, match="no tensor has the keys of rows that share 30 tokens"):
        _ = shared.layers[0].keys
    crop(shared, 4)
    shared.update(torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4, 8), 0)
    cache.update(keys[:, :, :1], keys[:, :, :1], 0)
    for each in (shared, cache):
        with pytest.raises(RuntimeError, match="did not reach the last layer"):
            each.update(keys, keys, 0)
    with pytest.raises(ValueError, match=r"TreeCache\.share: the layers hold 30 to 31 tokens"):
        cache.share(2)
    crop_to(cache, 30)
    crop_to(shared, 30)
    cache.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match=r"must hold one sequence, got 2; take one with batch_sel"):
        cache.share(2)
    fixed = hf.TreeCache(config, max_length=40)
    _append(fixed, keys)
    with pytest.raises(ValueError, match=r"share: the cache has max_length 40, and what is shared"):
        fixed.share(2)
    blocks = hf.TreeCache(config, deterministic=16)
    _append(blocks, keys)
    with pytest.raises(ValueError, match=r"TreeCache\.share: deterministic is not supported"):
        blocks.share(2)


def test_states_have_the_digits_of_the_result() -> None:
    """They are float32 until they are merged, and take no longer than results in bfloat16."""
    model = make_model("llama").to(torch.bfloat16)
    hf.enable(model)
    texts, calls = _texts("llama")[0], list[dict[str, Any]]()

    def noting(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return lean_decode(*arguments, **options)

    cache = _read(model, texts, None, None)
    with (
        mock.patch.object(parts, "lean_decode", noting),
        mock.patch.object(cascade, "lean_decode", noting),
    ):
        ask(model, texts, **{CACHE_NAME: cache.share(3)})
    dtypes = {(options["out_dtype"], options["result_dtype"]) for options in calls}
    assert dtypes == {(torch.float32, torch.bfloat16)}


@pytest.mark.deep
@pytest.mark.skipif(not JAMBA.exists, reason="this release of transformers has no Jamba")
def test_states_that_a_pass_of_several_tokens_forgets_are_shared() -> None:
    """Rows' questions are read token by token; beams share their prompt, which is read whole."""
    model = hf_families.make_model(JAMBA)
    texts = _texts("Jamba")[0]
    answers = answers_alone(model, texts)
    wanted = _said(model, "beams").sequences
    hf.enable(model)
    cache = _read(model, texts, None, None)
    check_answers(ask(model, texts, **{CACHE_NAME: cache.share(3)}), answers)
    with mock.patch.object(copies, "LEAST_SHARED", 8):
        output = _said(model, "beams")
    assert torch.equal(output.sequences, wanted) and output[CACHE_NAME].is_shared


OPERATIONS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 4, "temperature": 0.9},
    "sampled beams": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2},
    "chunks": {"num_beams": 2, "prefill_chunk_size": 9},
}


def _options(name: str) -> dict[str, Any]:
    return {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **OPERATIONS[name]}


def _one_prompt() -> dict[str, Tensor]:
    texts = questions_behind((26,), (11,))
    assert texts["attention_mask"].all()
    return texts


def _said(model: Any, operation: str) -> Any:
    torch.manual_seed(7)
    return model.generate(**_one_prompt(), **_options(operation), return_dict_in_generate=True)


def _ways(name: str) -> list[dict[str, Any]]:
    ways: list[dict[str, Any]] = [{}, {"prefill_chunk_size": 8}]
    if name not in ("BLOOM", "MPT", *HYBRIDS):
        ways.append({"prefill": "split"})
    return ways


def _copies(
    rank: int,
    world_size: int,
    cases: list[tuple[str, str, int, int]],
    wanted: dict[tuple[str, str], Tensor],
) -> None:
    for name, operation, way, _ in cases:
        options = _ways(name)[way]
        model = hf.enable(make_model(name), layout=BlockCyclic(world_size, 4), **options)
        rows = list[int]()
        base = getattr(model, model.base_model_prefix)
        base.register_forward_pre_hook(
            lambda _, args, kwargs, rows=rows: rows.append(
                len((*args, kwargs.get("input_ids"))[0])
            ),
            with_kwargs=True,
        )
        for least, first in ((8, 1), (512, None)):  # read once, and not
            rows.clear()
            with (
                mock.patch.object(copies, "LEAST_SHARED", least),
                mock.patch.multiple(window, MARGIN=7, STEP=3),
                nan_in_new_memory(),
            ):
                output = _said(model, operation)
            assert torch.equal(output.sequences, wanted[name, operation]), (
                name,
                operation,
                options,
            )
            assert rows[0] == (first or rows[-1]) and rows[-1] > 1
            # All layers of this one have windows, which are copied.
            is_shared = first == 1 and name != "mistral_window"
            assert output[CACHE_NAME].is_shared == is_shared


def _in_ways(names: Sequence[str], worlds: Sequence[int]) -> list[tuple[str, str, int, int]]:
    return [
        (name, operation, way, world_size)
        for name, operation, world_size in product(names, OPERATIONS, worlds)
        for way in range(len(_ways(name)))
    ]


@pytest.mark.parametrize(
    "cases",
    by_tier(_in_ways(("llama",), [2]), _in_ways((*KINDS, *HYBRIDS[:2]), [1, 2, 3])),
)
def test_beams_and_samples_read_their_prompt_once(cases: list[tuple[str, str, int, int]]) -> None:
    wanted = {
        (name, operation): _said(make_model(name), operation).sequences
        for name, operation, *_ in cases
    }
    run_ranks(_copies, cases[0][-1], cases, wanted)
