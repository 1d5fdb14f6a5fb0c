# SPDX-License-Identifier: BSD-3-Clause
"""Caches that a caller reads, or changes by hand, as the layers of transformers' own can be.

The mistakes these tests are for: rows shown that are no tokens, a change that attention does not
see, and keys of a wrong place attended to because something was changed behind the cache's back.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import on_ranks

pytest.importorskip("transformers")

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_models import make_model, make_prompts
from tree_attention import BlockCyclic, hf
from tree_attention.hf import CACHE_NAME

LENGTH = 28
TOKEN = torch.tensor([[5], [6]])
IDS = make_prompts(batch=2, length=LENGTH)["input_ids"] | 4  # without padding

with_max_length = pytest.mark.parametrize("max_length", [None, 64])
of_each_kind = pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek"])


def filled(name: str = "llama", **options: Any) -> tuple[Any, hf.TreeCache]:
    """An enabled model and a cache with its keys of a prompt."""
    model = hf.enable(make_model(name))
    cache = hf.TreeCache(model.config, **options)
    with torch.no_grad():
        model(IDS, **{CACHE_NAME: cache})
    return model, cache


def of_transformers(name: str) -> tuple[Any, DynamicCache]:
    model = make_model(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, **{CACHE_NAME: cache})
    return model, cache


@torch.no_grad()
def step(model: Any, cache: Any) -> Tensor:
    logits: Tensor = model(TOKEN, **{CACHE_NAME: cache}).logits
    return logits


def _shows_latents() -> bool:
    """transformers has cached latents since 5.17."""
    return of_transformers("deepseek")[1].layers[0].keys.shape[1] == 1


@with_max_length
@of_each_kind
def test_keys_and_values_are_those_of_the_tokens_in_use(name: str, max_length: int | None) -> None:
    if name == "deepseek" and not _shows_latents():
        pytest.skip("this release of transformers caches keys of all heads")
    (model, cache), (plain, expected) = filled(name, max_length=max_length), of_transformers(name)
    for count in range(3):
        assert len([*cache]) == len(expected.layers)
        for layer, other, (keys, values, window) in zip(
            cache.layers, expected.layers, cache, strict=True
        ):
            assert keys is layer.keys and values is layer.values
            torch.testing.assert_close(keys, other.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(values, other.values, rtol=1e-4, atol=1e-4)
            of_other = getattr(other, "sliding_window", None)
            assert (None if window is None else int(window)) == of_other
            assert layer.device == other.keys.device and layer.dtype == other.keys.dtype
        if count == 1:
            # In place, as codes that change cached values do.
            for layer in (*cache.layers, *expected.layers):
                layer.keys[:, :, 2:6] *= 1.7
                layer.values *= 0.6  # which assigns the tensor that was shown
        torch.testing.assert_close(step(model, cache), step(plain, expected), rtol=1e-3, atol=1e-3)


def test_there_are_no_keys_before_there_are_tokens() -> None:
    cache = hf.TreeCache(make_model("llama").config)
    assert [*cache] == [(None, None, None)] * 2


@pytest.mark.parametrize(
    "compress",
    [
        lambda layer, x: setattr(layer, "keys", x),
        lambda layer, x: setattr(layer, "values", x),
        lambda layer, x: setattr(layer, "keys", torch.cat((layer.keys, x), dim=2)),
        lambda layer, _: delattr(layer, "keys"),
        lambda layer, _: delattr(layer, "values"),
    ],
)
@with_max_length
@of_each_kind
def test_replacing_keys_is_refused(
    name: str, max_length: int | None, compress: Callable[[Any, Tensor], None]
) -> None:
    """What codes that compress a cache do, such as kvpress; the cache stays as it was."""
    model, cache = filled(name, max_length=max_length)
    expected = step(model, copy.deepcopy(cache))
    for layer in cache.layers:
        with pytest.raises(NotImplementedError, match="of a layer cannot be replaced or removed"):
            compress(layer, layer.keys[:, :, ::2])
    assert torch.equal(step(model, cache), expected)


@pytest.mark.parametrize(
    "move",
    [
        lambda x: setattr(x, "data", x[:, :, :14].clone()),
        lambda x: x.set_(torch.zeros(1)),
        lambda x: x.resize_(1, 1, 1, 1),
        lambda x: torch.utils.swap_tensors(x, torch.zeros(2, 2, 14, 8)),
    ],
)
@with_max_length
def test_tensors_made_to_show_other_memory_are_refused(
    move: Callable[[Tensor], object], max_length: int | None
) -> None:
    """`DynamicCache` would attend to that memory."""
    for number in range(2):
        model, cache = filled(max_length=max_length)
        for given in (cache, copy.deepcopy(cache)):
            values = given.layers[number].values
            move(values)
            del values
            with pytest.raises(NotImplementedError, match="the values of a layer cannot be repla"):
                step(model, given)


def test_a_copy_of_a_cache_that_was_read_goes_on() -> None:
    model, cache = filled()
    expected = step(model, copy.deepcopy(cache))
    for layer in cache.layers:
        assert layer.keys.shape[2] == layer.values.shape[2] == LENGTH
    copied = copy.deepcopy(cache)
    copied.layers[0].keys.zero_()
    assert not torch.equal(step(model, copied), expected)
    assert torch.equal(step(model, cache), expected)
    cache.crop(-1)
    assert cache.layers[0].keys.shape[2] == LENGTH
    cache.reset()
    assert cache.layers[0].keys.shape[2] == 0


def test_keys_that_no_view_shows_are_refused() -> None:
    model, cache = filled("gemma2")
    for _ in range(230):
        step(model, cache)
    ring, whole = cache.layers
    assert whole.keys.shape[2] == LENGTH + 230
    with pytest.raises(RuntimeError, match="the keys of a sliding window of 8 lie in a ring"):
        _ = ring.keys
    assert ring.buffers()["keys"][:, :, ring.held()].shape[2] == LENGTH + 230 - ring.first
    with pytest.raises(RuntimeError, match=r"with kv_dtype are torch\.int8 with scales"):
        _ = filled(kv_dtype="int8")[1].layers[0].keys


@with_max_length
@torch.no_grad()
def test_keys_read_inside_a_forward_pass(max_length: int | None) -> None:
    """By a hook of a layer, which may ask for the keys of its tokens."""
    model = hf.enable(make_model("llama"))
    cache, found = hf.TreeCache(model.config, max_length=max_length), []
    attention = model.model.layers[0].self_attn
    hook = attention.register_forward_hook(lambda *_: found.append(cache.layers[0].keys.shape[2]))
    if max_length is None:
        model(IDS, **{CACHE_NAME: cache})
        assert found == [LENGTH]
    else:
        with pytest.raises(RuntimeError, match="are whole between forward passes"):
            model(IDS, **{CACHE_NAME: cache})
    hook.remove()


def _replaced_layer(cache: hf.TreeCache) -> None:
    cache.layers[0] = DynamicLayer()


def _foreign_layer(cache: hf.TreeCache) -> None:
    cache.layers[0] = copy.deepcopy(cache).layers[0]


def _foreign_shard(cache: hf.TreeCache) -> None:
    cache.shard = hf.TreeCache(make_model("llama").config).shard


@pytest.mark.parametrize(
    "change",
    [
        _replaced_layer,
        _foreign_layer,
        _foreign_shard,
        lambda cache: cache.layers.reverse(),
        lambda cache: cache.layers.pop(),
    ],
)
@with_max_length
def test_layers_of_other_caches_are_refused(
    change: Callable[[hf.TreeCache], object], max_length: int | None, tmp_path: Any
) -> None:
    model, cache = filled(max_length=max_length)
    change(cache)
    with pytest.raises(RuntimeError, match="layers of the cache, or its shard, were replaced"):
        step(model, cache)
    with pytest.raises(RuntimeError, match=r"TreeCache\.save: layers of the cache, or its shard"):
        cache.save(tmp_path)


def test_attributes_that_say_where_tokens_are() -> None:
    model, cache = filled()
    expected = step(model, copy.deepcopy(cache))
    for name in ("layout", "rank", "world_size", "comm", "blocks"):
        with pytest.raises(AttributeError, match=f"{name} of a cache cannot be set, as its tokens"):
            setattr(cache.shard, name, getattr(cache.shard, name))
    layer = cache.layers[0]
    for use in (lambda: layer.cumulative_length, lambda: setattr(layer, "cumulative_length", 3)):
        with pytest.raises(AttributeError, match=r"a layer has no cumulative_length, as .*get_seq"):
            use()
    with pytest.raises(NotImplementedError, match=r"a layer is not cropped by itself; crop all"):
        layer.crop(-1)
    assert torch.equal(step(model, cache), expected)
    layer.is_initialized = False
    with pytest.raises(RuntimeError, match="is_initialized of a layer was set to False, and the c"):
        step(model, cache)


def test_a_pickled_cache_is_refused() -> None:
    _, cache = filled()
    for write in (pickle.dumps, lambda x: torch.save(x, io.BytesIO())):
        with pytest.raises(TypeError, match=r"cannot be pickled.*with cache\.save\(directory\)"):
            write(cache)


def test_numbers_of_tokens_are_integers() -> None:
    _, cache = filled()
    numpy = pytest.importorskip("numpy")
    for count in (numpy.int64(-1), torch.tensor(-1), torch.tensor([-1])):
        cache.crop(count)
    assert cache.get_seq_length() == LENGTH - 3
    for count in (-2.7, torch.tensor(-2.7), "3", None):
        with pytest.raises(TypeError, match="the argument of crop must be an integer, got"):
            cache.crop(count)
    with pytest.raises(TypeError):
        cache.batch_repeat_interleave(1.5)
    assert cache.get_seq_length() == LENGTH - 3


@pytest.mark.parametrize(
    "rows", [torch.tensor([-1]), torch.tensor([False, True]), [1, 1, 0], slice(1, None)]
)
def test_sequences_are_selected_as_in_transformers(rows: Any) -> None:
    (_, cache), (_, expected) = filled(), of_transformers("llama")
    for given in (cache, expected):
        given.batch_select_indices(rows)
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, rtol=1e-4, atol=1e-4)
    kept = [layer.keys.clone() for layer in cache.layers]
    for wrong in (torch.tensor([7]), torch.tensor([0.0])):
        with pytest.raises(IndexError):
            cache.batch_select_indices(wrong)
    for layer, keys in zip(cache.layers, kept, strict=True):
        assert torch.equal(layer.keys, keys)


@on_ranks(2)
def test_keys_of_several_ranks(rank: int, world_size: int) -> None:
    """None has them all; nothing is changed on one of them without a word."""
    model, cache = filled(layout=BlockCyclic(2, 4))
    expected = step(model, copy.deepcopy(cache))
    layer = cache.layers[0]
    for name in ("keys", "values"):
        with pytest.raises(RuntimeError, match=f"the {name} of a layer are spread over 2 ranks"):
            getattr(layer, name)
        with pytest.raises(NotImplementedError, match=f"the {name} of a layer cannot be replaced"):
            setattr(layer, name, torch.zeros(2, 2, 14, 8))
        own = layer.buffers()[name][:, :, layer.held()]
        assert own.shape[2] == cache.shard.count(LENGTH)
    with pytest.raises(RuntimeError, match="the keys of a layer are spread over 2 ranks"):
        for _ in cache:
            pass
    with pytest.raises(AttributeError, match="layout of a cache cannot be set, as its tokens are"):
        cache.shard.layout = BlockCyclic(2, 1)
    assert torch.equal(step(model, cache), expected)
