# SPDX-License-Identifier: BSD-3-Clause
"""One prompt for several beams or samples: read once, and shared by their rows."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ..cache.tree_cache import TreeCache
from ..release import CACHE_NAME
from .forward import rope_of_all_positions

# Below so many tokens a call for them and one for the rows' own cost more than reading copies.
LEAST_SHARED = 512
_EXPECTED = {"attention_mask", "position_ids"}


def num_copies(
    model: PreTrainedModel,
    config: GenerationConfig,
    inputs: Mapping[str, Tensor],
    model_kwargs: Mapping[str, Any],
) -> int:
    """The number of equal rows that `generate` makes of one prompt, or 1 where they are not read
    once."""
    ids, mask = inputs.get("input_ids"), model_kwargs.get("attention_mask")
    given = {name for name, x in model_kwargs.items() if isinstance(x, Tensor)}
    copies = max(config.num_beams or 1, config.num_return_sequences or 1)
    if (
        copies == 1
        or ids is None
        or len(ids) != 1
        or ids.shape[1] <= LEAST_SHARED
        or given - _EXPECTED
        or "inputs_embeds" in inputs
        # Padding would need positions, which each model derives in its own way.
        or (mask is not None and not (mask.dim() == 2 and bool(mask.all())))
        or config.output_hidden_states
        # The last token is a forward pass of its own, after all others.
        or rope_of_all_positions(model.config) is not None
    ):
        return 1
    return copies


def read_once(
    model: PreTrainedModel, cache: TreeCache, ids: Tensor, copies: int, chunk_size: int | None
) -> TreeCache:
    """A cache of so many rows that hold the tokens `ids [1, tokens]` but the last one, which the
    first step feeds. `cache` is empty."""
    options: dict[str, Any] = {"use_cache": True, "return_dict": True}
    keeps_the_last: Any = model._supports_logits_to_keep
    if keeps_the_last():
        options["logits_to_keep"] = 1
    ids = ids[:, :-1]
    # If it gets no positions, Bamba counts every chunk from 0 (transformers 5.24).
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    ones, size = torch.ones_like(ids), chunk_size or ids.shape[1]
    for begin in range(0, ids.shape[1], size):
        chunk = ids[:, begin : begin + size]
        end = begin + chunk.shape[1]
        if takes_positions:
            options["position_ids"] = torch.arange(begin, end, device=ids.device)[None]
        model(input_ids=chunk, attention_mask=ones[:, :end], **{CACHE_NAME: cache}, **options)
    return cache.share(copies)
