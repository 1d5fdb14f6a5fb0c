# SPDX-License-Identifier: BSD-3-Clause
"""Prompts for tests of generation, what transformers makes of them, and the ways to read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

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
    with stable_choices():
        output = model.generate(**prompts, **options)
    logits = torch.stack(output.logits)
    best = logits.topk(2).values
    return output.sequences, logits, (best[..., 0] - best[..., 1]).min().item()


@contextmanager
def stable_choices() -> Iterator[None]:
    """An index of transformers takes the first of equal scores, as topk of torch does not."""

    def topk(x: Tensor, k: int, dim: int = -1) -> Any:
        values, slots = x.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), slots.narrow(dim, 0, k)))

    with mock.patch.object(torch.Tensor, "topk", topk):
        yield


def greedy(num_tokens: int) -> dict[str, Any]:
    """Arguments of generate for so many tokens, each the best."""
    return {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """torch.empty is filled with NaN: slots of a cache that nothing was written to are not read."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def same_on_all_ranks(results: Sequence[Sequence[Tensor]]) -> None:
    """Whether all ranks returned the same bits."""
    first, *others = results
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def ways_to_read(layout: Any) -> Iterator[dict[str, Any]]:
    """Options of `enable`: this layout and the usual one, prompts split and not, whole and in
    chunks, of which every two meet."""
    for each, prefill, size in (
        (layout, "replicated", None),
        (layout, "split", 9),
        (None, "replicated", 9),
        (None, "split", None),
    ):
        yield {"layout": each, "prefill": prefill, "prefill_chunk_size": size}
