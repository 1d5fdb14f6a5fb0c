# SPDX-License-Identifier: BSD-3-Clause
"""`generate` of an enabled model on one GPU, alone and over two ranks, equals transformers."""

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import run_ranks

pytest.importorskip("transformers")

from transformers import DynamicCache

from hf_models import make_model, make_prompts
from tree_attention import BlockCyclic, hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.cache import latent

NUM_TOKENS = 24
GREEDY = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "chunks": GREEDY | {"prefill_chunk_size": 7},
    "beams": GREEDY | {"num_beams": 3},
    "sampling": GREEDY | {"do_sample": True, "temperature": 0.9, "top_k": 50},
}
SEED = 5


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
    keys = output[CACHE_NAME].layers[0].buffers()["keys"]
    assert isinstance(output[CACHE_NAME], hf.TreeCache) and keys.is_cuda
    assert torch.equal(output.sequences.cpu(), tokens)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2", "gpt_oss"])
def test_greedy_equals_transformers(name: str, world_size: int, cuda: torch.device) -> None:
    """A left-padded batch of 3 in float32."""
    tokens = plain_tokens(name, GREEDY)
    run_ranks(generate, world_size, name, GREEDY, tokens)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_ways_to_generate(case: str, world_size: int, cuda: torch.device) -> None:
    tokens = plain_tokens("llama", CASES[case])
    run_ranks(generate, world_size, "llama", CASES[case], tokens)


def generate_with_synchronized_logits(rank: int, world_size: int, tokens: Tensor) -> None:
    model = hf.enable(model_on_device("llama", "enabled"), synchronize_logits=True)
    assert torch.equal(model.generate(**prompts_on_device(), **GREEDY).cpu(), tokens)
    hf.enable(model)


def test_logits_are_synchronized_on_the_device(cuda: torch.device) -> None:
    tokens = plain_tokens("llama", GREEDY)
    run_ranks(generate_with_synchronized_logits, 2, tokens)


def generate_with_far_keys(rank: int, world_size: int, tokens: Tensor) -> None:
    layout, far = BlockCyclic(world_size, 4), {"far": "cpu", "near_tokens": 6}
    model = hf.enable(model_on_device("llama", "enabled"), layout=layout, **far)
    cache = hf.TreeCache(model.config, layout=layout, growth=4, **far)
    arguments = CASES["chunks"] | {CACHE_NAME: cache}
    assert torch.equal(model.generate(**prompts_on_device(), **arguments).cpu(), tokens)
    assert all(layer.dropped > 0 and layer.key_rows.is_cuda for layer in cache.layers)
    hf.enable(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_far_keys(world_size: int, cuda: torch.device) -> None:
    """Older keys are in the host's memory, to which the CPU attends."""
    tokens = plain_tokens("llama", CASES["chunks"])
    run_ranks(generate_with_far_keys, world_size, tokens)


# Rows of as many columns as DeepSeek's.
LATENTS = {
    "dtype": torch.bfloat16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64,
    "v_head_dim": 8, "initializer_range": 0.1,
}  # fmt: skip
STEPS = torch.arange(3, 9)  # what a text goes on with, whatever a model says


@torch.no_grad()
def logits_of(model: Any, cache: Any) -> Tensor:
    """Of the last position of a prompt, which is read in two parts, and of some steps."""
    device = model.device
    texts = [*make_prompts(1)["input_ids"].tensor_split((20,), dim=1), *STEPS[:, None, None]]
    found = [model(x.to(device), **{CACHE_NAME: cache}).logits[:, -1] for x in texts]
    return torch.cat(found).float().cpu()


def latents_on_device(
    rank: int, world_size: int, expected: Tensor, limit: float, options: dict[str, Any]
) -> None:
    model, layout = make_model("deepseek", **LATENTS).cuda(), BlockCyclic(world_size, 4)
    kind = type(model.model.layers[0].self_attn.kv_b_proj.weight.data)
    with mock.patch.object(latent, "Tensor", kind):  # in a dry run it is a tensor of that device
        hf.enable(model, layout=layout, **options)
        cache = hf.TreeCache(model.config, layout=layout, **options)
        found = logits_of(model, cache)
    assert cache.layers[0].key_rows.is_cuda and cache.layers[0].key_rows.shape[-1] == 576
    torch.testing.assert_close(found, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("options", [{}, {"max_length": 64}], ids=["growing", "fixed"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_latents(world_size: int, options: dict[str, Any], cuda: torch.device) -> None:
    """Steps attend to the rows, and the prompt to keys and values of all heads, as transformers
    does, here in float32."""
    model = make_model("deepseek", **LATENTS)
    in_16_bits = logits_of(model, DynamicCache(config=model.config))
    expected = logits_of(model.float(), DynamicCache(config=model.config))
    limit = 2 * float((in_16_bits - expected).abs().max())
    assert 0 < limit < 0.1 * float(expected.std())
    arguments = expected, limit, options
    run_ranks(latents_on_device, world_size, *arguments)


REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "dtype": ({"head_dim": 16}, "int8", "q must be bfloat16 or float16 on CUDA for keys of 8 bits"),
    "head_dim": ({"head_dim": 12}, None, "head_dim must be a multiple of 8 up to 256 on CUDA"),
    "head_dim of 8 bits": (
        {"head_dim": 8, "dtype": torch.bfloat16}, "fp8", "head_dim must be a multiple of 16 up to"
    ),
}  # fmt: skip


REFUSED_LATENTS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "8 bits": ({}, "int8", "caches latents of 576 columns, .*: k must have the dtype of q on CUDA"),
    "float32": (
        {"dtype": torch.float32}, None, "caches latents of 576 columns, .*: q must be bfloat16 or"
    ),
    "values that prompts make": (
        {"v_head_dim": 6}, None, "makes keys of 72 columns and values of 6 from latents, .*: "
        "head_dim of v must be a multiple of 8 up to 256 on CUDA, got 6",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_LATENTS)
def test_latents_that_are_not_taken(case: str, cuda: torch.device) -> None:
    changes, kv_dtype, message = REFUSED_LATENTS[case]
    model = make_model("deepseek", **LATENTS | changes).cuda()
    kind = type(model.model.layers[0].self_attn.kv_b_proj.weight.data)
    match = f"^enable: DeepseekV3ForCausalLM {message}"
    with mock.patch.object(latent, "Tensor", kind), pytest.raises(ValueError, match=match):
        hf.enable(model, kv_dtype=kv_dtype)
    assert "generate" not in vars(model)


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
