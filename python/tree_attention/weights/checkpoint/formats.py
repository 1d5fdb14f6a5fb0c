# SPDX-License-Identifier: BSD-3-Clause
"""Weights of 8 and 4 bits as checkpoints are published, read as numbers part by part."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..parts import Lazy, OfFile

# Endings of names: of the scales of a weight in FP8, and of the two tensors of one in MXFP4.
_FP8, _MXFP4 = "_scale_inv", ("_blocks", "_scales")
_METHODS = ("fp8", "mxfp4")
# The numbers that a half byte of MXFP4 stands for (OCP Microscaling Formats 1.0, FP4 E2M1): bits of
# sign, exponent and mantissa. A scale is an exponent of two, with a bias of 127.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_PER_SCALE, _SCALE_BIAS = 32, 127


class Fp8Blocks(Lazy):
    """float8 numbers `[..., rows, columns]` with a factor for each block of rows and columns."""

    dtype = torch.bfloat16

    def __init__(self, weight: Tensor, scales: Tensor, block: tuple[int, int]) -> None:
        rows, columns = weight.shape[-2:]
        wanted = (*weight.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
        if tuple(scales.shape) != wanted:
            raise ValueError(
                f"of its weight of the shape {list(weight.shape)} the scales must have the shape "
                f"{list(wanted)}, got {list(scales.shape)}"
            )
        self.shape, self._weight, self._scales = tuple(weight.shape), weight, scales
        self._block = block

    def copy_to(self, out: Tensor, origin: Sequence[int]) -> None:
        if out.dim() > 2:
            for i, part in enumerate(out):
                index = origin[0] + i
                inner = Fp8Blocks(self._weight[index], self._scales[index], self._block)
                inner.copy_to(part, origin[1:])
            return
        (row, column), (height, width) = origin, self._block
        columns = torch.arange(column, column + out.shape[1]) // width
        at = 0
        while at < out.shape[0]:  # one row of blocks after the other
            count = min(out.shape[0] - at, height - (row + at) % height)
            factors = self._scales[(row + at) // height].float()[columns]
            part = self._weight[row + at : row + at + count, column : column + out.shape[1]]
            out[at : at + count] = part.float() * factors
            at += count


class Mxfp4(Lazy):
    """Experts `[experts, columns, rows]` of blocks `[experts, rows, columns / 32, 16]`, bytes with
    the lower half first, and scales `[experts, rows, columns / 32]`."""

    dtype = torch.bfloat16

    def __init__(self, blocks: Tensor, scales: Tensor) -> None:
        is_known = blocks.dim() == 4 and blocks.shape[3] == _FP4_PER_SCALE // 2
        if not is_known or scales.shape != blocks.shape[:3]:
            raise ValueError(
                "its blocks must have a shape [experts, rows, groups, 16] and its scales [experts, "
                f"rows, groups], got {list(blocks.shape)} and {list(scales.shape)}"
            )
        experts, rows, groups, _ = blocks.shape
        self.shape = experts, groups * _FP4_PER_SCALE, rows
        self._blocks, self._scales = blocks, scales

    def copy_to(self, out: Tensor, origin: Sequence[int]) -> None:
        expert, column, row = origin
        first, last = column // _FP4_PER_SCALE, -(-(column + out.shape[1]) // _FP4_PER_SCALE)
        table = torch.tensor((*_FP4, *(-x for x in _FP4)))
        rows = slice(row, row + out.shape[2])
        for i, part in enumerate(out):
            halves = self._blocks[expert + i, rows, first:last]
            numbers = table[torch.stack((halves & 15, halves >> 4), dim=-1).int()].flatten(2)
            exponents = self._scales[expert + i, rows, first:last].int() - _SCALE_BIAS
            found = torch.ldexp(numbers, exponents[..., None]).flatten(1)
            begin = column - first * _FP4_PER_SCALE
            part.copy_(found[:, begin : begin + out.shape[1]].T)


def check_format(path: object, quantization: Mapping[str, Any]) -> None:
    """Raises ValueError unless weights quantised so, or not at all, can be read."""
    if not quantization:
        return
    method = quantization.get("quant_method")
    if method not in _METHODS or (method == "fp8" and _block_of(quantization) is None):
        raise ValueError(
            f"from_pretrained: the weights in {path} are quantised by {method!r}, and those can be "
            f"read that are by one of {', '.join(_METHODS)}, fp8 in blocks; take a checkpoint that "
            "is not quantised, or load the model with transformers, and call enable(model)"
        )


def sources_of(tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> dict[str, Lazy]:
    """The weights of a checkpoint by name; two tensors of the files may make one weight."""
    found: dict[str, Lazy] = {}
    block, rest = _block_of(quantization), dict(tensors)
    while rest:
        name = weight = next(iter(rest))
        for ending in (*_MXFP4, _FP8):
            weight = weight.removesuffix(ending)
        try:
            if all(weight + ending in rest for ending in _MXFP4):
                blocks, scales = (rest.pop(weight + ending) for ending in _MXFP4)
                found[weight] = Mxfp4(blocks, scales)
            elif block and weight in rest and weight + _FP8 in rest:
                found[weight] = Fp8Blocks(rest.pop(weight), rest.pop(weight + _FP8), block)
            elif block and rest[name].dtype == torch.float8_e4m3fn:
                raise ValueError(f"it is of FP8 and lacks its scales, {name}{_FP8}")
            else:
                found[name] = OfFile(rest.pop(name))
        except ValueError as error:
            raise ValueError(f"{weight}: {error}") from None
    return found


def _block_of(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    block = quantization.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2:
        return None
    height, width = block
    return (height, width) if all(type(x) is int and x > 0 for x in block) else None
