# SPDX-License-Identifier: BSD-3-Clause
"""Every error message of merge_states and lean_schedule."""

import pytest
import torch

from refused_calls import int32, int64, message_of, other_devices
from tree_attention import lean_schedule, merge_states

MERGE = {
    "o_parts axes": (
        lambda: merge_states(torch.ones(3), torch.ones(3)),
        "o_parts must have shape [n, ..., head_dim], got [3]",
    ),
    "no parts": (
        lambda: merge_states(torch.ones(0, 4, 8), torch.ones(0, 4)),
        "o_parts must hold at least one part, got [0, 4, 8]",
    ),
    "head_dim": (
        lambda: merge_states(torch.ones(2, 4, 0), torch.ones(2, 4)),
        "o_parts must have a head_dim of at least 1, got [2, 4, 0]",
    ),
    "o_parts dtype": (
        lambda: merge_states(torch.ones(2, 4, 8).double(), torch.ones(2, 4)),
        "o_parts must be float32, bfloat16 or float16, got float64",
    ),
    "lse_parts shape": (
        lambda: merge_states(torch.ones(2, 4, 8), torch.ones(2, 4, 1)),
        "lse_parts must have shape [n, ...] = [2, 4], got [2, 4, 1]",
    ),
    "heads and rows swapped": (
        lambda: merge_states(torch.ones(2, 3, 4, 8), torch.ones(2, 4, 3)),
        "lse_parts must have shape [n, ...] = [2, 3, 4], got [2, 4, 3]",
    ),
    "lse_parts dtype": (
        lambda: merge_states(torch.ones(2, 4, 8).half(), torch.ones(2, 4).half()),
        "lse_parts must be float32, got float16",
    ),
    "out_dtype": (
        lambda: merge_states(torch.ones(2, 4, 8), torch.ones(2, 4), out_dtype=torch.int32),
        "out_dtype must be float32, bfloat16 or float16, got int32",
    ),
    "o of out": (
        lambda: merge_into(torch.ones(3, 8), torch.ones(4)),
        "o must have shape [4, 8], got [3, 8]",
    ),
    "lse of out": (
        lambda: merge_into(torch.ones(4, 8), torch.ones(4, 1)),
        "lse must have shape [4], got [4, 1]",
    ),
    "strides of out": (
        lambda: merge_into(torch.ones(8, 4).T, torch.ones(4)),
        "o must be contiguous, got strides [1, 4]",
    ),
    "dtype of out's o": (
        lambda: merge_into(torch.ones(4, 8).double(), torch.ones(4)),
        "o must be float32, bfloat16 or float16, got float64",
    ),
    "dtype of out's lse": (
        lambda: merge_into(torch.ones(4, 8), torch.ones(4).half()),
        "lse must be float32, got float16",
    ),
}


def merge_into(o, lse):
    return merge_states(torch.ones(2, 4, 8), torch.ones(2, 4), out=(o, lse))


def test_merge_states_out_dtype_is_that_of_out():
    out = torch.ones(4, 8), torch.ones(4)
    with pytest.raises(ValueError, match=r"merge_states: out_dtype must be out's torch.float32"):
        merge_states(torch.ones(2, 4, 8), torch.ones(2, 4), out_dtype=torch.half, out=out)


@pytest.mark.parametrize("name", MERGE)
def test_merge_states(name):
    call, message = MERGE[name]
    assert message_of(call) == f"merge_states: {message}"


SCHEDULE = {
    "axes": (
        lambda: lean_schedule(int32(2, 2), 3),
        "num_tiles must have shape [outputs], got [2, 2]",
    ),
    "dtype": (lambda: lean_schedule(int64(2), 3), "num_tiles must be int32, got int64"),
    "workers": (
        lambda: torch.ops.tree_attention.lean_schedule(int32(2), 0),
        "num_workers must be at least 1, got 0",
    ),
    "line times workers": (
        lambda: lean_schedule(torch.tensor([2, 2]).int(), 2**62),
        "num_workers times the sum of num_tiles must be below 2^63, got 4611686018427387904 and 4",
    ),
    "negative": (
        lambda: lean_schedule(torch.tensor([4, -2]).int(), 3),
        "num_tiles must not be negative, got -2 for output 1",
    ),
}


@pytest.mark.parametrize("name", SCHEDULE)
def test_lean_schedule(name):
    call, message = SCHEDULE[name]
    assert message_of(call) == f"lean_schedule: {message}"


@other_devices
def test_merge_device(other_device):
    lse_parts = torch.ones(2, 4, device=other_device)
    message = message_of(lambda: merge_states(torch.ones(2, 4, 8), lse_parts))
    assert message == f"merge_states: lse_parts must be on o_parts' device cpu, got {other_device}"
