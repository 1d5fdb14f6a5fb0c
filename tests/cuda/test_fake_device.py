# SPDX-License-Identifier: BSD-3-Clause
"""Exchange, ring and generation never mix tensors of a device with tensors of the host."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import on_ranks, run_ranks
from dry_device import leave_device
from fake_device import DeviceTensor, counted_copies, fake_cuda, host_that_does_not_wait
from faults import AMPLE
from helpers import assert_same_bits, make_problem
from tree_attention import (
    BlockCyclic,
    ExchangeError,
    lean_decode,
    ring_decode,
    strategies,
    tree_decode,
)
from tree_attention.exchange import Communicator

pytest.importorskip("transformers")

from hf_models import make_model, make_prompts
from tree_attention import hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.cache import shard, window

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="test_cuda_ranks.py and test_cuda_huggingface.py do it there"
)


def test_the_pretence() -> None:
    with fake_cuda():
        x = torch.ones(2, 3).to("cuda")
        assert isinstance(x, DeviceTensor) and x.is_cuda
        view = x[:, 1:]
        view += torch.full((), 2.0)  # numbers may come from the host
        x[torch.tensor([0]), 0] = 7.0  # and so may indices
        assert (2 * x).is_cuda and x.tolist() == x.cpu().tolist() == [[7, 3, 3], [1, 3, 3]]
        host = x.cpu()
        assert not host.is_cuda and host.data_ptr() != x.data_ptr()
        for mistake in (lambda: x + host, lambda: host[x > 2], lambda: torch.cat([x, host])):
            with pytest.raises(RuntimeError, match=r"aten\..*: tensors of cuda:0 and of the host"):
                mistake()
        for made in (
            torch.zeros(2, device="cuda"),
            torch.tensor([1], device="cuda"),
            x.new_ones(1),
        ):
            assert made.is_cuda
        host.copy_(x)
        x.copy_(host)
        with counted_copies() as copies:
            late, expected = x.to("cpu", non_blocking=True), x.tolist()
            stream = torch.cuda.current_stream()
            event = stream.record_event()
            host.zero_().copy_(x, non_blocking=True)
            x.zero_()
            assert late.isnan().all() and host.isnan().all()
            event.synchronize()
            assert late.tolist() == expected and host.isnan().all()
            stream.record_event().synchronize()
            assert host.tolist() == expected
            x.copy_(host)
        assert copies == [("to host", 24), ("to host", 24), ("to device", 24)]


def decode(rank: int, world_size: int, strategy: str) -> list[Tensor]:
    torch.manual_seed(1)
    problem = make_problem(
        seqlen_q=2, ranges="causal", alibi=0.1, key_layout=(0, 1, 1), dtype=torch.bfloat16
    )
    own = problem.shard(BlockCyclic(world_size, 16), rank)
    with fake_cuda():
        q, k, v, ranges = (x.to("cuda") for x in (own.q, own.k, own.v, own.key_ranges))
        options = {
            name: x.to("cuda") if isinstance(x, Tensor) else x for name, x in own.options.items()
        }
        state = tree_decode(q, k, v, ranges, strategy=strategy, **options)
        ring = ring_decode(q, k, v, ranges, **options)
        assert all(x.is_cuda for x in (*state, *ring))
        state, ring = ([x.cpu() for x in pair] for pair in (state, ring))
        leave_device()
    problem.check(*state)
    if strategy == "auto":
        assert_same_bits(state, ring)
    return state


@pytest.mark.parametrize("strategy", strategies())
@on_ranks(2)
def test_call_changed_on_one_rank(rank: int, world_size: int, strategy: str) -> None:
    comm = Communicator(timeout=AMPLE)
    with fake_cuda():
        o, lse = torch.ones(1, 2, 1, 8).to("cuda"), torch.zeros(1, 2, 1).to("cuda")
        for _ in range(2):
            comm.all_merge_states(o, lse, strategy=strategy)
        n = 1 if rank else 2
        with pytest.raises(ExchangeError, match="on rank 1"):
            comm.all_merge_states(o[:, :n], lse[:, :n], strategy=strategy)
        leave_device()


@pytest.mark.parametrize("strategy", ["auto", *strategies()])
def test_decoding(strategy: str) -> None:
    first, *others = run_ranks(decode, 3, strategy)
    for state in others:
        assert_same_bits(state, first)


NUM_TOKENS = 6
LENGTH = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
CASES: dict[str, dict[str, Any]] = {
    "greedy": LENGTH,
    "chunks": LENGTH | {"prefill_chunk_size": 7},
    "beams": LENGTH | {"num_beams": 3},
    "sampling": LENGTH | {"do_sample": True, "temperature": 0.9, "top_k": 50},
}
SEED = 5


def generate(
    rank: int, world_size: int, name: str, arguments: dict[str, Any], tokens: Tensor
) -> None:
    model, prompts = make_model(name), make_prompts()
    with fake_cuda():
        hf.enable(model.to("cuda"), layout=BlockCyclic(world_size, 4), synchronize_logits=True)
        if arguments["do_sample"]:
            hf.seed_ranks(seed=SEED + rank)
        prompts = {name: x.to("cuda") for name, x in prompts.items()}
        found = model.generate(**prompts, **arguments)
        assert found.is_cuda and torch.equal(found.cpu(), tokens)
        leave_device()


@pytest.mark.parametrize(
    "name, case, world_size",
    [("llama", "greedy", 1), ("mistral_window", "greedy", 2), *(("llama", c, 2) for c in CASES)],
)
def test_generation(name: str, case: str, world_size: int) -> None:
    arguments = {key: x for key, x in CASES[case].items() if key != "prefill_chunk_size"}
    torch.manual_seed(SEED)
    tokens = make_model(name).generate(**make_prompts(), **arguments)
    run_ranks(generate, world_size, name, CASES[case], tokens)


def generate_from_parts(rank: int, world_size: int, tokens: Tensor) -> None:
    model, prompts = make_model("llama"), make_prompts()
    with fake_cuda():
        hf.enable(hf.parallelize(model.to("cuda")), layout=BlockCyclic(world_size, 4))
        prompts = {name: x.to("cuda") for name, x in prompts.items()}
        found = model.generate(**prompts, **LENGTH)
        assert found.is_cuda and torch.equal(found.cpu(), tokens)
        leave_device()


def test_weights_that_are_split_on_the_device() -> None:
    """The table of the ranks' tokens goes where the embedding is."""
    tokens = make_model("llama").generate(**make_prompts(), **LENGTH)
    run_ranks(generate_from_parts, 2, tokens)


def on_own_keys(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, **options: Any) -> Any:
    """The part of tree_decode that is not the exchange, which has a host in it over Gloo."""
    kept = {"softmax_scale", "softcap", "out_dtype", "page_table"} & options.keys()
    return lean_decode(q, k, v, ranges, **{name: options[name] for name in kept})


def step_of_fixed_size(rank: int, world_size: int, name: str) -> None:
    model, prompts = make_model(name, "tree_attention"), make_prompts()
    ids, mask = prompts["input_ids"], torch.ones(3, 60, dtype=torch.int64)
    mask[:, : ids.shape[1]] = prompts["attention_mask"]
    layout = BlockCyclic(world_size, 4)
    attend = mock.patch.object(shard, "tree_decode", on_own_keys)
    with fake_cuda(), attend, mock.patch.multiple(window, MARGIN=6, STEP=4):
        model, ids, mask = model.to("cuda"), ids.to("cuda"), mask.to("cuda")
        cache = hf.TreeCache(model.config, layout=layout, max_length=60)
        growing = hf.TreeCache(model.config, layout=layout)
        for held in (cache, growing):
            model(ids, attention_mask=mask[:, : ids.shape[1]], **{CACHE_NAME: held})
        token = ids[:, -1:].clone()
        for length in range(ids.shape[1] + 1, ids.shape[1] + 10):
            with host_that_does_not_wait():
                found = model(token, attention_mask=mask, **{CACHE_NAME: cache}).logits
                model(token, **{CACHE_NAME: copy.deepcopy(cache)})
            narrow = mask[:, :length]
            expected = model(token, attention_mask=narrow, **{CACHE_NAME: growing}).logits
            torch.testing.assert_close(found.cpu(), expected.cpu(), atol=1e-5, rtol=1e-5)
        with pytest.raises(RuntimeError, match="the host waits"), host_that_does_not_wait():
            int(cache.get_seq_length())


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_of_fixed_size_does_not_wait(name: str, world_size: int) -> None:
    run_ranks(step_of_fixed_size, world_size, name)


def generate_at_fixed_size(rank: int, world_size: int, tokens: Tensor) -> None:
    model, prompts = make_model("llama"), make_prompts()
    with fake_cuda():
        hf.enable(model.to("cuda"), layout=BlockCyclic(world_size, 4), max_length=60)
        prompts = {name: x.to("cuda") for name, x in prompts.items()}
        with mock.patch.object(torch, "compile") as compile_:
            found = model.generate(**prompts, **LENGTH)
        assert torch.equal(found.cpu(), tokens)
        compile_.assert_not_called()
        leave_device()


def test_steps_that_go_through_the_host_are_not_captured() -> None:
    """transformers compiles, and captures, the steps with every cache that is compileable."""
    tokens = make_model("llama").generate(**make_prompts(), **LENGTH)
    run_ranks(generate_at_fixed_size, 2, tokens)


@torch.no_grad()
def go_on_elsewhere(rank: int, world_size: int, name: str, options: dict[str, Any]) -> None:
    model = hf.enable(make_model(name), layout=BlockCyclic(world_size, 4), prefill="replicated")
    ids = make_prompts()["input_ids"]
    token = ids[:, -1:]
    cache = hf.TreeCache(model.config, layout=BlockCyclic(world_size, 4), **options)
    model(ids, **{CACHE_NAME: cache})
    stays = copy.deepcopy(cache)
    expected = [model(token, **{CACHE_NAME: stays}).logits for _ in range(3)]
    with fake_cuda():
        model.to("cuda")
        for logits in expected:
            found = model(token.to("cuda"), **{CACHE_NAME: cache}).logits
            assert found.is_cuda
            torch.testing.assert_close(found.cpu(), logits, atol=1e-5, rtol=1e-5)
        assert all(x.is_cuda for layer in cache.layers for x in layer.buffers().values())
        leave_device()


@pytest.mark.parametrize("options", [{}, {"max_length": 48}, {"kv_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral_window"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_cache_follows_the_model_to_a_device(
    world_size: int, name: str, options: dict[str, Any]
) -> None:
    """As one does that was loaded, whose keys are on the host."""
    run_ranks(go_on_elsewhere, world_size, name, options)
