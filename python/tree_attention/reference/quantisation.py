# SPDX-License-Identifier: BSD-3-Clause
"""Keys and values of 8 bits with a scale per token and head: what `append_kv` writes."""

import torch
from torch import Tensor

# The largest magnitude of a row becomes this number.
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows of `x` `[..., head_dim]` as `dtype`, int8 or float8_e4m3fn, and their scales.

    Returns:
        values: `[..., head_dim]`; zeros for a row with the scale 0, and for one with a NaN or an
            infinity.
        scale: float32 `[...]`, the largest magnitude of the row divided by 127 or 448; NaN for a
            row with a NaN or an infinity. `values * scale` is the row up to rounding.
    """
    x = x.float()
    scale = x.abs().amax(-1) / LARGEST[dtype]
    scale = torch.where(x.isfinite().all(-1), scale, torch.nan)
    # Where the scale is subnormal, its own rounding could take the quotient beyond the largest.
    quotient = (x / scale[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype])
    quotient = quotient.masked_fill(~(scale > 0)[..., None], 0.0)
    return (quotient.round() if dtype == torch.int8 else quotient).to(dtype), scale
