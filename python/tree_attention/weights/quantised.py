# SPDX-License-Identifier: BSD-3-Clause
"""Weights of 8 and 4 bits, made while they are read, and the products with them.

An int8 weight has a scale for each output, an int4 weight one for each 128 inputs of an output, and
both are symmetric. A rank quantises its part with the scales of the whole rows, so that it has the
same numbers as one rank alone would have. Products are calls of `linear_of_experts` with one
expert.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .parts import Cut, Lazy, Range

SCHEMES = ("int8", "int4")
_GROUP = 128
# Inputs of a group in a rank's part: the largest size that divides both ends of the part.
# The last one is also the block in which numbers are packed (csrc/experts/params.h).
_SIZES_OF_GROUPS = (128, 64)
# Bytes of rows in float32 that are read at once; a few copies of them are made.
_READ_BYTES = 1 << 20


class Quantised(NamedTuple):
    """A matrix `[outputs, inputs]` of this rank: numbers, and scales for the product with them."""

    data: Tensor
    scale: Tensor
    front: int = 0  # inputs of zeros that a product of 4 bits needs before this rank's inputs


class Matrix:
    """The part that `cut` leaves of a matrix `[outputs, inputs]` in a source, which may hold it
    transposed and, at `index`, one of many."""

    def __init__(
        self,
        source: Lazy,
        cut: Cut | None,
        index: tuple[int, ...] = (),
        is_transposed: bool = False,
    ) -> None:
        self._source, self._index, self._is_transposed = source, index, is_transposed
        outputs, inputs = len(index) + is_transposed, len(index) + (not is_transposed)  # axes
        parts: dict[int, tuple[Range, ...]]
        parts = {axis: ((0, source.shape[axis]),) for axis in (outputs, inputs)}
        if cut is not None:
            parts[cut.dim] = cut.ranges
        self._outputs, (self._inputs,) = parts[outputs], parts[inputs]
        self.num_outputs = sum(end - begin for begin, end in self._outputs)

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        """The outputs a few at a time, with all inputs of the whole matrix in float32, and how many
        come before them."""
        at = 0
        width = self._source.shape[-2 if self._is_transposed else -1]
        step = max(1, _READ_BYTES // (4 * width))
        for first, last in self._outputs:
            for begin in range(first, last, step):
                count = min(step, last - begin)
                shape = (width, count) if self._is_transposed else (count, width)
                origin = (0, begin) if self._is_transposed else (begin, 0)
                part = torch.empty((*(1 for _ in self._index), *shape), dtype=torch.float32)
                self._source.copy_to(part, (*self._index, *origin))
                part = part.view(shape)
                yield at, part.T if self._is_transposed else part
                at += count

    def quantised(self, scheme: str, dtype: torch.dtype) -> Quantised:
        """The part in one of SCHEMES, for products with activations of `dtype`."""
        return self._to_int8(dtype) if scheme == "int8" else self._to_int4(dtype)

    def _to_int8(self, dtype: torch.dtype) -> Quantised:
        begin, end = self._inputs
        data = torch.empty((self.num_outputs, end - begin), dtype=torch.int8)
        scale = torch.empty(self.num_outputs, dtype=dtype)
        for at, rows in self.rows():
            own = slice(at, at + rows.shape[0])
            # The scale is rounded first, so that it adds no error of its own.
            scale[own] = rows.abs().amax(dim=1) / 127
            divisor = scale[own].float().clamp_min(torch.finfo(torch.float32).tiny)[:, None]
            data[own] = (rows[:, begin:end] / divisor).round_().clamp_(-127, 127)
        return Quantised(data, scale)

    def _to_int4(self, dtype: torch.dtype) -> Quantised:
        begin, end = self._inputs
        # Inputs of zeros before and after this rank's inputs, and the size of groups.
        front, back = begin % _SIZES_OF_GROUPS[-1], -end % _SIZES_OF_GROUPS[-1]
        size = next(
            x for x in _SIZES_OF_GROUPS if (begin - front) % x == 0 and (end + back) % x == 0
        )
        width = end + back - begin + front
        data = torch.empty((self.num_outputs, width // 2), dtype=torch.uint8)
        scales = torch.empty((self.num_outputs, width // size), dtype=dtype)
        groups = torch.arange(begin - front, end + back, size) // _GROUP
        for at, rows in self.rows():
            own = slice(at, at + rows.shape[0])
            grouped = functional.pad(rows, (0, -rows.shape[1] % _GROUP)).unflatten(1, (-1, _GROUP))
            # The number of the largest magnitude becomes -8, as this side has one value more.
            largest = grouped.gather(2, grouped.abs().argmax(dim=2, keepdim=True))
            scale = (largest / -8).to(dtype).float()
            divisor = torch.where(scale == 0, 1.0, scale)
            found = ((grouped / divisor).round_().clamp_(-8, 7) + 8).flatten(1)[:, begin:end]
            numbers = functional.pad(found, (front, back), value=8).to(torch.uint8)
            low, high = numbers.unflatten(1, (-1, 2, _SIZES_OF_GROUPS[-1] // 2)).unbind(2)
            data[own] = (low | high << 4).flatten(1)
            scales[own] = scale[:, groups, 0].to(dtype)
        return Quantised(data, scales, front)


def product(x: Tensor, data: Tensor, scale: Tensor, front: int = 0) -> Tensor:
    """`x [tokens, inputs]` times a quantised matrix, `[tokens, outputs]`."""
    experts = x.new_zeros(x.shape[0], dtype=torch.int64)  # of one expert
    operator = torch.ops.tree_attention.linear_of_experts
    return operator(x, experts, data[None], scale[None], front, False)


class QuantisedLinear(nn.Linear):
    """A linear layer, made of one by `quantise_linear`, whose hooks it keeps."""

    front: int
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out = product(x.flatten(0, -2), self.weight, self.scale, self.front)
        out = out.unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias


def quantise_linear(
    linear: nn.Linear, matrix: Matrix, scheme: str, dtype: torch.dtype
) -> nn.Parameter:
    """Makes a linear layer one of quantised weights, with its scales, and returns the weights."""
    made = matrix.quantised(scheme, dtype)
    linear.__class__ = QuantisedLinear
    linear.register_parameter("scale", nn.Parameter(made.scale, requires_grad=False))
    vars(linear)["front"] = made.front
    linear.out_features = matrix.num_outputs
    return nn.Parameter(made.data, requires_grad=False)
