# SPDX-License-Identifier: BSD-3-Clause
"""Problems with keys and values of 8 bits, for the CPU's kernels and those of CUDA."""

import math

import pytest
import torch

from helpers import Problem, make_problem

INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
by_kv_dtype = pytest.mark.parametrize("kv_dtype", [INT8, FLOAT8], ids=["int8", "float8"])

# What both run; each has sizes of its own tiles beside them.
CASES = {
    "no keys": {"seqlen_k": 0},
    "one key": {"seqlen_k": 1},
    "one row": {"group_size": 1},
    "sixteen rows": {"group_size": 8, "seqlen_q": 2},
    "uneven rows": {"group_size": 3, "seqlen_q": 7, "ranges": "causal"},
    "many rows in a window": {"seqlen_q": 40, "ranges": "window", "seqlen_k": 300},
    "many rows on pages": {"seqlen_q": 40, "ranges": "causal", "page_size": 16, "seqlen_k": 390},
    "head_dim 64 and 128": {"head_dim": 64, "head_dim_v": 128},
    "ragged, BSHD": {"batch": 3, "ranges": "ragged", "layout": "BSHD"},
    "left padded": {"batch": 3, "ranges": "left padded", "layout": "padded"},
    "random ranges": {"batch": 3, "seqlen_q": 6, "seqlen_k": 600, "ranges": "random"},
    "pages": {"page_size": 16, "seqlen_k": 210, "ranges": "ragged"},
    "pages of one key": {"page_size": 1, "seqlen_k": 50, "seqlen_q": 2, "ranges": "random"},
    "large pages of a head": {"page_size": 70, "per_head": True, "seqlen_q": 2, "layout": "BSHD"},
    "alibi": {"alibi": 1 / 64, "seqlen_q": 3, "ranges": "causal"},
    "softcap": {"softcap": 2.0},
    "negative scale": {"softmax_scale": -0.2, "softcap": 5.0, "alibi": 1 / 64},
    "peaked scores": {"score_size": 15.0},
}

# (layout, page_size) of problems that have to have the same bits.
PLACES = [("BHSD", 0), ("BSHD", 0), ("padded", 0), ("BHSD", 48), ("BSHD", 64)]


def seen_by_two_of_three(kv_dtype: torch.dtype, dtype: torch.dtype) -> Problem:
    """Key 120 of the second sequence is seen by queries 0 and 1."""
    problem = make_problem(seqlen_q=3, seqlen_k=200, kv_dtype=kv_dtype, dtype=dtype)
    problem.key_ranges = torch.tensor([[0, 150], [100, 200], [151, 200]]).int().repeat(2, 1, 1)
    return problem


def every_byte(kv_dtype: torch.dtype, dtype: torch.dtype) -> tuple[Problem, torch.Tensor]:
    """Each of 256 sequences has one byte in all its keys, in one column of which its queries look,
    and all bytes in each of its values. With it the halves of what the bytes stand for, which are
    the columns of o and, beside the logarithm of 32 keys, the lse."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    numbers = bytes_.view(kv_dtype).float()
    assert numbers.isfinite().sum() == (256 if kv_dtype == INT8 else 254)
    k = bytes_[:, None, None, None].repeat(1, 1, 32, 64).view(kv_dtype)
    v = bytes_.repeat(256, 1, 32, 1).view(kv_dtype)
    q = torch.zeros(256, 4, 1, 64, dtype=dtype)
    q[torch.arange(256), :, 0, torch.arange(256) % 64] = 1
    scale = torch.full((256, 1, 32), 0.5)
    options = {"softmax_scale": 1.0, "k_scale": scale, "v_scale": scale}
    return Problem(q, k, v, options=options), numbers / 2


def check_every_byte(
    o: torch.Tensor, lse: torch.Tensor, halves: torch.Tensor, *, rtol: float
) -> None:
    """`rtol`: of o."""
    is_number = halves.isfinite()
    assert lse[~is_number].isnan().all()
    torch.testing.assert_close(
        lse[is_number][:, :, 0], (halves + math.log(32))[is_number, None].expand(-1, 4),
        rtol=1e-6, atol=1e-6,
    )  # fmt: skip
    torch.testing.assert_close(
        o[is_number][:, :, 0], halves.expand(int(is_number.sum()), 4, 256),
        rtol=rtol, atol=0, equal_nan=True,
    )  # fmt: skip


def with_scales_by_token(problem: Problem) -> Problem:
    """The same scales, those of the heads of a token side by side."""
    for name in ("k_scale", "v_scale"):
        by_token = problem.options[name].transpose(1, 2).contiguous().transpose(1, 2)
        assert by_token.stride(2) == 2
        problem.options[name] = by_token
    return problem


def with_one_scale(problem: Problem) -> Problem:
    """One number for all keys and values, by strides of zero."""
    one = torch.tensor([[[0.25]]], device=problem.k.device)
    for name in ("k_scale", "v_scale"):
        problem.options[name] = one.expand(problem.k.shape[:3])
    return problem
