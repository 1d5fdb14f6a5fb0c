# SPDX-License-Identifier: BSD-3-Clause
"""Parts of lists of cases."""

from typing import Protocol

import torch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    # Dtypes of keys and values alone, by the names that caches have for them.
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


class Named(Protocol):
    """A case, by the name that its row has."""

    @property
    def name(self) -> str: ...


def log_uniform_lengths(batch: int, low: int, high: int) -> tuple[int, ...]:
    """Lengths whose logarithms are uniform: a few long sequences and many short ones."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(batch, generator=generator, dtype=torch.float64)
    return tuple(int(low * (high / low) ** e) for e in exponents.tolist())
