# SPDX-License-Identifier: BSD-3-Clause
"""Caches after Ctrl-C, and `crop`, which forgets what an interrupted pass has written."""

import re
from unittest import mock

import pytest
import torch
from torch import Tensor

from hf_caches import numbered_keys
from hf_models import CONFIGS, make_model, make_prompts
from test_hf_cache import CONFIG, _append, _stored
from tree_attention import hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.cache import growing as layer_module
from tree_attention.hf.cache.growing import CROP_KEEPS

COPY = Tensor.copy_


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_an_interrupted_reallocation_changes_nothing(name: str, kv_dtype: str | None) -> None:
    """Ctrl-C while values are copied must not leave them smaller than the keys."""
    cache = hf.TreeCache(CONFIGS[name], growth=8, kv_dtype=kv_dtype)
    layer, keys = cache.layers[0], numbered_keys(0, 200).contiguous()
    layer.update(keys, -keys)
    before, dropped = layer.buffers(), layer.dropped
    for number in range(len(before)):
        copied: list[Tensor] = []

        def copy(out: Tensor, x: Tensor, last: int = number, seen: list[Tensor] = copied) -> Tensor:
            if len(seen) == last:
                raise KeyboardInterrupt
            seen.append(COPY(out, x))
            return out

        with mock.patch.object(Tensor, "copy_", copy), pytest.raises(KeyboardInterrupt):
            layer.update(keys, -keys)
        assert len(copied) == number
        assert all(x is before[key] for key, x in layer.buffers().items())
        assert layer.dropped == dropped and layer.length == 200
    layer.update(keys, -keys)
    assert layer.length == 400


@pytest.mark.parametrize("as_tensor", [False, True])
def test_crop_takes_tokens_to_remove(as_tensor: bool) -> None:
    """transformers 5.17 passes tensors; a length that became one would break the masks."""
    cache = hf.TreeCache(CONFIG, growth=8)
    _append(cache, 2, 20)
    for tokens, length in ((-3, 17), (-1, 16), (0, 16), (-99, 0)):
        if tokens == 0 and CROP_KEEPS:
            continue
        cache.crop(torch.tensor(tokens) if as_tensor else tokens)
        assert type(cache.get_seq_length()) is int
        assert cache.get_seq_length() == length
    _append(cache, 2, 9)
    assert torch.equal(_stored(cache.layers[0]), numbered_keys(0, 9))


def test_positive_crop() -> None:
    """Absolute in transformers before 5.17, without meaning since."""
    cache = hf.TreeCache(CONFIG)
    _append(cache, 1, 20)
    if CROP_KEEPS:
        cache.crop(12)
        assert cache.get_seq_length() == 12
        cache.crop(15)
        assert cache.get_seq_length() == 12
    else:
        with pytest.raises(ValueError, match=r"to remove with a minus, got \d+; cache.crop\(-"):
            cache.crop(12)


@pytest.mark.parametrize("max_length", [None, 64])
@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek"])
@torch.no_grad()
def test_an_interrupted_forward_pass_can_be_forgotten(name: str, max_length: int | None) -> None:
    """By `crop`, which first cuts every layer to what all hold; until then nothing is appended."""
    model = make_model(name, "tree_attention")
    hf.enable(model)  # as latents need it
    ids = make_prompts(batch=1)["input_ids"]
    expected = model(ids, **{CACHE_NAME: hf.TreeCache(CONFIGS[name])}).logits[:, -1]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for removed in (0, 3):
        cache = hf.TreeCache(CONFIGS[name], max_length=max_length)
        model(ids[:, :20], **{CACHE_NAME: cache})
        hook = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 20:27], **{CACHE_NAME: cache})
        hook.remove()
        with pytest.raises(
            RuntimeError, match="the last forward pass did not reach the last layer"
        ):
            model(ids[:, 20:], **{CACHE_NAME: cache})
        cache.crop(20 - removed if CROP_KEEPS else -removed)
        assert {layer.length for layer in cache.layers} == {20 - removed}
        found = model(ids[:, 20 - removed :], **{CACHE_NAME: cache}).logits[:, -1]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("max_length", [None, 64])
def test_the_advice_keeps_all_whole_tokens_in_each_release(
    max_length: int | None, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers before 5.17 passes the length to keep, so that crop(0) would keep nothing."""
    monkeypatch.setattr(layer_module, "CROP_KEEPS", keeps)
    cache = hf.TreeCache(CONFIG, max_length=max_length)
    for _ in range(2):
        keys = numbered_keys(0, 10, 1).contiguous()
        for i in range(len(cache)):
            cache.update(keys, -keys, i)
    cache.update(keys, -keys, 0)
    with pytest.raises(RuntimeError, match=r"forget it with cache\.crop") as caught:
        cache.update(keys, -keys, 0)
    eval(re.findall(r"cache\.crop\(.*?\)+", str(caught.value))[0])
    assert {layer.length for layer in cache.layers} == {20}
