# SPDX-License-Identifier: BSD-3-Clause
"""Small calls of the operators, right but for what a test changes, and the message of a refusal."""

import pytest
import torch

from tree_attention import lean_decode

BATCH, HEADS_Q, HEADS_KV, SEQLEN_Q, SEQLEN_K, DIM = 2, 4, 2, 3, 10, 8


def q(*shape, **options):
    return torch.randn(*(shape or (BATCH, HEADS_Q, SEQLEN_Q, DIM)), **options)


def k(*shape, **options):
    return torch.randn(*(shape or (BATCH, HEADS_KV, SEQLEN_K, DIM)), **options)


def int32(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def int64(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def int8(*shape):
    return torch.zeros(shape or (BATCH, HEADS_KV, SEQLEN_K, DIM), dtype=torch.int8)


def float8():
    return k().to(torch.float8_e4m3fn)


def scale(*shape):
    return torch.ones(shape or (BATCH, HEADS_KV, SEQLEN_K))


def transposed(x, axis=-2):
    """The same shape with a last axis that is not contiguous."""
    return x.transpose(axis, -1).contiguous().transpose(axis, -1)


def decode(**changed):
    arguments = {"q": q(), "k": k(), "v": k(), **changed}
    return lean_decode(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def decode_out(o=None, lse=None, **changed):
    o = torch.empty(BATCH, HEADS_Q, SEQLEN_Q, DIM) if o is None else o
    lse = torch.empty(BATCH, HEADS_Q, SEQLEN_Q) if lse is None else lse
    return decode(out=(o, lse), **changed)


def alibi(**changed):
    arguments = {
        "alibi_slopes": torch.ones(HEADS_Q),
        "query_positions": int64(BATCH, SEQLEN_Q),
        **changed,
    }
    return decode(**arguments)


def huge(*shape, dtype=torch.float32):
    """A shape that no memory holds: every axis but the last has stride 0. What is left is address
    space that is never touched."""
    return torch.empty(shape[-1], dtype=dtype).expand(*shape)


def message_of(call, kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value).splitlines()[0]


other_devices = pytest.mark.parametrize(
    "other_device",
    [
        "meta",
        pytest.param(
            "cuda:0",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ),
    ],
)
