# SPDX-License-Identifier: BSD-3-Clause
"""transformers' own cache, with keys and values rounded as a cache of 8 bits rounds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tree_attention.hf.options import KV_DTYPES
from tree_attention.reference import quantise


class RoundedCache(DynamicCache):
    """transformers' own cache of what stands in a cache of 8 bits."""

    kv_dtype: torch.dtype
    has_latents: bool

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = [key_states, value_states]
        if self.has_latents:  # a latent and its rotated key are one row
            rows = [torch.cat(rows, dim=3)]
        rounded = []
        for x in rows:
            values, scale = quantise(x, self.kv_dtype)
            rounded.append((values.float() * scale[..., None]).to(x.dtype))
        if self.has_latents:
            rounded = list(rounded[0].split((key_states.shape[3], value_states.shape[3]), dim=3))
        return super().update(*rounded, *args, **kwargs)


def rounded_cache(config: Any, kv_dtype: str) -> RoundedCache:
    rounded = RoundedCache(config=config)
    rounded.kv_dtype = KV_DTYPES[kv_dtype]
    rounded.has_latents = hasattr(config, "kv_lora_rank")
    return rounded
