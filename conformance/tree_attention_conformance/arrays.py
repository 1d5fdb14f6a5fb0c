# SPDX-License-Identifier: BSD-3-Clause
"""Arrays of the library that the tested function takes: torch, or NumPy and what reads it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .truth import Floats


def default_device() -> str:
    """The CPU for tensors of torch, where it is installed; "numpy" otherwise."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return "numpy"
    return "cpu"


def to(device: str, dtype: str | None = None) -> Callable[[Any], Any]:
    """The function from NumPy's arrays to copies that the tested function takes."""
    if device == "numpy":
        return lambda x: x.astype(dtype or x.dtype)
    import torch

    def convert(x: Any) -> Any:
        x = torch.from_numpy(x)
        kind = getattr(torch, dtype) if dtype else x.dtype
        return torch.empty(x.shape, dtype=kind, device=device).copy_(x)

    return convert


def to_numpy(x: Any) -> Floats:
    """An array of any library in float64."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()
    return np.asarray(x, np.float64)


def nan_like(x: Any, shape: list[int]) -> Any:
    """An array of x's library and dtype, full of NaN."""
    if hasattr(x, "new_full"):
        return x.new_full(shape, math.nan)
    return np.full(shape, math.nan, x.dtype)


def dtype_of(x: Any) -> str:
    return str(x.dtype).rpartition(".")[2]


def permuted(x: Any, order: tuple[int, ...]) -> Any:
    return x.permute(order) if hasattr(x, "permute") else x.transpose(order)
