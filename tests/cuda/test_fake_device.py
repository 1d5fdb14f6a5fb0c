# SPDX-License-Identifier: BSD-3-Clause
"""Exchange, ring and generation never mix tensors of a device with tensors of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from fake_device import DeviceTensor, fake_cuda
from helpers import assert_same_bits, make_problem
from tree_attention import BlockCyclic, ring_decode, strategies, tree_decode

pytest.importorskip("transformers")

from hf_models import make_model, make_prompts
from tree_attention import hf

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
    problem.check(*state)
    if strategy == "auto":
        assert_same_bits(state, ring)
    return state


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


@pytest.mark.parametrize(
    "name, case, world_size",
    [("llama", "greedy", 1), ("mistral_window", "greedy", 2), *(("llama", c, 2) for c in CASES)],
)
def test_generation(name: str, case: str, world_size: int) -> None:
    arguments = {key: x for key, x in CASES[case].items() if key != "prefill_chunk_size"}
    torch.manual_seed(SEED)
    tokens = make_model(name).generate(**make_prompts(), **arguments)
    run_ranks(generate, world_size, name, CASES[case], tokens)
