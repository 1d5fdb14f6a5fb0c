# SPDX-License-Identifier: BSD-3-Clause
"""Parts of tensors, and tensors that are put together of others without being read.

A checkpoint may hold experts one by one, gate and up apart, and the model has them as one tensor.
Its parts are copied out of the files one after the other, so that no whole tensor is ever made.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Range = tuple[int, int]


class Lazy(ABC):
    """A tensor that is read part by part, and put together by torch.stack and torch.cat unread."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def copy_to(self, out: Tensor, origin: Sequence[int]) -> None:
        """Copies into `out` the part of its size that begins at `origin`."""

    def whole(self) -> Tensor:
        """The tensor, read."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self.copy_to(out, [0] * out.dim())
        return out

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function in _JOINS:
            return _JOINS[function](*args, **(kwargs or {}))
        return function(*map(_read, args), **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole(), name)


class OfFile(Lazy):
    """A tensor of a file that is mapped into memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def copy_to(self, out: Tensor, origin: Sequence[int]) -> None:
        part = (slice(o, o + n) for o, n in zip(origin, out.shape, strict=True))
        out.copy_(self.tensor[tuple(part)])

    def whole(self) -> Tensor:
        return self.tensor


class Stacked(Lazy):
    """Sources of one shape, as torch.stack puts them together."""

    def __init__(self, sources: Sequence[Lazy], dim: int = 0) -> None:
        first = sources[0]
        _check_shapes([source.shape for source in sources])
        self._sources, self._dim, self.dtype = sources, dim, first.dtype
        self.shape = (*first.shape[:dim], len(sources), *first.shape[dim:])

    def copy_to(self, out: Tensor, origin: Sequence[int]) -> None:
        inner = [*origin[: self._dim], *origin[self._dim + 1 :]]
        for i in range(out.shape[self._dim]):
            source = self._sources[origin[self._dim] + i]
            source.copy_to(out.select(self._dim, i), inner)


class Joined(Lazy):
    """Sources joined along an axis, as torch.cat joins them."""

    def __init__(self, sources: Sequence[Lazy], dim: int = 0) -> None:
        self._sources, self._dim, self.dtype = sources, dim, sources[0].dtype
        _check_shapes([(*x.shape[:dim], *x.shape[dim + 1 :]) for x in sources])
        shape = list(sources[0].shape)
        shape[dim] = sum(source.shape[dim] for source in sources)
        self.shape = tuple(shape)

    def copy_to(self, out: Tensor, origin: Sequence[int]) -> None:
        first = 0  # of the source at hand
        begin = origin[self._dim]
        end = begin + out.shape[self._dim]
        for source in self._sources:
            last = first + source.shape[self._dim]
            low, high = max(begin, first), min(end, last)
            if low < high:
                inner = [*origin]
                inner[self._dim] = low - first
                source.copy_to(out.narrow(self._dim, low - begin, high - low), inner)
            first = last


def _check_shapes(shapes: Sequence[tuple[int, ...]]) -> None:
    found = sorted({*shapes})
    if len(found) > 1:
        raise ValueError(f"its parts have the shapes {' and '.join(str(list(x)) for x in found)}")


_JOINS: dict[Any, Any] = {torch.stack: Stacked, torch.cat: Joined}


def _read(value: Any) -> Any:
    return value.whole() if isinstance(value, Lazy) else value


@dataclass(frozen=True)
class Cut:
    """The parts [begin, end) of one axis of a parameter that this rank keeps, joined, with `zeros`
    zeros at the end."""

    dim: int
    ranges: tuple[Range, ...]
    zeros: int = 0

    @property
    def size(self) -> int:
        """Length of the axis afterwards."""
        return sum(end - begin for begin, end in self.ranges) + self.zeros


def part_of(
    whole: Tensor | Lazy, cut: Cut | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A copy of the parts of `whole` that `cut` takes, or of all, in memory of its own."""
    source = whole if isinstance(whole, Lazy) else OfFile(whole)
    origin, shape = [0] * len(source.shape), list(source.shape)
    if cut is not None:
        shape[cut.dim] = cut.size
    part = torch.empty(shape, dtype=dtype, device=device)
    if cut is None:
        source.copy_to(part, origin)
        return part
    at = 0
    for begin, end in cut.ranges:
        origin[cut.dim] = begin
        source.copy_to(part.narrow(cut.dim, at, end - begin), origin)
        at += end - begin
    part.narrow(cut.dim, at, cut.zeros).zero_()
    return part
