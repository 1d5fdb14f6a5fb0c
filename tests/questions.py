# SPDX-License-Identifier: BSD-3-Clause
"""Rows of a document and a question each, in a batch where questions are padded in front, and what
transformers answers to each row alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hf_families
import hf_models
from generations import PAD, generated, greedy
from rounded_caches import rounded_cache
from tree_attention.hf import CACHE_NAME

# Of each kind of attention: grouped heads, windows, softcap, sinks, latents, ALiBi.
KINDS = ("llama", "mistral_window", "gemma2", "gpt_oss", "deepseek", "BLOOM", "MPT")
DOCUMENT = 26  # tokens, padding in front included
NUM_TOKENS = 6


class Answer(NamedTuple):
    tokens: Tensor  # [NUM_TOKENS]
    logits: Tensor  # [NUM_TOKENS, vocab]
    margin: float  # how far apart the best two logits are where they are nearest


def make_model(name: str) -> Any:
    if name in hf_models.CONFIGS:
        return hf_models.make_model(name)
    families = hf_families.WORKING | hf_families.OWN_ATTENTION | hf_families.HYBRIDS
    return hf_families.make_model(families[name])


def questions_behind(
    documents: Sequence[int], questions: Sequence[int], is_common: bool = False
) -> dict[str, Tensor]:
    """A batch with a row for each question of so many tokens, behind a document of so many, each
    padded in front. With `is_common` all documents have the same tokens."""
    generator = torch.Generator().manual_seed(3)
    batch, width = len(questions), DOCUMENT + max(questions)
    ids = torch.randint(3, 97, (batch, width), generator=generator)
    if is_common:
        ids[:, :DOCUMENT] = ids[:1, :DOCUMENT]
    mask = torch.ones_like(ids)
    for row, (document, question) in enumerate(zip(documents, questions, strict=True)):
        mask[row, : DOCUMENT - document] = 0
        mask[row, DOCUMENT : width - question] = 0
    return {"input_ids": ids.where(mask > 0, PAD), "attention_mask": mask}


def answers_alone(
    model: Any, texts: dict[str, Tensor], kv_dtype: str | None = None
) -> list[Answer]:
    """Transformers' answer to each row, in a batch of one without padding."""
    found = []
    for ids, mask in zip(texts["input_ids"], texts["attention_mask"], strict=True):
        own = ids[mask > 0][None]
        prompt = {"input_ids": own, "attention_mask": torch.ones_like(own)}
        options = greedy(NUM_TOKENS)
        if kv_dtype is not None:
            options[CACHE_NAME] = rounded_cache(model.config, kv_dtype)
        tokens, logits, margin = generated(model, prompt, **options)
        found.append(Answer(tokens[0, -NUM_TOKENS:], logits[:, 0], margin))
    return found


def check_answers(output: Any, answers: Sequence[Answer], kv_dtype: str | None = None) -> None:
    """What `generate` returned for the batch against the answer to each row alone."""
    logits = torch.stack(output.logits)
    for row, answer in enumerate(answers):
        error = (logits[:, row] - answer.logits).abs().max().item()
        assert torch.equal(output.sequences[row, -NUM_TOKENS:], answer.tokens), (row, error)
        # A sum in another order may be rounded to another of 8 bits.
        bound = answer.margin / (5 if kv_dtype else 10)
        assert error < bound, f"row {row}: {error}, bound {bound}"


def ask(model: Any, texts: dict[str, Tensor], **options: Any) -> Any:
    return model.generate(
        **texts, **greedy(NUM_TOKENS), **options, output_logits=True, return_dict_in_generate=True
    )
