# SPDX-License-Identifier: BSD-3-Clause
"""What a `TreeCache` stores where, how much, and that its operations keep it consistent."""

import copy
import itertools
from functools import partial
from unittest import mock

import pytest
import torch

from distributed import on_ranks, run_ranks

pytest.importorskip("transformers")

from torch import Tensor
from transformers import FalconH1Config, Gemma3nTextConfig, LlamaConfig, MambaConfig, T5Config

from hf_caches import HEAD_DIM, HEADS, numbered_keys
from hf_models import CONFIGS, make_model, make_prompts
from tree_attention import BlockCyclic, Contiguous, ShardLayout, hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.cache.growing import CROP_KEEPS, TreeCacheLayer
from tree_attention.hf.cache.shard import Shard

CONFIG = CONFIGS["llama"]


def _append(cache: hf.TreeCache, batch: int, count: int) -> None:
    begin = cache.get_seq_length()
    keys = numbered_keys(begin, begin + count, batch)
    for layer_idx in range(len(cache)):
        cache.update(keys, -keys, layer_idx)


def _stored(layer: TreeCacheLayer) -> Tensor:
    count = layer.shard.count(layer.length)
    assert torch.equal(layer.value_rows[:, :, :count], -layer.key_rows[:, :, :count])
    return layer.key_rows[:, :, :count]


def _check_slots(rank: int, world_size: int, layout: ShardLayout) -> None:
    cache = hf.TreeCache(CONFIG, layout=layout, growth=5)
    for count in (1, 7, 1, 1, 30, 2):
        _append(cache, 2, count)
        slots = layout.local_slots(rank, 0, cache.get_seq_length())
        for layer in cache.layers:
            assert torch.equal(_stored(layer), numbered_keys(0, 50)[:, :, slots])


@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_slot_is_where_the_layout_says(world_size: int, block: int) -> None:
    run_ranks(_check_slots, world_size, BlockCyclic(world_size, block))


def _check_bytes(rank: int, world_size: int, lengths: list[int]) -> list[int]:
    """The memory that the tensors hold, asked of the allocations themselves."""
    cache = hf.TreeCache(CONFIG)  # default layout and growth
    allocated = []
    for length in lengths:
        _append(cache, 2, length - cache.get_seq_length())
        buffers = [x for layer in cache.layers for x in (layer.key_rows, layer.value_rows)]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in buffers}
        allocated.append(sum(storage.nbytes() for storage in storages.values()))
        assert allocated[-1] == cache.num_bytes
    return allocated


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_memory_is_divided_by_the_world(world_size: int) -> None:
    """Per layer at most a block and a growth step above 1/W of the whole, on every rank."""
    lengths = [1, 64, 65, 1000, 1024, 1025, 5000, 12_345]
    slot_bytes = 2 * 2 * HEADS * HEAD_DIM * 4  # keys and values of two sequences
    per_rank = run_ranks(_check_bytes, world_size, lengths)
    for allocated in per_rank:
        for length, num_bytes in zip(lengths, allocated, strict=True):
            slots = num_bytes / (slot_bytes * CONFIG.num_hidden_layers)
            assert slots <= length / world_size + 64 + 1024
    for length, *allocated in zip(lengths, *per_rank, strict=True):
        assert sum(allocated) >= length * slot_bytes * CONFIG.num_hidden_layers


def test_growing_is_rare_and_reserved_room_is_not_grown() -> None:
    """No copy per token: buffers stay where they are for `growth` tokens."""
    cache = hf.TreeCache(CONFIG, growth=100)
    addresses = []
    for _ in range(250):
        _append(cache, 1, 1)
        addresses.append(cache.layers[0].key_rows.data_ptr())
    assert sum(a != b for a, b in itertools.pairwise(addresses)) == 2
    cache = hf.TreeCache(CONFIG, growth=100)
    cache.reserve(250)
    _append(cache, 1, 1)
    assert cache.layers[0].key_rows.shape[2] == 300
    address = cache.layers[0].key_rows.data_ptr()
    _append(cache, 1, 249)
    assert cache.layers[0].key_rows.data_ptr() == address


def test_a_long_pass_that_a_window_cannot_take_back_is_refused() -> None:
    """It has forgotten what the next token sees; the other layers are not cut either."""
    config = CONFIGS["gemma2"]
    assert config.layer_types == ["sliding_attention", "full_attention"]
    cache = hf.TreeCache(config)
    _append(cache, 1, 20)
    keys = numbered_keys(20, 220, 1)
    cache.update(keys, -keys, 0)
    with pytest.raises(ValueError, match="crop can remove 128 of these 220 tokens, got 200: layer"):
        cache.crop(cache.get_seq_length() if CROP_KEEPS else 0)
    assert [layer.length for layer in cache.layers] == [220, 20]


def test_rows_are_reordered_repeated_and_selected() -> None:
    cache = hf.TreeCache(CONFIG, growth=8)
    cache.reorder_cache(torch.tensor([0]))  # nothing there yet
    _append(cache, 3, 10)
    expected = numbered_keys(0, 10, 3)
    for operation, rows in (
        (lambda: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda: cache.batch_select_indices(torch.tensor([5, 0])), [5, 0]),
    ):
        operation()
        expected = expected[rows]
        for layer in cache.layers:
            assert torch.equal(_stored(layer), expected)


def test_reset_keeps_memory_for_the_same_batch_only() -> None:
    cache = hf.TreeCache(CONFIG, growth=8)
    _append(cache, 2, 10)
    address = cache.layers[0].key_rows.data_ptr()
    cache.reset()
    assert cache.get_seq_length() == 0
    _append(cache, 2, 7)
    assert cache.layers[0].key_rows.data_ptr() == address
    assert torch.equal(_stored(cache.layers[0]), numbered_keys(0, 7))
    cache.reset()
    _append(cache, 1, 3)
    assert torch.equal(_stored(cache.layers[0]), numbered_keys(0, 3, 1))


@pytest.mark.parametrize("max_length", [None, 16])
def test_a_cache_without_tokens_follows_rows_of_any_batch(max_length: int | None) -> None:
    """The buffers that a reset keeps may be of a smaller one."""
    cache = hf.TreeCache(CONFIG, max_length=max_length)
    keys = numbered_keys(0, 7).contiguous()
    for _ in range(2):
        for i in range(len(cache)):
            cache.update(keys, -keys, i)
        cache.reset()
        cache.reorder_cache(torch.tensor([4, 3, 2]))
        cache.batch_select_indices(torch.tensor([7]))
        cache.batch_repeat_interleave(3)
        assert cache.get_seq_length() == 0
        keys = numbered_keys(0, 7, 5).contiguous()
        for i in range(len(cache)):
            cache.update(keys, -keys, i)
        cache.reorder_cache(torch.tensor([4, 3]))
        assert torch.equal(_stored(cache.layers[-1]), keys[[4, 3]])
        cache.reset()


def test_buffers_outlive_inference_mode() -> None:
    """In-place writes to tensors of an ended inference mode are errors."""
    model = make_model("llama", "tree_attention")
    ids = make_prompts(batch=1)["input_ids"]
    cache = hf.TreeCache(model.config)
    with torch.inference_mode():
        model(ids[:, :-1], **{CACHE_NAME: cache})
        cache.reorder_cache(torch.tensor([0]))
    found = model.generate(ids, **{CACHE_NAME: cache}, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, model.generate(ids, max_new_tokens=5, do_sample=False))


@on_ranks(2)
def test_a_prefix_can_be_copied(rank: int, world_size: int) -> None:
    """A common prefix is computed once and copied for each of its continuations."""
    model = hf.enable(make_model("llama"), layout=BlockCyclic(world_size, 4))
    ids = make_prompts(batch=1)["input_ids"]
    prefix = hf.TreeCache(model.config, layout=BlockCyclic(world_size, 4))
    with torch.no_grad():
        model(ids[:, :20], **{CACHE_NAME: prefix})
    for end in (30, 37):
        found = model.generate(
            ids[:, :end], **{CACHE_NAME: copy.deepcopy(prefix)}, max_new_tokens=5, do_sample=False
        )
        expected = model.generate(ids[:, :end], max_new_tokens=5, do_sample=False)
        assert torch.equal(found, expected)
    assert prefix.get_seq_length() == 20


def test_lengths_and_bytes_of_an_empty_cache() -> None:
    cache = hf.TreeCache(CONFIG)
    assert len(cache) == CONFIG.num_hidden_layers
    assert cache.get_seq_length() == 0
    assert cache.layers[0].get_max_length() == -1
    assert cache.layers[0].get_max_cache_shape() == -1
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert cache.num_bytes == 0
    assert not cache.is_compileable


def test_another_batch_is_refused() -> None:
    cache = hf.TreeCache(CONFIG)
    _append(cache, 2, 3)
    with pytest.raises(ValueError, match="holds 2 sequences, got new tokens of 3; repeat the sequ"):
        _append(cache, 3, 1)


def test_a_full_contiguous_layout_is_refused() -> None:
    cache = hf.TreeCache(CONFIG, layout=Contiguous((0, 5)))
    _append(cache, 1, 5)
    with pytest.raises(ValueError, match=r"has no rank for slot 5; use ContiguousThenCyclic"):
        _append(cache, 1, 1)


def test_slots_are_those_asked_for_while_another_thread_asks_for_others() -> None:
    """Copies of a cache share what is remembered of the last call."""
    shard = Shard()
    device = torch.device("cpu")
    slots = partial(shard.slots, device=device, is_own=False)
    first, other = (((b, b + 3, device, False), slots(b, b + 3)) for b in (0, 7))
    changing = mock.PropertyMock(side_effect=[first, other])
    with mock.patch.object(Shard, "_last", changing, create=True):
        assert slots(0, 3).tolist() == [0, 1, 2]


def test_offloading_is_refused() -> None:
    cache = hf.TreeCache(CONFIG)
    for move in (cache.layers[0].offload, cache.layers[0].prefetch):
        with pytest.raises(NotImplementedError, match="TreeCache: offloading is not supported"):
            move()


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(TypeError, match=r"such as model\.config, got a LlamaForCausalLM$"):
        hf.TreeCache(make_model("llama"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="growth must be an integer of at least 1, got 0"):
        hf.TreeCache(CONFIG, growth=0)
    with pytest.raises(ValueError, match="layout must have the group's world size 1, got one of 2"):
        hf.TreeCache(CONFIG, layout=BlockCyclic(2))
    with pytest.raises(ValueError, match=r"strategy must be one of auto, .* got 'telepathy'"):
        hf.TreeCache(CONFIG, strategy="telepathy")


def test_models_that_cache_something_else_are_refused() -> None:
    with pytest.raises(ValueError, match="must be a decoder, got 't5'"):
        hf.TreeCache(T5Config())
    with pytest.raises(ValueError, match="'falcon_h1' has hybrid"):
        hf.TreeCache(FalconH1Config())
    with pytest.raises(ValueError, match="those of 'mamba' are linear_attention"):
        hf.TreeCache(MambaConfig())
    with pytest.raises(ValueError, match="'gemma3n_text' shares keys between layers"):
        hf.TreeCache(Gemma3nTextConfig())
    hf.TreeCache(LlamaConfig())


def test_tokens_of_another_kind_are_refused() -> None:
    cache = hf.TreeCache(CONFIG)
    _append(cache, 2, 5)
    other = numbered_keys(5, 6)
    message = r"TreeCache: the cache holds {} of \(dtype, num_heads_kv, head_dim\) = "
    kind = r"\(torch.float32, 2, 8\), got "
    for keys, values, name, got in (
        (other.bfloat16(), other.bfloat16(), "keys", r"\(torch.bfloat16, 2, 8\)"),
        (other, other.double(), "values", r"\(torch.float64, 2, 8\)"),
        (other[:, :1], other[:, :1], "keys", r"\(torch.float32, 1, 8\)"),
        (other, other[..., :4], "values", r"\(torch.float32, 2, 4\)"),
    ):
        with pytest.raises(ValueError, match=message.format(name) + kind + got):
            cache.update(keys, values, 0)
    assert cache.get_seq_length() == 5
    cache.reset()
    cache.update(other.bfloat16(), other.bfloat16(), 0)
    assert cache.layers[0].key_rows.dtype == torch.bfloat16
