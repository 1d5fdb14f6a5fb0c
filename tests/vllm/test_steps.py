# SPDX-License-Identifier: BSD-3-Clause
"""Whole steps of the plug-in beside a stub of vLLM: mistakes in ranges, slots, padding and heads.

Sequences begin, grow and end in batches of any mix, in blocks of the cache in any order; whatever
is not written is NaN.
"""

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distributed import on_ranks
from engine import Engine, stub_of_vllm
from tiers import tiers, tiers_of
from tree_attention import ExchangeError
from tree_attention.vllm import batches

# Of request: new tokens. Blocks of queries are 64 long.
STEPS = [
    {0: 5},  # one prompt
    {0: 1, 1: 3, 2: 130},  # ragged prompts beside a token
    {0: 1, 1: 1, 2: 1},  # tokens only
    {1: 1, 3: 64, 4: 64},  # prompts of one length
    {3: 1, 0: 20, 2: 65, 5: 1},  # chunks that follow others, and a prompt of one token at the end
    {5: 1},
]
OPTIONS = {
    "full": {},
    "window": {"sliding_window": 20},
    "softcap": {"logits_soft_cap": 3.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.0, 1.0, -1.0, 4.0])},
    "window and sinks": {"sliding_window": 20, "sinks": torch.tensor([0.0, 1.0, -1.0, 4.0])},
}


def check_steps(engine: Engine) -> None:
    for new_tokens in STEPS:
        found, truth = engine.step(new_tokens)
        error = (found.double() - truth).abs().max()
        bound = 1e-5 if engine.dtype == torch.float32 else 0.02
        assert error <= bound * truth.abs().max(), f"{new_tokens}: {error:.2g}"


@pytest.fixture(autouse=True)
def _stub() -> Iterator[None]:
    with stub_of_vllm():
        yield


@pytest.mark.parametrize(
    "name", tiers_of(OPTIONS, quick=["full", "softcap", "alibi", "window and sinks"])
)
def test_steps_are_attention(name: str) -> None:
    check_steps(Engine(options=OPTIONS[name]))


@pytest.mark.parametrize("block_size", [1, 5, 128])
def test_steps_with_blocks_of_any_size(block_size: int) -> None:
    check_steps(Engine(block_size=block_size, num_blocks=400))


def test_steps_in_bfloat16() -> None:
    check_steps(Engine(dtype=torch.bfloat16, head_dim=32))


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.25)])
@pytest.mark.parametrize("dtype", tiers([torch.float32], [torch.bfloat16]))
def test_steps_with_a_cache_of_8_bits(dtype: torch.dtype, scales: tuple[float, float]) -> None:
    options = {"kv_cache_dtype": "fp8", "sliding_window": 20}
    check_steps(Engine(dtype=dtype, options=options, scales=scales))


@pytest.mark.parametrize("world_size, interleave", tiers([(3, 4)], [(2, 1), (2, 16)]))
@pytest.mark.parametrize("name", tiers_of(OPTIONS, quick=["window and sinks"]))
@on_ranks()
def test_steps_with_context_parallelism(
    rank: int, world_size: int, name: str, interleave: int
) -> None:
    torch.manual_seed(0)
    group = SimpleNamespace(world_size=world_size, rank=rank, cpu_group=dist.group.WORLD)
    with stub_of_vllm():
        check_steps(Engine(group, interleave, num_kv_heads=1, options=OPTIONS[name]))


@on_ranks(2)
def test_steps_with_context_parallelism_and_a_cache_of_8_bits(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    group = SimpleNamespace(world_size=world_size, rank=rank, cpu_group=dist.group.WORLD)
    with stub_of_vllm():
        options = {"kv_cache_dtype": "fp8"}
        check_steps(Engine(group, 16, num_kv_heads=1, options=options, scales=(0.5, 0.25)))


@on_ranks(2, lost=[1])
def test_a_lost_rank_ends_the_step_of_the_others(rank: int, world_size: int) -> None:
    group = SimpleNamespace(world_size=world_size, rank=rank, cpu_group=dist.group.WORLD)
    with stub_of_vllm():
        engine = Engine(group, num_kv_heads=1, timeout=5)
        engine.step({0: 5})
        if rank == 1:
            os._exit(1)
        begin = time.monotonic()
        with pytest.raises(ExchangeError):
            engine.step({0: 1})
        assert time.monotonic() - begin < 8


def test_queries_alone_ask_the_cache() -> None:
    """A layer may be asked again, without keys (LoopCoder)."""
    engine = Engine()
    engine.step({0: 20})
    before, q, out = engine.cache.clone(), torch.randn(1, 4, 16), torch.empty(1, 4, 16)
    position = torch.tensor([19])
    step = engine.builder.build(0, engine.common({0: 1}, position))
    engine.layer.forward(None, q, None, None, engine.cache, step, out)
    assert (out - engine.truth(0, q, position)).abs().max() < 1e-5
    assert torch.equal(before.nan_to_num(7), engine.cache.nan_to_num(7))


@pytest.mark.deep
@on_ranks(4)
def test_a_second_engine_of_another_group(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with stub_of_vllm():
        for ranks in (pairs[rank // 2], dist.group.WORLD):
            group = SimpleNamespace(world_size=ranks.size(), rank=ranks.rank(), cpu_group=ranks)
            check_steps(Engine(group, num_kv_heads=1))


def test_layers_that_share_a_cache_do_not_write() -> None:
    engine = Engine()
    engine.step({0: 5})
    engine.layer.kv_sharing_target_layer_name = "model.layers.0"
    before = engine.cache.clone()
    engine.step({0: 1})
    assert torch.equal(before.nan_to_num(7), engine.cache.nan_to_num(7))


def test_runs_that_measure_memory_compute_nothing() -> None:
    engine, output = Engine(), torch.ones(2, 4, 16)
    assert engine.layer.forward(None, output, output, output, engine.cache, None, output) is output
    assert output.eq(1).all() and engine.cache.isnan().all()


def test_mixed_steps_are_two_calls_whatever_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def lean_decode(q, *arguments, **options):
        calls.append(tuple(q.shape))
        return decode(q, *arguments, **options)

    decode = batches.lean_decode
    monkeypatch.setattr(batches, "lean_decode", lean_decode)
    engine = Engine(num_blocks=400)
    engine.step(dict.fromkeys(range(20), 1) | {20: 10, 21: 70, 22: 3})
    assert calls == [(20, 4, 1, 16), (4, 4, 64, 16)]
    calls.clear()
    engine.step(dict.fromkeys(range(20), 1) | {20: 300})
    assert calls == [(20, 4, 1, 16), (1, 4, 300, 16)]  # one prompt is not copied
