# SPDX-License-Identifier: BSD-3-Clause
"""Refuses keys that attention does not take on their device, by asking it before there are any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...ops import lean_decode


def check_taken(
    what: str, dtype: torch.dtype, keys: Tensor, values: Tensor, scales: Mapping[str, Any]
) -> None:
    """Raises ValueError, which says that `what` is not taken, unless queries of `dtype` can attend
    to keys and values such as these, of which there need be none."""
    queries = torch.empty((1, 1, 1, keys.shape[3]), dtype=dtype, device=keys.device)
    keys, values = (x[:1, :1, :0] for x in (keys, values))
    try:
        lean_decode(queries, keys, values, **{name: x[:1, :1, :0] for name, x in scales.items()})
    except RuntimeError as error:
        device = keys.device.type
        raise ValueError(f"{what} attention does not take on {device}: {error}") from None


def check_keys(model: PreTrainedModel, kv_dtype: torch.dtype | None) -> None:
    """Raises ValueError unless the attention modules of a model can attend on its device to keys
    that are kept as `kv_dtype`, or as they are."""
    modules: list[Any] = [
        module
        for module in model.modules()
        if hasattr(module, "is_causal") and isinstance(getattr(module, "head_dim", None), int)
    ]
    for columns in sorted({(m.head_dim, getattr(m, "v_head_dim", m.head_dim)) for m in modules}):
        keys, values = (no_rows(n, model.dtype, kv_dtype, model.device) for n in columns)
        what = f"enable: {type(model).__name__} has keys of head_dim {columns[0]}, which"
        check_taken(what, model.dtype, keys, values, scales_of(keys, kv_dtype))


def no_rows(
    columns: int, dtype: torch.dtype, kv_dtype: torch.dtype | None, device: torch.device
) -> Tensor:
    """Keys, of which there are none, as a cache keeps those of `dtype`."""
    return torch.empty((1, 1, 0, columns), dtype=kv_dtype or dtype, device=device)


def scales_of(keys: Tensor, kv_dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The operators' arguments of this name, where keys have 8 bits."""
    if kv_dtype is None:
        return {}
    scale = keys.new_empty(keys.shape[:3], dtype=torch.float32)
    return {"k_scale": scale, "v_scale": scale}
