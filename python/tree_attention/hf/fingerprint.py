# SPDX-License-Identifier: BSD-3-Clause
"""Digests and descriptions of what every rank must have in common before a generation begins."""

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.configuration_utils import PreTrainedConfig

from ..exchange import Signature
from ..weights.digests import digest, digest_buffers, digest_parameters, to_bytes

# Length of the beginning of a value's text that ranks publish and an error shows.
_MAX_TEXT = 200
# How deep collections are compared, as an object may hold itself, and how many entries of those
# that hold more than plain values, as Python walks through them in every generation: tenths of a
# second for so many.
_DEPTH = 50
_MAX_ENTRIES = 100_000
_LISTS = list | tuple | deque | range | array
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype})
# Settings that change no token, or that other fields compare.
_NOT_COMPARED = ("architectures", "dtype", "transformers_version")


def settings_of(kind: str, config: GenerationConfig | PreTrainedConfig) -> Signature:
    """The settings of a generation or a model by name, for ranks to compare."""
    settings = _compared(config.to_dict())
    # The error names the first setting that differs. max_length and min_length come last, because
    # they follow from the numbers of new tokens.
    names = sorted(settings, key=lambda name: name in ("max_length", "min_length"))
    return tuple((f"{kind} setting {name}", describe(settings[name])) for name in names)


def _compared(settings: Mapping[Any, Any]) -> dict[Any, Any]:
    """The settings, also of configurations inside, but for where they were read."""
    return {
        name: _compared(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if not str(name).startswith("_") and name not in _NOT_COMPARED
    }


def model_signature(kind: str, model: PreTrainedModel) -> Signature:
    """The configuration, weights and buffers of a model, for ranks to compare."""
    return (
        *settings_of(kind, model.config),
        (f"digest of the {kind}'s weights", digest_parameters(model)),
        (f"digest of the {kind}'s buffers", digest_buffers(model)),
    )


def describe_all(name: str, objects: Iterable[Any]) -> Signature:
    """Kinds and attributes of logits processors or stopping criteria, which ranks compare."""
    return tuple((f"{name} {i}", describe(o, with_attributes=True)) for i, o in enumerate(objects))


def describe(value: Any, with_attributes: bool = False) -> str:
    """The same text on every rank that holds an equal value.

    A value is a number, a string, a tensor or a collection of these, whole. Of a function only the
    name counts, as ranks run one program, and what it does shows in the tokens; of any other object
    only the kind, because a model or a process group differs from rank to rank. With attributes,
    the attributes of `value` count as well, unless their names begin with an underscore.
    """
    entries_left = _MAX_ENTRIES

    def text_of(value: Any, depth: int, with_attributes: bool = False) -> str:
        nonlocal entries_left
        kind = type(value).__qualname__
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, tuple(_PLAIN)):
            return repr(value)
        if isinstance(value, np.ndarray) and value.dtype != object:
            return f"{value.dtype} {list(value.shape)} {digest(value.tobytes())}"
        if isinstance(value, Tensor):
            is_whole = not (isinstance(value, DTensor) or value.is_meta or value.is_sparse)
            found = digest(to_bytes(value)) if is_whole else ""
            return f"{value.dtype} {list(value.shape)} {found}".rstrip()
        if depth == 0:
            return kind
        if isinstance(value, Mapping | _LISTS | set | frozenset):
            parts = [*value, *value.values()] if isinstance(value, Mapping) else value
            if not _PLAIN.issuperset(map(type, parts)):
                entries_left -= len(value)
                if entries_left < 0:
                    return f"{kind} of {len(value)}"
        if isinstance(value, Mapping):
            pairs = zip(texts_of(value, depth), texts_of(value.values(), depth), strict=True)
            return "{" + ", ".join(sorted(f"{key}: {text}" for key, text in pairs)) + "}"
        if isinstance(value, _LISTS):
            return "[" + ", ".join(texts_of(value, depth)) + "]"
        if isinstance(value, set | frozenset):
            return "{" + ", ".join(sorted(texts_of(value, depth))) + "}"
        if isinstance(value, FunctionType):  # ranks run one program: its code is the same
            return f"{value.__module__}.{value.__qualname__}"
        if with_attributes or isinstance(value, LogitsProcessor | StoppingCriteria):
            attributes = getattr(value, "__dict__", {})
            public = {n: x for n, x in sorted(attributes.items()) if not n.startswith("_")}
            texts = zip(public, texts_of(public.values(), depth), strict=True)
            return f"{kind}({', '.join(f'{name}={text}' for name, text in texts)})"
        return kind

    def texts_of(values: Iterable[Any], depth: int) -> list[str]:
        parts = list(values)
        if _PLAIN.issuperset(map(type, parts)):  # a tenth of the time
            return list(map(repr, parts))
        return [text_of(part, depth - 1) for part in parts]

    text = text_of(value, _DEPTH, with_attributes)
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]}... ({len(text)} characters, digest {digest(text.encode())})"
