# SPDX-License-Identifier: BSD-3-Clause
"""Prompts split over ranks: the forward pass of an enabled model, each rank on its own tokens."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from ...shares import Shares
from ...weights.text import takes_more_than_text, text_config
from ..cache.build import goes_on_from_states
from ..cache.token_split import TokenSplit, using_token_split
from ..cache.tree_cache import TreeCache
from ..fingerprint import describe
from ..masks import KeyRanges
from ..overrides import is_overridden
from ..release import CACHE_NAME, OLD_CACHE_NAME

# Where "auto" splits: below so many tokens a rank, exchanges cost more than a rank saves.
_MIN_TOKENS_PER_RANK = 64
# The axes along which arguments of a forward pass run over the tokens of the chunk.
_AXES = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "position_ids": -1,
    "cache_position": -1,
    "token_type_ids": 1,
}
_FOR_ALL_TOKENS = ("attention_mask", CACHE_NAME, "use_cache", "logits_to_keep")
# What ranks would have for their own tokens only.
_OUTPUTS_OF_TOKENS = ("output_hidden_states", "output_attentions", "output_router_logits")
# Arguments of a forward pass over text that this module knows.
KNOWN = frozenset((*_AXES, *_FOR_ALL_TOKENS, *_OUTPUTS_OF_TOKENS, "return_dict"))
# Kinds of rotary embeddings whose frequencies depend on the largest position of the chunk.
_ROPES_OF_ALL_POSITIONS = ("dynamic", "longrope")


def may_be_chunked(config: PreTrainedConfig) -> bool:
    """True where a prompt in chunks is known to give the same as the whole prompt."""
    return rope_of_all_positions(config) is None and goes_on_from_states(config)


def arguments_by_name(signature: inspect.Signature, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a method's call but `self`, also those in its `**kwargs`."""
    arguments = signature.bind(*args, **kwargs).arguments
    del arguments["self"]
    return under_new_name(arguments | arguments.pop("kwargs", {}))


def under_new_name(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with a cache given under its old name under `CACHE_NAME`."""
    if OLD_CACHE_NAME in arguments and CACHE_NAME not in arguments:
        arguments[CACHE_NAME] = arguments.pop(OLD_CACHE_NAME)
    return arguments


def split_forward(
    kind: type[PreTrainedModel], config: PreTrainedConfig, prefill: str, shares: Shares
) -> Any:
    """A function in place of the forward of such a model, which splits the tokens of prompts over
    ranks, by their shares, where that is possible."""
    signature = inspect.signature(kind.forward)
    min_tokens = 1 if prefill == "split" else _MIN_TOKENS_PER_RANK
    # The numbers of the configuration: sizes of the messages follow from them.
    numbers = {name: x for name, x in config.to_dict().items() if isinstance(x, int)}
    sizes = describe(numbers)

    def forward(original: Any, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        arguments = arguments_by_name(signature, self, *args, **kwargs)
        split = _token_split(self, arguments, min_tokens, sizes, shares)
        if split is None:
            return original(*args, **kwargs)
        return _forward_own_tokens(original, arguments, split)

    return forward


def splits_prompts(model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> bool:
    """True where `generate` splits the tokens of long prompts, if there are several ranks."""
    is_split = is_overridden(model, "forward") and not takes_more_than_text(model)
    return is_split and _asks_for_the_last(model, model_kwargs)


def rope_of_all_positions(config: PreTrainedConfig) -> str | None:
    """The type of a rotary embedding that turns a token otherwise in another chunk, or None."""
    parameters = getattr(text_config(config), "rope_parameters", None) or {}
    # A configuration may have rope parameters for each type of layer.
    for each in (parameters, *parameters.values()):
        if isinstance(each, Mapping) and each.get("rope_type") in _ROPES_OF_ALL_POSITIONS:
            return str(each["rope_type"])
    return None


def _token_split(
    model: PreTrainedModel,
    arguments: Mapping[str, Any],
    min_tokens: int,
    sizes: str,
    shares: Shares,
) -> TokenSplit | None:
    """The split of the tokens of a forward pass; None: every rank computes all of them."""
    # Depends only on arguments that all ranks share.
    cache, mask = arguments.get(CACHE_NAME), arguments.get("attention_mask")
    if not isinstance(cache, TreeCache) or cache.shard.world_size == 1 or cache.is_shared:
        return None
    per_token = {name: arguments[name] for name in _AXES if arguments.get(name) is not None}
    tokens = per_token.get("input_ids", per_token.get("inputs_embeds"))
    if tokens is None or not _asks_for_the_last(model, arguments):
        return None
    # A model with several kinds of layers has a mask for each, where `generate` made them, in the
    # order of a set, which is another in each process.
    if isinstance(mask, Mapping):
        masks = [mask[name] for name in sorted(mask)]
    else:
        masks = [] if mask is None else [mask]
    batch, length = tokens.shape[:2]
    if (
        length < max(2, min_tokens * cache.shard.world_size)
        or any(x.shape[_AXES[name]] != length for name, x in per_token.items())
        # The attention refuses other masks.
        or not all(
            isinstance(x, KeyRanges) or (isinstance(x, Tensor) and x.dim() == 2) for x in masks
        )
        # Without positions, models count padding in different ways.
        or (
            "position_ids" not in per_token
            and not all(isinstance(x, Tensor) and x.all() for x in masks)
        )
    ):
        return None
    signature = (
        ("batch", batch),
        ("digest of the padding mask", describe([getattr(x, "ranges", x) for x in masks])),
        ("numbers of the model's configuration", sizes),
        ("dtype", model.dtype),
        ("device", tokens.device.type),
    )
    begin = int(cache.get_seq_length())
    return TokenSplit(cache.shard, begin, length, tokens.device, signature, shares)


def _asks_for_the_last(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """True where the caller wants the logits of the last position alone."""
    logits_to_keep = arguments.get("logits_to_keep")
    if type(logits_to_keep) is not int or logits_to_keep != 1:
        return False
    for name in _OUTPUTS_OF_TOKENS:
        if arguments.get(name, getattr(model.config, name, False)):
            return False
    if arguments.get("return_dict", model.config.return_dict) is False:
        return False
    return all(value is None or name in KNOWN for name, value in arguments.items())


def _forward_own_tokens(original: Any, arguments: dict[str, Any], split: TokenSplit) -> Any:
    if arguments.get("position_ids") is None:
        positions = torch.arange(split.length, device=split.device) + split.begin
        arguments["position_ids"] = positions[None]
    for name, axis in _AXES.items():
        if arguments.get(name) is not None:
            arguments[name] = arguments[name].index_select(axis, split.own)
    comm = split.shard.comm
    with comm.turn("prefill"), using_token_split(split):
        try:
            output = original(**arguments)
            # Each rank has the logits of the last of its own tokens.
            output.logits = split.of_last_rank(output.logits)
        except BaseException:
            comm.abandon_call()
            raise
    return output
