# SPDX-License-Identifier: BSD-3-Clause
"""Requests of the plug-in that begin with the same blocks, as prefix caching gives them.

The mistakes these tests are for: blocks that are looked for in every layer, or kept into a step in
which requests have others; blocks that another rank counts; groups that are not worth a call.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed import on_ranks
from engine import Engine, stub_of_vllm
from test_steps import OPTIONS
from tiers import tiers, tiers_of
from tree_attention import cascade
from tree_attention.vllm import batches, checks

NINE = range(1, 10)  # of which 512 keys in common are worth a call
TOKENS = dict.fromkeys(NINE, 1)
LEAST = mock.patch.object(cascade, "_LEAST_KEYS_SAVED", 3000)


@pytest.fixture(autouse=True)
def _stub() -> Iterator[None]:
    with stub_of_vllm(), LEAST:
        yield


def engine_of(
    group: Any = None, *, requests: range = NINE, document: int = 512, **more: Any
) -> Engine:
    """Request 0 is a document, with which the other ones begin; each has tokens of its own."""
    engine = Engine(group, block_size=64, num_blocks=100, **more)
    check(engine, {0: document + 30})
    for request in requests:
        engine.fork(request, 0, document // 64 // engine.world_size)
    check(engine, {request: 1 + 7 * request for request in requests})
    return engine


def check(engine: Engine, new_tokens: dict[int, int]) -> list[list[tuple[int, ...]]]:
    """One step, and for each call of `cascade_decode` the rows of its groups."""
    with mock.patch.object(batches, "cascade_decode", wraps=batches.cascade_decode) as calls:
        found, truth = engine.step(new_tokens)
    error = (found.double() - truth).abs().max()
    bound = 1e-5 if engine.dtype == torch.float32 else 0.02
    assert error <= bound * truth.abs().max(), f"{new_tokens}: {error:.2g}"
    return [[group.rows for group in call.kwargs["groups"]] for call in calls.call_args_list]


@pytest.mark.parametrize("name", tiers_of(OPTIONS, quick=["full", "window"]))
def test_steps_are_attention(name: str) -> None:
    engine = engine_of(options=OPTIONS[name])
    # The keys of a window are each request's own.
    groups = [] if "sliding_window" in OPTIONS[name] else [[tuple(range(9))]]
    assert check(engine, TOKENS) == groups
    assert check(engine, TOKENS | {20: 70, 21: 3}) == groups  # prompts beside them


def test_in_bfloat16() -> None:
    assert check(engine_of(dtype=torch.bfloat16, head_dim=32), TOKENS) == [[tuple(range(9))]]


def test_a_cache_of_8_bits() -> None:
    engine = engine_of(options={"kv_cache_dtype": "fp8"}, scales=(0.5, 0.25))
    assert check(engine, TOKENS) == [[tuple(range(9))]]


def test_several_documents_and_one_that_goes_on() -> None:
    """Nine requests of another document between those of the first, of which nine go on alike."""
    engine = engine_of(requests=range(1, 19))
    check(engine, {100: 600})
    others = range(101, 110)
    for request in others:
        engine.fork(request, 100, 8)
    check(engine, {1: 512 - 8})
    for request in range(2, 10):  # begins with what request 1 had for itself too
        engine.fork(request, 1, 16)
    check(engine, dict.fromkeys(others, 1) | dict.fromkeys(range(2, 10), 3))
    new_tokens = {request: 1 for pair in zip(range(1, 10), others, strict=True) for request in pair}
    [groups] = check(engine, new_tokens | dict.fromkeys(range(10, 19), 1))
    first, second = tuple(range(0, 18, 2)), tuple(range(1, 18, 2))
    assert {*groups} == {first + tuple(range(18, 27)), first, second}


def test_groups_are_those_of_the_step() -> None:
    """Requests end, come back with other blocks and change their places."""
    engine = engine_of(requests=range(1, 11))
    assert check(engine, TOKENS) == [[tuple(range(9))]]
    for kept in (engine.blocks, engine.keys, engine.values):
        del kept[1]
    check(engine, {1: 550})  # preempted and read again, into blocks of its own
    assert check(engine, dict.fromkeys([2, 1, *range(3, 11)], 1)) == [[(0, *range(2, 10))]]
    assert check(engine, TOKENS) == [[tuple(range(1, 9))]]


def test_groups_are_found_once_a_step() -> None:
    engine = engine_of()
    with mock.patch.object(batches, "page_groups", wraps=batches.page_groups) as found:
        for step in (1, 2):
            for request in NINE:
                engine.keys[request] = engine.keys[request][:512]
            metadata = engine.builder.build(0, engine.common(TOKENS, torch.full((9,), 511)))
            q = torch.randn(9, 4, 16)
            for window in (None, 20, None):  # of layers, none of which writes
                engine.layer.sliding_window = window
                out = torch.empty_like(q)
                engine.layer.forward(None, q, None, None, engine.cache, metadata, out)
            truths = [
                engine.truth(request, q[row : row + 1], torch.tensor([511]))
                for row, request in enumerate(NINE)
            ]
            assert (out - torch.cat(truths)).abs().max() < 1e-5
            assert found.call_count == step


@pytest.mark.parametrize("document, requests", tiers([(256, 8), (512, 2)], [(192, 9), (1024, 1)]))
def test_few_keys_in_common_are_not_worth_a_call(document: int, requests: int) -> None:
    engine = engine_of(document=document, requests=range(1, 1 + requests))
    assert check(engine, dict.fromkeys(range(1, 1 + requests), 1)) == []


@pytest.mark.parametrize(
    "options, heads",
    tiers([({}, (4, 2))], [({}, (32, 8)), ({"kv_cache_dtype": "fp8"}, (32, 8))]),
)
def test_what_is_worth_a_call_depends_on_the_model(
    options: dict[str, Any], heads: tuple[int, int]
) -> None:
    """With the keys in common that are worth it, of 32 query and 8 key heads of 128 columns."""
    num_heads, num_kv_heads = heads
    with mock.patch.object(cascade, "_LEAST_KEYS_SAVED", None):
        engine = engine_of(
            options=options,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=128,
            document=512 if not options else 320,
        )
        groups = [[tuple(range(9))]] if num_heads == 32 else []
        assert check(engine, TOKENS) == groups


def test_requests_with_several_tokens_are_not_grouped() -> None:
    """Guessed tokens, and questions: a call takes as long as its arithmetic."""
    engine = engine_of()
    assert check(engine, dict.fromkeys(NINE, 2)) == []
    assert check(engine, dict.fromkeys(range(1, 4), 1) | dict.fromkeys(range(4, 10), 2)) == []


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checks.CASCADE_VARIABLE, "0")
    assert check(engine_of(), TOKENS) == []
    monkeypatch.setenv(checks.CASCADE_VARIABLE, "off")
    with pytest.raises(ValueError, match="TREE_ATTENTION_VLLM_CASCADE must be 1, 0 or unset"):
        Engine()


@pytest.mark.parametrize("world_size, interleave", tiers([(2, 16)], [(3, 4), (2, 1)]))
@pytest.mark.parametrize("name", tiers(["full"], ["sinks", "softcap", "alibi", "window"]))
@on_ranks()
def test_context_parallelism(rank: int, world_size: int, name: str, interleave: int) -> None:
    """A rank's blocks have their number of keys of it alone, of tokens `world_size` times more."""
    torch.manual_seed(0)
    group = SimpleNamespace(world_size=world_size, rank=rank, cpu_group=dist.group.WORLD)
    options = {"options": OPTIONS[name], "document": 512 * world_size, "num_kv_heads": 1}
    groups = [] if name == "window" else [[tuple(range(9))]]
    with stub_of_vllm(), LEAST:
        engine = engine_of(group, interleave=interleave, **options)
        assert check(engine, TOKENS) == groups
        assert check(engine, TOKENS | {20: 70}) == groups


@pytest.mark.deep
@on_ranks(2)
def test_context_parallelism_and_a_cache_of_8_bits(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    group = SimpleNamespace(world_size=world_size, rank=rank, cpu_group=dist.group.WORLD)
    options = {"options": {"kv_cache_dtype": "fp8"}, "scales": (0.5, 0.25), "num_kv_heads": 1}
    with stub_of_vllm(), LEAST:
        engine = engine_of(group, interleave=16, document=1024, **options)
        assert check(engine, TOKENS) == [[tuple(range(9))]]
