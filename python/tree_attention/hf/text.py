# SPDX-License-Identifier: BSD-3-Clause
"""Calls with the text alone of models that take images or sound as well."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..weights.text import takes_more_than_text
from .prompts.forward import KNOWN, arguments_by_name
from .release import OLD_CACHE_NAME

# Arguments that say of each token whether it is one of an image: of text all are 0.
_KINDS = ("token_type_ids", "mm_token_type_ids")
_OF_TEXT = {*KNOWN, *_KINDS, OLD_CACHE_NAME, "self", "labels", "kwargs"}


def check_text_alone(op: str, others: Collection[str], arguments: Mapping[str, Any]) -> None:
    """Raises NotImplementedError where `op` is given one of the `others`, or names their tokens."""
    if not others:  # a model of text, which may have kinds of tokens of its own, as GPT-2 has
        return
    for name in others:
        value = arguments.get(name)
        is_empty = value is None or (isinstance(value, (Mapping, list, tuple)) and not value)
        if not is_empty:
            raise NotImplementedError(
                f"{op}: only text is spread over ranks; {name} is not supported: leave it out, or "
                "disable(model) first"
            )
    for name in _KINDS:
        kinds = arguments.get(name)
        if isinstance(kinds, Tensor) and kinds.any():
            raise NotImplementedError(
                f"{op}: only text is spread over ranks; {name} names tokens of images or sound: "
                "give a prompt without them"
            )


def forget_images(model: PreTrainedModel) -> None:
    """Forgets what images have added to positions, which models like Qwen3-VL keep for the tokens
    of the next call, with its number of sequences."""
    base: Any = model.base_model
    if hasattr(base, "rope_deltas"):
        base.rope_deltas = None


def text_alone(model: PreTrainedModel) -> Callable[..., Any]:
    """A function in place of the forward of such a model, which refuses anything but text."""
    signature, others = inspect.signature(type(model).forward), others_of(model)

    def forward(original: Any, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        arguments = arguments_by_name(signature, self, *args, **kwargs)
        check_text_alone("tree_attention", others, arguments)
        forget_images(self)
        # Zeros, which a processor gives, would have a mask made for images.
        return original(**{name: x for name, x in arguments.items() if name not in _KINDS})

    return forward


def others_of(model: PreTrainedModel) -> list[str]:
    """The arguments of a model for images, sound or what was computed of them."""
    if not takes_more_than_text(model):
        return []
    names = inspect.signature(type(model).forward).parameters
    return [name for name in names if name not in _OF_TEXT]
