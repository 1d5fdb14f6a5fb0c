# SPDX-License-Identifier: BSD-3-Clause
"""Reading from a checkpoint the parts of its weights that this rank keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from ...exchange import sentence
from .checkpoint_files import files_of
from .plan import Cut
from .split import set_tensor

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_NAMES = 3
# Of older releases of transformers, and left out by it as well.
_FORMER_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


class Checkpoint:
    """The tensors of a checkpoint's safetensors files, which are mapped into memory.

    Pages of a mapped file are read when they are needed, and can be dropped at any time: they are
    no memory of this process.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        index = find_file(path, _INDEX)
        single = None if index is not None else find_file(path, _SINGLE)
        if index is None and single is None:
            raise OSError(f"from_pretrained: {path} has neither {_SINGLE} nor {_INDEX}")
        names = [_SINGLE] if index is None else files_of(index, "from_pretrained: the index")
        self._handles: dict[str, Any] = {}  # by the tensors that they hold
        for name in names:
            handle = _opened(path, name)
            self._handles.update(dict.fromkeys(handle.keys(), handle))

    def tensors(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """The whole parameters and persistent buffers of `model` by their names in it; ValueError
        unless the checkpoint has all of these and no more."""
        result, missing, unused = {}, [], {*self._handles}
        prefix = f"{model.base_model_prefix}."
        for names, expected in _named_tensors(model):
            # A checkpoint of the base model alone has its names, without the prefix.
            known = [x for n in names for x in (n, n.removeprefix(prefix)) if x in self._handles]
            unused.difference_update(known)
            if not known:
                missing.append(names[0])
                continue
            found = self._handles[known[0]].get_tensor(known[0])
            if found.shape != expected.shape:
                raise ValueError(
                    f"from_pretrained: {self.path}: {known[0]} has the shape {list(found.shape)}, "
                    f"and by its config.json {list(expected.shape)}"
                )
            for other in known[1:]:
                if not torch.equal(self._handles[other].get_tensor(other), found):
                    raise ValueError(
                        f"from_pretrained: {self.path}: {known[0]} and {other} differ, and by its "
                        "config.json they are one; set tie_word_embeddings to false there"
                    )
            result[names[0]] = found
        if missing:
            raise ValueError(
                f"from_pretrained: {self.path} lacks the weights {some(missing)}; load the model "
                "with transformers, and call parallelize(model)"
            )
        ignored = *(model._keys_to_ignore_on_load_unexpected or ()), *_FORMER_BUFFERS
        extra = [x for x in sorted(unused) if not any(re.search(p, x) for p in ignored)]
        if extra:
            raise ValueError(
                f"from_pretrained: {self.path} has weights that the model of its config.json lacks:"
                f" {some(extra)}; copy or download both again"
            )
        return result

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its first tensor of a floating one."""
        for name, handle in self._handles.items():
            found: torch.dtype = handle.get_tensor(name).dtype
            if found.is_floating_point:
                return found
        return torch.get_default_dtype()


def fill(
    model: PreTrainedModel,
    tensors: Mapping[str, Tensor],
    cuts: Mapping[str, Cut],
    device: torch.device,
    show: bool,
) -> None:
    """Fills a model on the meta device, its parameters cut by `cuts`, from `tensors`."""
    filled: dict[nn.Parameter, nn.Parameter] = {}  # by those on the meta device
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    errors = Console(stderr=True)
    is_shown = show and errors.is_terminal
    for name in track(names, "weights", console=errors, transient=True, disable=not is_shown):
        old = model.get_parameter(name)
        if old not in filled:
            whole, cut = tensors[name], cuts.get(name)
            if cut is None:
                new = whole.to(device, old.dtype, copy=True)
            else:
                new = cut.of(whole, old.dtype, device)
            filled[old] = nn.Parameter(new, requires_grad=old.requires_grad)
            _mark(filled[old])
        set_tensor(model, name, filled[old])
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            value = torch.empty_like(buffer, device=device)
            if name in tensors:
                _mark(value.copy_(tensors[name]))
            set_tensor(model, name, value)
    model.init_weights()  # of what is not marked: buffers that are computed


def _mark(x: Tensor) -> None:
    """Marks `x` as filled, so that transformers leaves its values as they are."""
    x._is_hf_initialized = True  # type: ignore[attr-defined]


def _named_tensors(model: PreTrainedModel) -> Iterator[tuple[list[str], Tensor]]:
    """Yield each tensor of a model that a checkpoint holds, with all its names."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for name, buffer in model.named_buffers():
        module, _, own = name.rpartition(".")
        if own not in model.get_submodule(module)._non_persistent_buffers_set:
            names[buffer] = [name]
    for tensor, its_names in names.items():
        yield its_names, tensor


def some(names: Sequence[str]) -> str:
    """The first of the names, and the number of the others."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def find_file(path: str | Path, name: str) -> Path | None:
    """A file of a checkpoint, from the Hub if need be; None if it has no such file."""
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file)


def _opened(path: str | Path, name: str) -> Any:
    file = find_file(path, name)
    if file is None:
        raise OSError(f"from_pretrained: {path} lacks the file {name}, which its index names")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"from_pretrained: {file} is damaged: {sentence(error)}; copy or download it again"
        ) from error
