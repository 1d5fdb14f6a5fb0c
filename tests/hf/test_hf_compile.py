# SPDX-License-Identifier: BSD-3-Clause
"""The decoding forward of an enabled model as one graph, over ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")

from transformers import CompileConfig

from distributed import COMPILING, run_ranks
from hf_models import make_model, make_prompts
from tree_attention import hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.cache import window

STEPS = 80  # over the end of a block and of a buffer
GREEDY = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}


def compiled_model(name: str) -> Any:
    """One layer of each kind: a second of the same takes as long to compile."""
    return make_model(name, **({} if name == "gemma2" else {"num_hidden_layers": 1}))


def decode(rank: int, world_size: int, name: str, padded: bool, steps: int, backend: str) -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = hf.enable(compiled_model(name))
    prompts = make_prompts()
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    if not padded:
        mask = torch.ones_like(mask)
    compiled = torch.compile(model.forward, fullgraph=True, backend=backend)
    # Windows whose prompt has left slots behind.
    with torch.no_grad(), mock.patch.multiple(window, MARGIN=6, STEP=16):
        caches = [hf.TreeCache(model.config, timeout=COMPILING, growth=32) for _ in range(2)]
        for cache in caches:
            model(ids, **{CACHE_NAME: cache}, attention_mask=mask)
        token = ids[:, -1:]
        for _ in range(steps):
            mask = torch.cat((mask, torch.ones_like(token)), 1)
            given = mask if padded else None
            expected = model(token, **{CACHE_NAME: caches[0]}, attention_mask=given).logits
            logits = compiled(token, **{CACHE_NAME: caches[1]}, attention_mask=given).logits
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
            token = expected[:, -1:].argmax(-1)
        if padded:
            mask = torch.cat((mask, torch.ones_like(token)), 1)
            mask[0, -2] = 0
            with pytest.raises(RuntimeError, match="must be one run of ones, but a row has a hole"):
                compiled(token, **{CACHE_NAME: caches[1]}, attention_mask=mask)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.deep
@pytest.mark.parametrize(
    "world_size,name,padded,steps,backend",
    [
        (2, "mistral_window", True, 5, "aot_eager"),
        # Which graphs there are is known before a backend, most of the time, compiles them. Every
        # other layer has a window.
        (2, "gemma2", False, STEPS, "eager"),
        # Of ranks by inductor: test_one_graph_at_fixed_size.
        (1, "llama", True, 5, "inductor"),
    ],
)
def test_decoding_forward_is_one_graph(
    world_size: int, name: str, padded: bool, steps: int, backend: str
) -> None:
    num_graphs = run_ranks(decode, world_size, name, padded, steps, backend, timeout=COMPILING)
    # torch gives up at torch._dynamo.config.recompile_limit, 8.
    assert max(num_graphs) < 8


@pytest.mark.deep
def test_prompt_in_chunks_and_tokens_are_three_graphs() -> None:
    """Of a first chunk, of later ones and of a new token: each takes a model minutes to compile."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = hf.enable(make_model("llama"))  # with a second layer of the same kind
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    ids = torch.randint(0, 50, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache, expected = hf.TreeCache(model.config), hf.TreeCache(model.config)
        for part in (*ids.split(16, dim=1), *ids[:, :4].split(1, dim=1)):
            logits = compiled(part, **{CACHE_NAME: cache}, logits_to_keep=1).logits
            truth = model(part, **{CACHE_NAME: expected}, logits_to_keep=1).logits
            torch.testing.assert_close(logits, truth, atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


def decode_at_fixed_size(
    rank: int, world_size: int, name: str, padded: bool, kv_dtype: str | None, backend: str
) -> None:
    """Up to the last slot, without being compiled again, and an error beyond it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Inductor orders the operations of layers of one kind.
    model = hf.enable(make_model(name) if backend == "inductor" else compiled_model(name))
    ids, padding = make_prompts().values()
    max_length = ids.shape[1] + 70  # over the end of a block
    mask = torch.ones(len(ids), max_length, dtype=torch.int64)
    if padded:
        mask[:, : ids.shape[1]] = padding
    compiled = torch.compile(model.forward, fullgraph=True, backend=backend)
    options = {"timeout": COMPILING, "kv_dtype": kv_dtype}
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(error_on_recompile=True),
        mock.patch.multiple(window, MARGIN=6, STEP=4),  # rings that go round
    ):
        cache = hf.TreeCache(model.config, max_length=max_length, **options)
        growing = hf.TreeCache(model.config, **options)
        for held in (cache, growing):
            model(ids, **{CACHE_NAME: held}, attention_mask=mask[:, : ids.shape[1]])
        token = ids[:, -1:].clone()
        arguments = {CACHE_NAME: cache, "attention_mask": mask if padded else None}
        for length in range(ids.shape[1] + 1, max_length + 1):
            expected = model(token, **{CACHE_NAME: growing}, attention_mask=mask[:, :length]).logits
            logits = compiled(token, **arguments).logits
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
            token = expected[:, -1:].argmax(-1)
        with pytest.raises(ValueError, match=r"append_kv: slot_mapping must be in \[-1, "):
            compiled(token, **arguments)
        if name == "gemma2":
            assert cache.layers[0].key_rows.shape[2] < cache.layers[1].key_rows.shape[2]
    assert int(cache.get_seq_length()) == max_length
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.deep
@pytest.mark.parametrize(
    "world_size,name,padded,kv_dtype,backend",
    [
        (2, "gemma2", True, None, "aot_eager"),
        (2, "llama", False, None, "inductor"),
        (3, "llama", True, "int8", "aot_eager"),
    ],
)
def test_one_graph_at_fixed_size(
    world_size: int, name: str, padded: bool, kv_dtype: str | None, backend: str
) -> None:
    arguments = name, padded, kv_dtype, backend
    run_ranks(decode_at_fixed_size, world_size, *arguments, timeout=COMPILING)


@pytest.mark.deep
def test_a_compiled_pass_longer_than_rings_take_is_refused() -> None:
    model = hf.enable(compiled_model("mistral_window"))
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    for max_length in (None, 300):
        torch._dynamo.reset()
        cache = hf.TreeCache(model.config, max_length=max_length)
        with pytest.raises(Exception, match="a compiled forward pass takes at most 128 tokens"):
            compiled(torch.full((1, 129), 7), **{CACHE_NAME: cache})


def generate_compiled(rank: int, world_size: int, name: str, expected: torch.Tensor) -> None:
    """As on a GPU, where `generate` compiles the forward pass where the cache allows it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = hf.enable(
        compiled_model(name), max_length=100, prefill_chunk_size=16, timeout=COMPILING
    )
    config = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    for _ in range(2):  # with caches of their own
        output = model.generate(**make_prompts(), **GREEDY, compile_config=config)
        assert torch.equal(output, expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.deep
@pytest.mark.parametrize("world_size,name", [(1, "llama"), (2, "gemma2")])
def test_generate_compiles_decoding_once(world_size: int, name: str) -> None:
    expected = compiled_model(name).generate(**make_prompts(), **GREEDY)
    run_ranks(generate_compiled, world_size, name, expected, timeout=COMPILING)
