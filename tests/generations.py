# SPDX-License-Identifier: BSD-3-Clause
"""Prompts for tests of generation, and what transformers itself makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PAD = 0  # in the vocabularies of all models of the tests


def left_padded(
    vocab_size: int, length: int, paddings: Sequence[int], seed: int
) -> dict[str, Tensor]:
    """A random prompt for each number of paddings, which come first; `length` tokens with them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab_size, (len(paddings), length), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate(paddings):
        ids[row, :padding] = PAD
        mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(
    model: Any, prompts: dict[str, Tensor], **options: Any
) -> tuple[Tensor, Tensor, float]:
    """Tokens of a model, their logits [steps, batch, vocab], and how far apart the best two are at
    the step where they are nearest."""
    options |= {"output_logits": True, "return_dict_in_generate": True}
    output = model.generate(**prompts, **options)
    logits = torch.stack(output.logits)
    best = logits.topk(2).values
    return output.sequences, logits, (best[..., 0] - best[..., 1]).min().item()
