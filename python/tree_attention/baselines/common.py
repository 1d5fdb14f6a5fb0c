# SPDX-License-Identifier: BSD-3-Clause
"""Checks that both rings do before anything travels, and the layout of what travels."""

from torch import Tensor

from ..exchange import Signature
from ..options import AttentionOptions, fields_of_options

# Tensors in received memory begin at addresses that any vector load or store can take.
_ALIGNMENT = 64


def aligned(num_bytes: int) -> int:
    """The least size that holds `num_bytes` and keeps what follows aligned."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def signature_of(q: Tensor, v_local: Tensor, options: AttentionOptions) -> Signature:
    """Fields that ranks must have in common to call a ring together."""
    return (
        ("batch, num_heads_q, seqlen_q, head_dim", tuple(q.shape)),
        ("dtype", q.dtype),
        ("dtype of v", v_local.dtype),
        ("k_scale is given", options.get("k_scale") is not None),
        ("device", q.device.type),
        ("num_heads_kv, head_dim of v", (v_local.shape[1], v_local.shape[3])),
        *fields_of_options(options),
    )
