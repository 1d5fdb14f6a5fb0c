# SPDX-License-Identifier: BSD-3-Clause
"""Filling a model that has no memory yet with this rank's parts of a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..experts import quantise_experts
from ..parts import Cut, Lazy, part_of
from ..quantised import Matrix, quantise_linear
from ..split import set_tensor


@dataclass(frozen=True)
class Filling:
    """This rank's parts of the weights of a checkpoint, maybe of fewer bits."""

    cuts: Mapping[str, Cut]  # by parameter; of others, all
    scheme: str | None  # None: the dtype of the model
    linears: frozenset[str]  # weights of linear layers, and of experts, that take the scheme
    experts: frozenset[str]
    device: torch.device

    def fill(self, model: PreTrainedModel, tensors: Mapping[str, Lazy], show: bool) -> None:
        """Fills a model on the meta device from `tensors`."""
        filled: dict[nn.Parameter, nn.Parameter] = {}  # by those on the meta device
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        errors = Console(stderr=True)
        is_shown = show and errors.is_terminal
        for name in track(names, "weights", console=errors, transient=True, disable=not is_shown):
            old = model.get_parameter(name)
            if old not in filled:
                filled[old] = self._filled(model, name, tensors[name])
            set_tensor(model, name, filled[old])
        for parameter in model.parameters():  # with the scales of quantised ones
            _mark(parameter)
        for name, buffer in list(model.named_buffers()):
            if buffer.is_meta:
                value = torch.empty_like(buffer, device=self.device)
                if name in tensors:
                    _mark(value.copy_(tensors[name].whole()))
                set_tensor(model, name, value)
        model.init_weights()  # of what is not marked: buffers that are computed

    def _filled(self, model: PreTrainedModel, name: str, source: Lazy) -> nn.Parameter:
        old, cut = model.get_parameter(name), self.cuts.get(name)
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        if self.scheme is not None and name in self.linears:
            assert isinstance(module, nn.Linear)
            return quantise_linear(module, Matrix.of(source, cut), self.scheme, old.dtype)
        if self.scheme is not None and name in self.experts:
            return quantise_experts(module, own, source, cut, self.scheme, old.dtype)
        part = part_of(source, cut, old.dtype, self.device)
        return nn.Parameter(part, requires_grad=old.requires_grad)


def _mark(x: Tensor) -> None:
    """Marks `x` as filled, so that transformers leaves its values as they are."""
    x._is_hf_initialized = True  # type: ignore[attr-defined]
