# SPDX-License-Identifier: BSD-3-Clause
"""Calls of `generate` that an enabled model refuses before the first step."""

from collections.abc import Mapping
from typing import Any

import transformers
from packaging.version import Version
from transformers import GenerationConfig, MaxTimeCriteria

from .cache.shard import Shard
from .cache.tree_cache import TreeCache
from .release import CACHE_NAME

# Older releases prefill wrong tokens when a cache that holds some already is filled in chunks.
CHUNKS_AFTER_CACHED_TOKENS = Version(transformers.__version__) >= Version("5.23")


def check_settings(config: GenerationConfig, arguments: Mapping[str, Any], world_size: int) -> None:
    """Refuses caches of transformers, attention weights, and clocks that differ by rank."""
    # transformers unsets "hybrid", which checkpoints had for layers with a window, and no other.
    if config.cache_implementation in ("sliding_window", "hybrid_chunked"):
        config.cache_implementation = None
    if config.cache_implementation not in (None, "dynamic"):
        raise unsupported_cache(config.cache_implementation)
    if config.output_attentions:
        raise NotImplementedError(
            "generate: output_attentions is not supported, as the attention weights are never "
            "formed; use attn_implementation='eager' without enable"
        )
    criteria = arguments.get("stopping_criteria") or ()
    if world_size > 1 and (
        config.max_time is not None
        or any(isinstance(criterion, MaxTimeCriteria) for criterion in criteria)
    ):
        raise NotImplementedError(
            "generate: max_time is not supported over several ranks: their clocks differ, and "
            "a rank that stops alone leaves the others waiting; use max_new_tokens"
        )


def check_given_cache(cache: object, shard: Shard) -> None:
    """Refuses a cache that the caller gives and that is not for the model's `shard`."""
    if not isinstance(cache, TreeCache):
        raise ValueError(
            f"generate: {CACHE_NAME} of an enabled model must be a TreeCache, "
            f"got {type(cache).__name__}"
        )
    if cache.shard.world_size != shard.world_size:
        raise ValueError(
            f"generate: the cache is for a world of {cache.shard.world_size} and the model was "
            f"enabled for one of {shard.world_size}: make the cache in the group of the model, "
            "after init_process_group, or move its tokens with cache.save and TreeCache.load"
        )
    if shard.world_size > 1 and cache.shard.layout != shard.layout:
        raise ValueError(
            f"generate: the cache has the layout {cache.shard.layout} and the model was "
            f"enabled with {shard.layout}: call enable(model, layout=...) with the "
            "cache's, or cache.reshard with the model's"
        )
    if shard.blocks.size and cache.shard.blocks != shard.blocks:
        raise ValueError(
            f"generate: the cache has {cache.shard.blocks} and the model was enabled with "
            f"{shard.blocks.size}: make or load the cache with it"
        )


def check_cached_prompt(
    arguments: Mapping[str, Any], num_prompt: int, num_cached: int, has_whole_text: bool
) -> None:
    """Refuses a prompt without a new token, and chunks where transformers has them wrong."""
    if num_cached > 0 and has_whole_text and num_cached >= num_prompt:
        raise ValueError(
            f"generate: the cache holds {num_cached} tokens and the prompt has {num_prompt}; "
            "at least one token must be new: call cache.crop(-1), or pass only the new tokens "
            "with an attention_mask over all tokens"
        )
    size = arguments.get("prefill_chunk_size")
    if num_cached > 0 and size is not None and not CHUNKS_AFTER_CACHED_TOKENS:
        raise NotImplementedError(
            "generate: prefill_chunk_size with a cache that holds tokens needs transformers "
            f">= 5.23, got {transformers.__version__}"
        )


def unsupported_cache(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"generate: cache_implementation={name!r} is not supported by an enabled model, whose "
        "cache is a TreeCache: leave it out; enable(model, max_length=...) gives a fixed size, and "
        "kv_dtype='int8' keys and values of 8 bits"
    )
