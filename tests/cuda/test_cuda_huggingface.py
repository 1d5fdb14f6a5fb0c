# SPDX-License-Identifier: BSD-3-Clause
"""`generate` of an enabled model on one GPU, alone and over two ranks, equals transformers."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks

pytest.importorskip("transformers")

from hf_models import make_model, make_prompts
from tree_attention import BlockCyclic, hf

NUM_TOKENS = 24
GREEDY = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "chunks": GREEDY | {"prefill_chunk_size": 7},
    "beams": GREEDY | {"num_beams": 3},
    "sampling": GREEDY | {"do_sample": True, "temperature": 0.9, "top_k": 50},
}
SEED = 5
SECONDS = 120.0  # every rank starts CUDA once


@cache
def model_on_device(name: str, which: str) -> Any:
    """`which` keeps the plain model apart from the one that is enabled."""
    return make_model(name).cuda()


def prompts_on_device() -> dict[str, Tensor]:
    return {name: x.cuda() for name, x in make_prompts().items()}


def plain_tokens(name: str, arguments: dict[str, Any]) -> Tensor:
    model = model_on_device(name, "plain")
    torch.manual_seed(SEED)
    arguments = {key: value for key, value in arguments.items() if key != "prefill_chunk_size"}
    tokens = model.generate(**prompts_on_device(), **arguments)
    assert tokens.is_cuda and len(tokens[0, -NUM_TOKENS:].unique()) > NUM_TOKENS // 2
    return tokens.cpu()


def generate(
    rank: int, world_size: int, name: str, arguments: dict[str, Any], tokens: Tensor
) -> None:
    model = hf.enable(model_on_device(name, "enabled"), layout=BlockCyclic(world_size, 4))
    if arguments["do_sample"]:
        hf.seed_ranks(seed=SEED + rank)
    output = model.generate(**prompts_on_device(), **arguments, return_dict_in_generate=True)
    keys = output.past_key_values.layers[0].keys
    assert isinstance(output.past_key_values, hf.TreeCache) and keys.is_cuda
    assert torch.equal(output.sequences.cpu(), tokens)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2", "gpt_oss"])
def test_greedy_equals_transformers(name: str, world_size: int, cuda: torch.device) -> None:
    """A left-padded batch of 3 in float32."""
    tokens = plain_tokens(name, GREEDY)
    run_ranks(generate, world_size, name, GREEDY, tokens, timeout=SECONDS)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_ways_to_generate(case: str, world_size: int, cuda: torch.device) -> None:
    tokens = plain_tokens("llama", CASES[case])
    run_ranks(generate, world_size, "llama", CASES[case], tokens, timeout=SECONDS)


def generate_with_synchronized_logits(rank: int, world_size: int, tokens: Tensor) -> None:
    model = hf.enable(model_on_device("llama", "enabled"), synchronize_logits=True)
    assert torch.equal(model.generate(**prompts_on_device(), **GREEDY).cpu(), tokens)
    hf.enable(model)


def test_logits_are_synchronized_on_the_device(cuda: torch.device) -> None:
    tokens = plain_tokens("llama", GREEDY)
    run_ranks(generate_with_synchronized_logits, 2, tokens, timeout=SECONDS)


REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "dtype": ({"head_dim": 16}, "int8", "q must be bfloat16 or float16 on CUDA for keys of 8 bits"),
    "head_dim": ({"head_dim": 12}, None, "head_dim must be a multiple of 8 up to 256 on CUDA"),
    "head_dim of 8 bits": (
        {"head_dim": 8, "dtype": torch.bfloat16}, "fp8", "head_dim must be a multiple of 16 up to"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_attention_does_not_take_is_refused_before_generate(
    case: str, cuda: torch.device
) -> None:
    """And by a cache that was told nothing of the model, with the first keys."""
    changes, kv_dtype, reason = REFUSED[case]
    model = make_model("llama", **changes).cuda()
    message = f"which attention does not take on cuda: lean_decode: {reason}"
    with pytest.raises(ValueError, match=f"^enable: LlamaForCausalLM has keys of .* {message}"):
        hf.enable(model, kv_dtype=kv_dtype)
    assert "generate" not in vars(model)
    cache = hf.TreeCache(model.config, kv_dtype=kv_dtype)
    keys = torch.zeros(1, 2, 3, changes["head_dim"], dtype=model.dtype, device=cuda)
    message = f"keys that attention does not take on cuda: lean_decode: {reason}"
    with pytest.raises(ValueError, match=f"^TreeCache: it is given {message}"):
        cache.update(keys, keys, 0)
    assert not cache.layers[0].is_initialized
