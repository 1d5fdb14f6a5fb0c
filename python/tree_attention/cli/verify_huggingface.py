# SPDX-License-Identifier: BSD-3-Clause
"""The part of `verify` that needs transformers: tokens with a sharded cache and without."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from .. import hf
from .checkpoint import load

Tokens = list[list[int]]


def compare(path: Path | None) -> Iterator[tuple[str, Tokens, Tokens]]:
    """Yields the name of a check, HuggingFace's tokens and ours: first of a random model, then of
    the checkpoint in `path`, if any."""
    model = random_llama()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (3, 200), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :50] = mask[2, :199] = 0  # left padding
    yield "HuggingFace tokens: random Llama, padded batch", *both(model, ids, mask, 24)
    if path is not None:
        # Tokens are compared in float32, since in bfloat16 HuggingFace's own attentions differ.
        tokenizer, model = load(path, dtype=torch.float32)
        text = "The quick brown fox jumps over the lazy dog. " * 40
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        yield f"HuggingFace tokens: {path.name}", *both(model, ids, torch.ones_like(ids), 24)


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


def both(model: Any, ids: Tensor, mask: Tensor, new: int) -> tuple[Tokens, Tokens]:
    """The `new` greedy tokens of plain HuggingFace, and those of the model with a sharded cache."""

    def generate() -> Tokens:
        output = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False
        )
        return output[:, ids.shape[1] :].tolist()

    model.set_attn_implementation("sdpa")
    expected = generate()
    hf.enable(model)
    return expected, generate()
