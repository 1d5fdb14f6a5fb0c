# SPDX-License-Identifier: BSD-3-Clause
"""The truth in float64, and the errors of a result against it."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]

# The distance from 1 to the next number.
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def merge(o_parts: Floats, lse_parts: Floats) -> tuple[Floats, Floats]:
    """Merges the states `[n, ..., head_dim]` and `[n, ...]`, in float64.

    A state with lse = -inf is empty: it is left out by selection, and its o is not used.
    """
    lse_parts = np.asarray(lse_parts, np.float64)
    largest = lse_parts.max(0)
    largest = np.where(largest == -math.inf, 0.0, largest)
    exponentials = np.exp(lse_parts - largest)
    total = exponentials.sum(0)
    # Without the parts the sum is 0, and log(0) is -inf.
    with np.errstate(divide="ignore"):
        lse = np.log(total) + largest
    weights = exponentials / np.where(total == 0, 1.0, total)
    terms = np.where((lse_parts == -math.inf)[..., None], 0.0, weights[..., None] * o_parts)
    return terms.sum(0), lse


def attention(
    q: Floats, k: Floats, v: Floats, key_ranges: NDArray[np.int32], dtype: str = "float64"
) -> tuple[Floats, Floats]:
    """Attention of each query to the keys in its range; (0, -inf) where there are none.

    dtype: what every step is rounded to. With q's dtype this is a plain implementation, and its
        error sets the bounds.
    """
    batch, num_heads_q, seqlen_q, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, seqlen_q, head_dim)
    o = np.zeros((batch, num_heads_q, seqlen_q, v.shape[3]))
    lse = np.full(o.shape[:-1], -math.inf)
    for b, t in np.ndindex(batch, seqlen_q):
        begin, end = key_ranges[b, t]
        if begin >= end:
            continue
        queries = rounded(grouped[b, :, :, t], dtype)  # [num_heads_kv, group_size, head_dim]
        keys, values = (rounded(x[b, :, begin:end], dtype) for x in (k, v))
        scores = rounded(head_dim**-0.5 * rounded(queries @ keys.swapaxes(1, 2), dtype), dtype)
        largest = scores.max(-1, keepdims=True)
        exponentials = np.exp(scores - largest)
        total = exponentials.sum(-1, keepdims=True)
        lse[b, :, t] = rounded(np.log(total) + largest, dtype).reshape(num_heads_q)
        weights = rounded(exponentials / total, dtype)
        o[b, :, t] = rounded(weights @ values, dtype).reshape(num_heads_q, -1)
    return o, lse


def rounded(x: Floats, dtype: str) -> Floats:
    """The nearest numbers of a dtype. Numbers of 16 bits are given as float32."""
    if dtype != "bfloat16":
        return x.astype(dtype).astype("float64" if dtype == "float64" else "float32")
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def row_error(o: Floats, o_true: Floats) -> float:
    """The largest error of an element relative to the largest magnitude of its row."""
    largest = np.abs(o_true).max(-1).clip(min=np.finfo(np.float64).tiny)
    with np.errstate(over="ignore"):  # of a row of zeros
        return float((np.abs(o - o_true).max(-1) / largest).max())


def lse_error(lse: Floats, lse_true: Floats) -> float:
    """The largest error relative to `max(1, |lse|)`."""
    with np.errstate(invalid="ignore"):
        error = np.abs(lse - lse_true) / np.abs(lse_true).clip(min=1.0)
    # Two empty rows are the same, though their difference is NaN.
    return float(np.where(lse == lse_true, 0.0, error).max())
