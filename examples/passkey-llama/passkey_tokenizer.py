# SPDX-License-Identifier: BSD-3-Clause
"""The tokenizer of the passkey model, which `train_passkey.py` trains with it."""

from __future__ import annotations

import random
from typing import Any

import passkey

VOCABULARY = 1024
MAX_POSITIONS = 16384


def make_tokenizer(prose: list[str], seed: int) -> Any:
    """A byte-level BPE with one token per digit; the task's phrases are in its training text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    phrases = []
    for label in passkey.LABELS * 40:
        key = passkey.random_key(rng, held_out=False)
        phrases.append(passkey.needle(label, key) + passkey.question(label) + passkey.answer(key))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    labels = [f" {label}" for label in passkey.LABELS] * 1500  # so that each becomes one token
    tokenizer.train_from_iterator(prose + phrases + labels, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
