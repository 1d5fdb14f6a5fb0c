# SPDX-License-Identifier: BSD-3-Clause
"""The part of `verify` that needs transformers: tokens with a sharded cache and without."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ... import hf
from ...hf.weights.plan import CannotSplitError
from ..generate.checkpoint import load, load_tokenizer, make_greedy

Tokens = list[list[int]]
_NEW_TOKENS = 24


def compare(path: Path | None) -> Iterator[tuple[str, Tokens, Tokens]]:
    """Yields the name of a check, HuggingFace's tokens and ours: first of a random model, then of
    the checkpoint in `path`, if any; each with whole weights and with split ones."""
    model = random_llama()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (3, 200), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :50] = mask[2, :199] = 0  # left padding
    yield from _of_all_forms("random Llama, padded batch", model, ids, mask)
    if path is not None:
        # Tokens are compared in float32, since in bfloat16 HuggingFace's own attentions differ.
        tokenizer, model = load_tokenizer(path), load(path, dtype=torch.float32)
        make_greedy(model, path)
        text = "The quick brown fox jumps over the lazy dog. " * 40
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        yield from _of_all_forms(path.name, model, ids, torch.ones_like(ids))


def _of_all_forms(
    name: str, model: Any, ids: Tensor, mask: Tensor
) -> Iterator[tuple[str, Tokens, Tokens]]:
    def generate(model: Any) -> Tokens:
        output = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=_NEW_TOKENS, do_sample=False
        )
        return output[:, ids.shape[1] :].tolist()

    model.set_attn_implementation("sdpa")
    expected = generate(model)
    yield f"HuggingFace tokens: {name}", expected, generate(hf.enable(model))
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    sizes = [n for n in (1, 2) if world_size % n == 0 and model.config.num_key_value_heads % n == 0]
    for size in sizes if world_size > 1 else ():
        try:
            split = hf.parallelize(copy.deepcopy(model), tensor_parallel_size=size)
        except CannotSplitError:
            return
        check = f"HuggingFace tokens: {name}, weights split, tensor_parallel_size {size}"
        yield check, expected, generate(hf.enable(split))


def random_llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,  # scores and logits far from ties
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(copy.deepcopy(config)).eval()
