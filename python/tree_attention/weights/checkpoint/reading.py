# SPDX-License-Identifier: BSD-3-Clause
"""The weights of a checkpoint by the names that they have in a model, none of them read yet."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
)
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ...exchange import sentence
from ..parts import Lazy, OfFile
from .files import INDEX, WEIGHTS, Source, files_of, find_file, opened, others
from .formats import check_format, sources_of

_MAX_NAMES = 3
# Before the names of the text's weights in checkpoints of text and images, as older and as newer
# releases of transformers save them, and what takes their place in a model of the text alone.
_OF_TEXT = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
)
# Tensors that older releases of transformers saved, and that newer ones leave out as well.
_FORMER_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


class Checkpoint:
    """The tensors of a checkpoint's safetensors files, which are mapped into memory.

    Pages of a mapped file are read when they are needed, and can be dropped at any time: they are
    no memory of this process.
    """

    def __init__(self, source: Source, quantization: Mapping[str, Any]) -> None:
        self.path = path = source.path
        self._whole_type: str | None = None  # of a model whose text part is taken
        self._left_out: tuple[str, ...] = ()  # patterns of names
        index = find_file(source, INDEX)
        single = None if index is not None else find_file(source, WEIGHTS, required=True)
        if index is None and single is None:
            raise OSError(
                f"from_pretrained: {path} has neither {WEIGHTS} nor {INDEX}{others(source)}"
            )
        names = [WEIGHTS] if index is None else files_of(index, "from_pretrained: the index")
        check_format(path, quantization)
        self.files = {
            key: handle.get_tensor(key)
            for handle in (opened(source, name) for name in names)
            for key in handle.keys()  # noqa: SIM118
        }
        try:
            self._sources = sources_of(self.files, quantization)
        except ValueError as error:
            raise ValueError(f"from_pretrained: {path}: {error}") from None

    def take_text(self, model_type: str) -> bool:
        """Drops all weights but the text's, of a model of text and images, and gives them the names
        that they have in a model of text alone. Returns whether they include the head's."""
        self._whole_type = model_type
        texts = {
            new + name.removeprefix(old): source
            for name, source in self._sources.items()
            for old, new in _OF_TEXT
            if name.startswith(old)
        }
        if any(name.startswith("model.") for name in texts):  # else they have no such names
            self._sources = texts
        return any(name.startswith("lm_head.") for name in self._sources)

    def leave_out(self, names: Sequence[str]) -> None:
        """Ignores these modules and parameters, which the model does without."""
        self._left_out = tuple(rf"(^|\.){re.escape(name)}(\.|$)" for name in names)

    def tensors(self, model: PreTrainedModel) -> dict[str, Lazy]:
        """The whole parameters and persistent buffers of `model` by their names in it; ValueError
        unless the checkpoint has all of these and no more."""
        named = _named_tensors(model)
        expected = {name: tensor for tensor, names in named.items() for name in names}
        converted, unused = self._converted(model, expected)
        result, missing = {}, []
        for tensor, names in named.items():
            known = [name for name in names if name in converted]
            if not known:
                missing.append(names[0])
                continue
            found = converted[known[0]]
            if found.shape != tuple(tensor.shape):
                raise ValueError(
                    f"from_pretrained: {self.path}: {known[0]} has the shape {list(found.shape)}, "
                    f"and by its config.json {list(tensor.shape)}"
                )
            if tensor.is_floating_point() and not found.dtype.is_floating_point:
                raise ValueError(
                    f"from_pretrained: {self.path}: {known[0]} must be of a floating dtype, got "
                    f"{found.dtype}, of which its config.json says no quantization_config"
                )
            for other in known[1:]:
                if not torch.equal(converted[other].whole(), found.whole()):
                    raise ValueError(
                        f"from_pretrained: {self.path}: {known[0]} and {other} differ, and by its "
                        "config.json they are one; set tie_word_embeddings to false there"
                    )
            result[names[0]] = found
        if missing:
            raise self._lacks(missing)
        ignored = *(model._keys_to_ignore_on_load_unexpected or ()), *_FORMER_BUFFERS
        extra = [x for x in sorted(unused) if not any(re.search(p, x) for p in ignored)]
        if extra:
            raise ValueError(
                f"from_pretrained: {self.path} has weights that the model of its config.json lacks:"
                f" {some(extra)}; copy or download both again"
            )
        return result

    def _lacks(self, names: Sequence[str]) -> ValueError:
        return ValueError(
            f"from_pretrained: {self.path} lacks the weights {some(names)}; copy or download its "
            "files again, or, if transformers loads them, call parallelize(model)"
        )

    def _converted(
        self, model: PreTrainedModel, expected: dict[str, Tensor]
    ) -> tuple[dict[str, Lazy], list[str]]:
        """The weights by the names that they have in `model`, and the names of the others."""
        mapping = get_model_conversion_mapping(model)
        if self._whole_type is not None and not get_model_conversion_mapping(
            model, add_legacy=False
        ):  # maybe it is known of the whole alone
            mapping = [*(get_checkpoint_conversion_mapping(self._whole_type) or ()), *mapping]
        renamings = [x for x in mapping if isinstance(x, WeightRenaming)]
        converters = [x for x in mapping if isinstance(x, WeightConverter)]
        by_pattern = {pattern: x for x in converters for pattern in x.source_patterns}
        names = model.base_model_prefix, expected
        found: dict[str, Lazy] = {}
        unused = []
        # By the weight that they make: the patterns that they match, with their names.
        pieces: dict[str, dict[str, list[str]]] = {}
        for key in sorted(self._sources, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, *names)
            if any(re.search(part, x) for part in self._left_out for x in (key, name)):
                continue
            if name not in expected:  # maybe of a checkpoint that needs no conversion
                name, pattern = rename_source_key(key, [], [], *names)
            if name not in expected:
                unused.append(key)
            elif pattern is None:
                found[name] = self._sources[key]
            else:
                pieces.setdefault(name, {}).setdefault(pattern, []).append(key)
        missing: list[str] = []
        for name, keys in pieces.items():
            converter = by_pattern[next(iter(keys))]
            if lost := _lost(keys, converter.source_patterns, expected[name].shape[0]):
                missing += lost
                continue
            try:
                found |= self._convert(model, name, keys, converter)
            except (ValueError, RuntimeError) as error:
                raise ValueError(
                    f"from_pretrained: {self.path}: {some([k for x in keys.values() for k in x])} "
                    f"make no {name} of the shape {list(expected[name].shape)}: {sentence(error)}"
                ) from None
        if missing:
            raise self._lacks(missing)
        return found, unused

    def _convert(
        self,
        model: PreTrainedModel,
        name: str,
        keys: dict[str, list[str]],
        converter: WeightConverter,
    ) -> dict[str, Lazy]:
        """The weights that a converter of transformers makes of those called `keys`, by pattern."""
        made: dict[str, Any] = {p: [self._sources[k] for k in found] for p, found in keys.items()}
        for operation in converter.operations:
            made = operation.convert(
                made,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=name,
                model=model,
                config=model.config,
                missing_keys=None,
            )
        prefix, _, suffix = next(name.partition(key) for key in made if key in name)
        return {
            f"{prefix}{key}{suffix}": x if isinstance(x, Lazy) else OfFile(x)
            for key, value in made.items()
            for x in (value if isinstance(value, list) else [value])
        }

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its first weight of a floating one."""
        for source in self._sources.values():
            if source.dtype.is_floating_point:
                return source.dtype
        return torch.get_default_dtype()


def _lost(keys: Mapping[str, list[str]], patterns: Sequence[str], count: int) -> list[str]:
    """The names of `count` numbered weights, like experts, that are not among `keys` by pattern."""
    lost = []
    for pattern in patterns:
        begin, star, end = pattern.partition("*")
        known = keys.get(pattern, ())
        for other in (known or next(iter(keys.values())))[:1] if star else ():
            where = re.search(rf"{re.escape(begin)}\d+{re.escape(end)}", other)
            if where is not None:
                names = [
                    f"{other[: where.start()]}{begin}{i}{end}{other[where.end() :]}"
                    for i in range(count)
                ]
                lost += [name for name in names if name not in known]
    return lost


def _named_tensors(model: PreTrainedModel) -> dict[Tensor, list[str]]:
    """All names of each tensor of a model that a checkpoint holds."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for name, buffer in model.named_buffers():
        module, _, own = name.rpartition(".")
        if own not in model.get_submodule(module)._non_persistent_buffers_set:
            names[buffer] = [name]
    return names


def some(names: Sequence[str]) -> str:
    """The first of the names, and the number of the others."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
