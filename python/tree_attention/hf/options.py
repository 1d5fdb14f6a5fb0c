# SPDX-License-Identifier: BSD-3-Clause
"""The options of a cache, defined once for all functions that make one."""

from datetime import timedelta
from typing import Literal, TypedDict

import torch

from ..deterministic import Blocks, check_size
from ..exchange import DEFAULT_TIMEOUT, GivenStrategy
from ..options import CACHE, check_option_names, lists_options
from ..sharding import ShardLayout

# Dtypes of 8 bits by the names that `kv_dtype` takes.
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class CacheOptions(TypedDict, total=False):
    """The keyword arguments that `TreeCache`, `TreeCache.load` and `enable` have in common.

    Args:
        kv_dtype: "int8", or "fp8" (float8_e4m3fn), keeps keys and values in 8 bits with a float32
            scale for each token and head; None: in the model's dtype.
        max_length: allocates room for so many tokens, all ranks' together, at once, and keeps the
            length on the device: a decoding step waits for nothing on the host, and is one graph
            for torch.compile. None: buffers grow.
        strategy: how ranks exchange their partial states, one of `tree_attention.strategies()` or
            "auto".
        timeout: seconds after which a lost rank becomes an `ExchangeError`.
        deterministic: see `tree_decode`: with a number of slots, for example 4096, which is then
            also the block of the default layout, attention has the same bits on every number of
            ranks. Not for latents or an index that chooses keys, and for layers with a sliding
            window with `max_length` only. Generation on the CPU has the same bits then, if the rest
            of the model has them: with as many threads for each rank. Prompts are "replicated", and
            weights whole.
        far: "cpu" keeps the keys of older tokens of a model on a GPU in the host's memory, where
            the CPU attends to them while the GPU attends to the others (docs/gpu.md, not yet run on
            a GPU). All ranks give it, also those without a GPU, whose keys are all in the host's
            memory. Not with `max_length` or `deterministic`, for latents or an
            index that chooses keys; layers with a sliding window or a state stay on the GPU.
            Prompts are "replicated". None: all keys are where the model is.
        near_tokens: with `far`, of how many of the newest tokens, all ranks' together, the keys
            stay on the GPU; ranks may differ.
    """

    kv_dtype: Literal["int8", "fp8"] | None
    max_length: int | None
    strategy: GivenStrategy
    timeout: float | timedelta
    deterministic: int
    far: Literal["cpu"] | None
    near_tokens: int | None


_DEFAULTS: CacheOptions = {
    "kv_dtype": None,
    "max_length": None,
    "strategy": "auto",
    "timeout": DEFAULT_TIMEOUT,
    "deterministic": 0,
    "far": None,
    "near_tokens": None,
}
takes_cache_options = lists_options(CacheOptions, _DEFAULTS)


class EnableOptions(CacheOptions, total=False):
    """The keyword arguments of `enable` that `from_pretrained` has too."""

    layout: ShardLayout | None
    prefill: Literal["auto", "split", "replicated"]
    prefill_chunk_size: int | None
    synchronize_logits: bool


def with_defaults(op: str, options: CacheOptions) -> CacheOptions:
    """All options of a call of `op`; TypeError, as Python raises it, for names that are none."""
    check_option_names(op, options, _DEFAULTS, CACHE)
    return {**_DEFAULTS, **options}


def blocks_of(options: CacheOptions) -> Blocks:
    """The blocks at which a cache with these options has its attention cut."""
    return Blocks(check_size("TreeCache", options["deterministic"]))
