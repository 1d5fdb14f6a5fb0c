# SPDX-License-Identifier: BSD-3-Clause
"""Refuses keys that attention does not support on their device, before there are any."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...ops import check_decode


def check_taken(
    what: str, dtype: torch.dtype, keys: Tensor, values: Tensor, scales: Mapping[str, Any]
) -> None:
    """Raises ValueError, which says that `what` is not taken, unless queries of `dtype` can attend
    to keys and values such as these, which may be empty."""
    queries = torch.empty((1, 1, 1, keys.shape[3]), dtype=dtype, device=keys.device)
    keys, values = (x[:1, :1, :0] for x in (keys, values))
    try:
        check_decode(queries, keys, values, **{name: x[:1, :1, :0] for name, x in scales.items()})
    except (ValueError, RuntimeError) as error:  # the second for a GPU that is too old
        device = keys.device.type
        raise ValueError(f"{what} attention does not take on {device}: {error}") from None


def no_rows(
    columns: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    device: torch.device,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Empty keys, values and scales, as a cache keeps the keys of a model in `dtype`."""
    keys, values = (
        torch.empty((1, 1, 0, n), dtype=kv_dtype or dtype, device=device) for n in columns
    )
    scale = keys.new_empty((1, 1, 0), dtype=torch.float32)
    return keys, values, {} if kv_dtype is None else {"k_scale": scale, "v_scale": scale}
