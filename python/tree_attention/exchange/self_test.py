# SPDX-License-Identifier: BSD-3-Clause
"""Do machines round alike? A test merge whose bits ranks compare before they exchange anything."""

from __future__ import annotations

import functools
import hashlib

import torch

from ..ops import merge_states

_NUM_PARTS, _NUM_ROWS, _HEAD_DIM = 7, 64, 16


@functools.lru_cache(maxsize=16)
def merge_digest(device: torch.device) -> str:
    """Of a merge of fixed states on `device`, far apart and near, one in eight empty.

    Ranks that merge the same states promise the same bits, which different kinds of processors
    keep only if they round alike.
    """
    # Integers and a division by a power of two: the same states everywhere.
    counts = torch.arange(_NUM_PARTS * _NUM_ROWS * (_HEAD_DIM + 1), dtype=torch.int64)
    numbers = ((counts * 2654435761 % 65536) - 32768).float() / 4096
    states = numbers.view(_NUM_PARTS, _NUM_ROWS, _HEAD_DIM + 1)
    o, lse = states[..., :-1], states[..., -1].clone()
    lse[:, ::2] *= 8
    lse[:, ::3] /= 64
    lse.view(-1)[::8] = -torch.inf
    merged = merge_states(o.to(device), lse.to(device))
    content = b"".join(x.cpu().contiguous().numpy().tobytes() for x in merged)
    return hashlib.sha256(content).hexdigest()[:12]
