# SPDX-License-Identifier: BSD-3-Clause
"""Models with layers that keep a state beside layers whose keys are spread over ranks.

The mistakes these tests are for: a state that misses tokens or sees them twice, rows of a state
that beams do not follow, tokens taken back from keys and not from the state.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import by_world, tiers, tiers_of

pytest.importorskip("transformers")

from transformers.cache_utils import Cache

from generations import left_padded
from hf_families import HYBRIDS, VOCAB_SIZE, make_model
from tree_attention import BlockCyclic, hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.cache.build import goes_on_from_states
from tree_attention.hf.cache.growing import CROP_KEEPS

NUM_TOKENS = 8  # written by every rank of three: slots 29 to 36 are in blocks 7, 8 and 9
GREEDY = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
LOGITS = {"output_logits": True, "return_dict_in_generate": True}
NAMES = [name for name, family in HYBRIDS.items() if family.exists]
if not NAMES:
    pytest.skip("this release of transformers has none of them", allow_module_level=True)
NAME = NAMES[-1]
# Each case of Kimi Linear takes ten times as long as one of the others.
NAMES_QUICK = [name for name in NAMES if name != "Kimi Linear"]


def _prompts(batch: int = 3, length: int = 29) -> dict[str, Tensor]:
    """Padded on the left to one length."""
    return left_padded(VOCAB_SIZE, length, (0, 9, 4)[:batch], seed=4)


@cache
def _expected(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and logits of transformers, which reads the prompt as a whole, and its beams."""
    model = make_model(HYBRIDS[name])
    output = model.generate(**_prompts(), **GREEDY, **LOGITS)
    beams = model.generate(**_prompts(), **GREEDY, num_beams=3)
    assert len(output.sequences[:, -NUM_TOKENS:].unique()) >= NUM_TOKENS // 2
    return output.sequences, torch.stack(output.logits), beams


def _generate(rank: int, world_size: int, expected: dict[str, Any]) -> list[Tensor]:
    found = []
    for name, (tokens, logits, beams) in expected.items():
        layout = BlockCyclic(world_size, 4)
        for size in (None, 9):
            model = hf.enable(make_model(HYBRIDS[name]), layout=layout, prefill_chunk_size=size)
            output = model.generate(**_prompts(), **GREEDY, **LOGITS)
            assert torch.equal(output.sequences, tokens), (name, size)
            torch.testing.assert_close(torch.stack(output.logits), logits, rtol=0, atol=1e-3)
            found += output.logits
            cache = output[CACHE_NAME]
            keys = [layer.key_rows.shape[2] for layer in cache.kv_layers if layer.is_initialized]
            assert keys and cache.state_layers
        assert torch.equal(model.generate(**_prompts(), **GREEDY, num_beams=3), beams), name
    return found


@pytest.mark.parametrize(
    "name, world_size",
    tiers([(NAME, 3)], [(NAME, 1), *((name, 3) for name in NAMES if name != NAME)]),
)
def test_padding_chunks_and_beams(name: str, world_size: int) -> None:
    """Equal tokens, and the same bits on all ranks."""
    results = run_ranks(_generate, world_size, {name: _expected(name)})
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@torch.no_grad()
@pytest.mark.parametrize("name", tiers_of(NAMES, quick=NAMES_QUICK[::3]))
def test_only_states_that_go_on_are_read_in_chunks(name: str) -> None:
    """Where a chunk begins with an empty state, the prompt is read whole."""
    model = make_model(HYBRIDS[name])
    prompt = _prompts(1)
    whole = model(**prompt).logits[:, -1]
    given, length = None, 0
    for ids in prompt["input_ids"].split(9, dim=1):
        places = torch.arange(length, length + ids.shape[1])[None]
        output = model(ids, position_ids=places, **{CACHE_NAME: given}, use_cache=True)
        given, last, length = output[CACHE_NAME], output.logits[:, -1], length + len(places[0])
    goes_on = (last - whole).abs().max().item() < 1e-3
    assert goes_on == goes_on_from_states(model.config)


def _go_on(rank: int, world_size: int, tokens: Tensor, longer: Tensor) -> None:
    """Two turns over one cache, a copy of it, another layout, and a second batch after a reset."""
    layout = BlockCyclic(world_size, 4)
    model = hf.enable(make_model(HYBRIDS[NAME]), layout=layout)
    cache = hf.TreeCache(model.config, layout=layout)
    prompts = _prompts(1)
    first = model.generate(**prompts, **{CACHE_NAME: cache}, **GREEDY)
    ids = _longer(first)
    copied = copy.deepcopy(cache)
    for given, target in ((copied, layout), (cache, BlockCyclic(world_size, 7))):
        given.reshard(target)
        hf.enable(model, layout=target)
        assert torch.equal(model.generate(ids, **{CACHE_NAME: given}, **GREEDY), longer)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model.generate(**_prompts(), **{CACHE_NAME: cache}, **GREEDY), tokens)


def _longer(ids: Tensor) -> Tensor:
    return torch.cat((ids, _prompts(1, 7)["input_ids"]), dim=1)


@by_world([], [2, 1])
def test_a_kept_cache_goes_on(world_size: int) -> None:
    model = make_model(HYBRIDS[NAME])
    first = model.generate(**_prompts(1), **GREEDY, return_dict_in_generate=True)
    longer = model.generate(_longer(first.sequences), **{CACHE_NAME: first[CACHE_NAME]}, **GREEDY)
    run_ranks(_go_on, world_size, _expected(NAME)[0], longer)


def _second_turn(texts: dict[str, Tensor]) -> dict[str, Tensor]:
    more = _prompts(1, 7)["input_ids"].expand(len(texts["input_ids"]), -1)
    return {
        "input_ids": torch.cat((texts["input_ids"], more), dim=1),
        "attention_mask": torch.cat((texts["attention_mask"], torch.ones_like(more)), dim=1),
    }


def _first_turn(model: Any, batch: int) -> tuple[dict[str, Tensor], Any]:
    """All text so far, and the cache."""
    prompts = _prompts(batch)
    first = model.generate(**prompts, **GREEDY, return_dict_in_generate=True)
    seen = torch.ones_like(first.sequences)
    seen[:, : prompts["attention_mask"].shape[1]] = prompts["attention_mask"]
    texts = {"input_ids": first.sequences, "attention_mask": seen}
    return _second_turn(texts), first[CACHE_NAME]


def _save(rank: int, world_size: int, directory: Path, name: str) -> None:
    model = hf.enable(make_model(HYBRIDS[name]), layout=BlockCyclic(world_size, 4))
    for batch in (1, 3):  # of these the second one is padded
        _first_turn(model, batch)[1].save(directory / str(batch))


def _load(
    rank: int, world_size: int, directory: Path, name: str, turns: list[tuple[Any, Tensor]]
) -> None:
    layout = BlockCyclic(world_size, 3)
    model = hf.enable(make_model(HYBRIDS[name]), layout=layout)
    for batch, (texts, expected) in zip((1, 3), turns, strict=True):
        for max_length in (None, 64):
            cache = hf.TreeCache.load(
                directory / str(batch), model.config, layout=layout, max_length=max_length
            )
            found = model.generate(**texts, **{CACHE_NAME: cache}, **GREEDY)
            assert torch.equal(found, expected), (batch, max_length)


@pytest.mark.parametrize(
    "name, saved_by, loaded_by",
    tiers(
        [(NAME, 2, 1)],
        [(NAME, 1, 3)]
        + [(name, *((1, 3), (2, 1))[i % 2]) for i, name in enumerate(NAMES) if name != NAME],
    ),
)
def test_states_are_saved_and_loaded(
    name: str, saved_by: int, loaded_by: int, tmp_path: Path
) -> None:
    """By the tokens of a second turn, as transformers reads the whole text."""
    turns = []
    model = make_model(HYBRIDS[name])
    for batch in (1, 3):
        texts, _ = _first_turn(model, batch)
        turns.append((texts, model.generate(**texts, **GREEDY)))
    run_ranks(_save, saved_by, tmp_path, name)
    run_ranks(_load, loaded_by, tmp_path, name, turns)


@torch.no_grad()
def test_rows_are_repeated_and_selected() -> None:
    model = hf.enable(make_model(HYBRIDS[NAME]))
    prompts = _prompts(2, 20)
    ids = prompts["input_ids"] | 4
    cache, repeated = hf.TreeCache(model.config), hf.TreeCache(model.config)
    repeated.batch_repeat_interleave(2)  # nothing there yet
    model(ids, **{CACHE_NAME: cache})
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 1]))
    rows = [1, 0]
    model(ids[rows], **{CACHE_NAME: repeated})
    token = torch.tensor([[5], [6]])
    found = model(token, **{CACHE_NAME: cache}).logits
    torch.testing.assert_close(found, model(token, **{CACHE_NAME: repeated}).logits)


@torch.no_grad()
def test_what_states_cannot_do_is_refused(tmp_path: Path) -> None:
    model = hf.enable(make_model(HYBRIDS[NAME]))
    ids = _prompts(1)["input_ids"]
    cache = hf.TreeCache(model.config)
    model(ids, **{CACHE_NAME: cache})
    cache.crop(0)  # what transformers calls where nothing is to be taken back
    with pytest.raises(
        ValueError, match="crop cannot take back 3 tokens, as some layers keep a st"
    ):
        cache.crop(-3)
    assert cache.get_seq_length() == ids.shape[1]
    with pytest.raises(
        ValueError, match=r"TreeCache\.save: the cache holds no tokens yet; run the"
    ):
        hf.TreeCache(model.config).save(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="its layers of linear_attention need every token in ord"):
        hf.enable(model, prefill="split")


@pytest.mark.parametrize("name", tiers_of(NAMES, quick=NAMES_QUICK[::3]))
def test_decoding_that_takes_tokens_back_is_refused(name: str) -> None:
    """By transformers, or by the cache where transformers could go back with a state of its own."""
    model = hf.enable(make_model(HYBRIDS[name]))
    assistant = make_model(HYBRIDS[name])
    for options in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}):
        with pytest.raises(
            (ValueError, NotImplementedError),
            match=r"is not supported with stateful models|lookup and assisted decoding take tokens",
        ):
            model.generate(_prompts(1)["input_ids"], **GREEDY, **options)


@pytest.mark.parametrize("max_length", [None, 64])
def test_states_of_an_interrupted_forward_pass_are_not_kept(max_length: int | None) -> None:
    """`crop` forgets such a pass elsewhere, but the first state has its tokens."""
    if "Qwen3-Next" not in NAMES:
        pytest.skip("this release of transformers has no Qwen3-Next")
    family = HYBRIDS["Qwen3-Next"]
    kinds = ["linear_attention", "full_attention"] * 2
    model = make_model(
        replace(family, options={**family.options, "num_hidden_layers": 4, "layer_types": kinds})
    )
    ids = _prompts(1)["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits
        hf.enable(model)
        held = hf.TreeCache(model.config, max_length=max_length)
        model(ids[:, :8], **{CACHE_NAME: held})

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        hook = model.model.layers[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 8:], **{CACHE_NAME: held})
        hook.remove()
        with pytest.raises(ValueError, match="some layers keep a state that has its tokens"):
            held.crop(held.get_seq_length() if CROP_KEEPS else 0)
        held.reset()
        torch.testing.assert_close(
            model(ids, **{CACHE_NAME: held}).logits, expected, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    "name, max_length, count",
    tiers_of(
        product(NAMES, (None, 64), (1, 21)),
        ((name, (None, 64)[i % 2], (21, 1)[i // 2 % 2]) for i, name in enumerate(NAMES_QUICK)),
    ),
)
@torch.no_grad()
def test_a_pass_that_moved_on_states_alone_is_refused(
    name: str, max_length: int | None, count: int, tmp_path: Path
) -> None:
    """It was interrupted before the first layer with keys, whose lengths do not show it.

    One token moves states on in place.
    """
    model = make_model(HYBRIDS[name])
    if count > 1 and not goes_on_from_states(model.config):
        pytest.skip("a pass of several tokens after others is refused before its first layer")
    if name == "OLMo Hybrid" and count == 1 and not hasattr(Cache, "get_conv_state"):
        pytest.skip("before transformers 5.21 its layers do not say for which of them they ask")
    hf.enable(model)
    ids = _prompts(1)["input_ids"]
    held = hf.TreeCache(model.config, max_length=max_length)
    expected = model(ids, **{CACHE_NAME: held}).logits
    held.reset()
    model(ids[:, :8], **{CACHE_NAME: held})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    index = next(i for i, layer in enumerate(held.layers) if layer in held.kv_layers)
    assert index > 0
    hook = model.model.layers[index].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, 8 : 8 + count], **{CACHE_NAME: held})
    hook.remove()
    for interrupted in (held, copy.deepcopy(held)):
        with pytest.raises(RuntimeError, match="did not reach the last layer, and some layers kee"):
            model(ids[:, 8 : 8 + count], **{CACHE_NAME: interrupted})
        with pytest.raises(ValueError, match="some layers keep a state that has its tokens"):
            interrupted.crop(interrupted.get_seq_length() if CROP_KEEPS else 0)
        with pytest.raises(ValueError, match=r"TreeCache\.save: a forward pass has not reached"):
            interrupted.save(tmp_path)
    held.reset()
    found = model(ids, **{CACHE_NAME: held}).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def _ending_in_a_state(name: str) -> Any:
    """A model of three layers, of which the second one has keys."""
    family = HYBRIDS[name]
    kinds = [x for x in make_model(family).config.layer_types if x not in ("moe", "mlp")]
    options = {**family.options, "num_hidden_layers": 3}
    if name not in ("Bamba", "Jamba"):  # these say which layers have keys in another way
        options["layer_types"] = [*kinds, kinds[0]]
    model = make_model(replace(family, options=options))
    assert model.config.layer_types == [*kinds, kinds[0]]
    return model


@pytest.mark.parametrize("name", tiers_of(NAMES, quick=NAMES_QUICK[::6]))
def test_a_second_turn_where_the_last_layer_keeps_a_state(name: str) -> None:
    """The steps of one token before it have ended, though that layer moves on in place."""
    model, plain = hf.enable(_ending_in_a_state(name)), _ending_in_a_state(name)
    options = {**GREEDY, "return_dict_in_generate": True}
    first, expected = (x.generate(**_prompts(1), **options) for x in (model, plain))
    first[CACHE_NAME].crop(first[CACHE_NAME].get_seq_length() if CROP_KEEPS else 0)
    ids = _longer(expected.sequences)
    longer = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **GREEDY}
    found = model.generate(**longer, **{CACHE_NAME: first[CACHE_NAME]})
    assert torch.equal(found, plain.generate(**longer))


@pytest.mark.skipif("Jamba" not in NAMES, reason="this release of transformers has no Jamba")
@pytest.mark.parametrize("max_length", tiers([64], [None]))
@torch.no_grad()
def test_a_pass_that_would_forget_states_is_refused(max_length: int | None) -> None:
    """By the sentence, of which the cache does not notice; `generate` gives tokens one by one."""
    model = hf.enable(make_model(HYBRIDS["Jamba"]))
    ids = _prompts(1)["input_ids"]
    wanted = model(ids).logits[:, -1]
    held = hf.TreeCache(model.config, max_length=max_length)
    model(ids[:, :8], **{CACHE_NAME: held})
    with pytest.raises(
        NotImplementedError, match=r"of several tokens forgets .* has 21 tokens and the cache 8: g"
    ):
        model(ids[:, 8:], **{CACHE_NAME: held})
    for token in ids[:, 8:].split(1, dim=1):
        logits = model(token, **{CACHE_NAME: held}).logits[:, -1]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    first = model.generate(ids[:, :8], **GREEDY)
    for options in ({}, {"prefill_chunk_size": 9}):
        held = hf.TreeCache(model.config, max_length=max_length)
        model.generate(ids[:, :8], **{CACHE_NAME: held}, **GREEDY)
        longer = torch.cat((first, ids[:, 8:]), dim=1)
        found = model.generate(longer, **{CACHE_NAME: held}, **GREEDY, **options)
        assert torch.equal(found, model.generate(longer, **GREEDY))
    with pytest.raises(NotImplementedError, match="to an empty cache, without prefill_chunk_size"):
        model.generate(ids, prefill_chunk_size=9, **GREEDY)


@pytest.mark.parametrize(
    "name",
    tiers_of((x for x in NAMES if not x.startswith("LFM")), quick=NAMES_QUICK[:1]),
)
@torch.no_grad()
def test_a_pass_that_ends_inside_the_last_layer_is_refused(name: str) -> None:
    """Before its recurrent state, in a prompt and in a later pass."""
    model = hf.enable(_ending_in_a_state(name))
    ids = _prompts(1)["input_ids"]
    held = hf.TreeCache(model.config)
    model(ids, **{CACHE_NAME: held})
    update = Cache.update_recurrent_state

    def interrupt(cache: Cache, states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx == 2:
            raise KeyboardInterrupt
        return update(cache, states, layer_idx, *args, **kwargs)

    caches = [hf.TreeCache(model.config)]
    if goes_on_from_states(model.config):  # no later pass of several tokens otherwise
        caches.append(held)
    for given in caches:
        with (
            mock.patch.object(Cache, "update_recurrent_state", interrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            model(ids, **{CACHE_NAME: given})
        with pytest.raises(RuntimeError, match="did not reach the last layer, and some layers kee"):
            model(ids, **{CACHE_NAME: given})
