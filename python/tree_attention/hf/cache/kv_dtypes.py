# SPDX-License-Identifier: BSD-3-Clause
"""Dtypes of 8 bits in which a cache may hold keys and values."""

import torch

# By the names that `kv_dtype` takes.
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def dtype_of(op: str, kv_dtype: str | None) -> torch.dtype | None:
    """The dtype that a `kv_dtype` of `op` names; None: that of the model."""
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        names = ", ".join(map(repr, KV_DTYPES))
        raise ValueError(f"{op}: kv_dtype must be None or one of {names}, got {kv_dtype!r}")
    return None if kv_dtype is None else KV_DTYPES[kv_dtype]
