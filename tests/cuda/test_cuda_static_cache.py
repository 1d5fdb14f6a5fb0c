# SPDX-License-Identifier: BSD-3-Clause
"""A cache of fixed size on one GPU: `generate` captures the steps, and they never wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import COMPILING, run_ranks

pytest.importorskip("transformers")

from hf_models import make_model, make_prompts
from test_cuda_ranks import group_of, needs_nccl_of_ranks_on_one_gpu
from tree_attention import BlockCyclic, hf
from tree_attention.hf import CACHE_NAME

OP = "append_kv"
GREEDY = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
MAX_LENGTH = 64


@cache
def model_on_device(name: str, which: str) -> Any:
    """`which` keeps the plain model apart from the one that is enabled."""
    return make_model(name).cuda()


def prompts_on_device() -> dict[str, Tensor]:
    return {name: x.cuda() for name, x in make_prompts().items()}


def generate(
    rank: int,
    world_size: int,
    name: str,
    options: dict[str, Any],
    tokens: Tensor,
    backend: str = "gloo",
) -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, layout = model_on_device(name, "enabled"), BlockCyclic(world_size, 4)
    options = {"max_length": MAX_LENGTH, "timeout": COMPILING, **options}
    hf.enable(model, group_of(backend) if world_size > 1 else None, layout, **options)
    for _ in range(3):  # each with a cache of its own: graphs are captured again, not compiled
        assert torch.equal(model.generate(**prompts_on_device(), **GREEDY).cpu(), tokens)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.gpu("torch.compile")), 2],  # over Gloo, not captured
)
def test_generate_captures_the_steps(name: str, world_size: int, cuda: torch.device) -> None:
    tokens = model_on_device(name, "plain").generate(**prompts_on_device(), **GREEDY).cpu()
    counts = run_ranks(generate, world_size, name, {}, tokens, timeout=COMPILING)
    assert counts == ([1] if world_size == 1 else [0, 0])


@pytest.mark.gpu("NCCL")
@needs_nccl_of_ranks_on_one_gpu
@pytest.mark.parametrize("strategy", ["auto", "one_shot"])
def test_steps_with_exchanges_are_captured(strategy: str, cuda: torch.device) -> None:
    tokens = model_on_device("llama", "plain").generate(**prompts_on_device(), **GREEDY).cpu()
    case = "llama", {"strategy": strategy}, tokens, "nccl"
    assert run_ranks(generate, 2, *case, timeout=COMPILING) == [1, 1]


@contextmanager
def host_that_does_not_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Keys of 8 bits meet queries of 16, in columns by 16.
OF_16_BITS = {"dtype": torch.bfloat16, "head_dim": 16}


@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
@torch.no_grad()
def test_an_eager_step_does_not_wait_and_replays(kv_dtype: Any, cuda: torch.device) -> None:
    """Captured by hand: the same graph writes the next slots and sees the next lengths."""
    model = make_model("llama", "tree_attention", **(OF_16_BITS if kv_dtype else {})).cuda()
    tolerance = 1e-4 if kv_dtype is None else 1e-1
    ids = prompts_on_device()["input_ids"]
    fixed = hf.TreeCache(model.config, max_length=MAX_LENGTH, kv_dtype=kv_dtype)
    growing = hf.TreeCache(model.config, kv_dtype=kv_dtype)
    for held in (fixed, growing):
        model(ids, **{CACHE_NAME: held})
    token = ids[:, -1:].clone()

    def step(held: hf.TreeCache) -> Tensor:
        logits: Tensor = model(token, **{CACHE_NAME: held}).logits
        return logits

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), host_that_does_not_wait():
        step(fixed)
    torch.cuda.current_stream().wait_stream(stream)
    step(growing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step(fixed)
    for i in range(MAX_LENGTH - ids.shape[1] - 1):
        token.fill_(3 + i)
        graph.replay()
        torch.testing.assert_close(captured, step(growing), atol=tolerance, rtol=tolerance)
    assert int(fixed.get_seq_length()) == MAX_LENGTH


@torch.no_grad()
def test_tokens_beyond_the_end_are_lost_and_said_so(cuda: torch.device) -> None:
    model = make_model("llama", "tree_attention").cuda()
    ids = prompts_on_device()["input_ids"]
    held = hf.TreeCache(model.config, max_length=ids.shape[1])
    model(ids, **{CACHE_NAME: held})
    kept = [layer.key_rows.clone() for layer in held.layers]
    model(ids[:, -1:], **{CACHE_NAME: held})
    assert all(torch.equal(a.key_rows, b) for a, b in zip(held.layers, kept, strict=True))
    with pytest.raises(ValueError, match="max_length 37, and cannot hold 38 tokens"):
        held.common_length("test")
