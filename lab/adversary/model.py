# SPDX-License-Identifier: BSD-3-Clause
"""The slow obvious model: what a call of the same state must give, in float64 and key by key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from helpers import Problem, assert_same_non_finite, one_thread
from tree_attention import BlockCyclic, Contiguous, ContiguousThenCyclic, ShardLayout, reference

_EPS = torch.finfo(torch.float32).eps


def attention(problem: Problem) -> tuple[Tensor, Tensor]:
    """Over all keys of all ranks, in one place."""
    options = {name: x for name, x in problem.options.items() if name != "num_workers"}
    with torch.device("cpu"), one_thread():
        return reference.attention(problem.q, problem.k, problem.v, problem.key_ranges, **options)


def check_attention(
    found: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    problem: Problem,
    out_dtype: torch.dtype,
    payload_dtype: torch.dtype = torch.float32,
) -> None:
    """Rounding is bounded by the size of scores and values: a lost, a doubled or a foreign key is
    far beyond it, and no luck of rounding is."""
    (o, lse), (true_o, true_lse) = found, expected
    assert o.dtype == out_dtype and lse.dtype == torch.float32, (o.dtype, lse.dtype)
    assert o.shape == true_o.shape and lse.shape == true_lse.shape, (o.shape, true_o.shape)
    if o.numel() == 0:
        return
    assert_same_non_finite("o", o, true_o)
    assert_same_non_finite("lse", lse, true_lse)
    score = _largest_score(problem)
    value = _finite(problem.v).abs().max().item() if problem.v.numel() else 0.0
    coarse = max(torch.finfo(out_dtype).eps, torch.finfo(payload_dtype).eps)
    _check("o", o, true_o, value * (4 * coarse + 32 * _EPS * (1 + score)))
    _check("lse", lse, true_lse, 32 * _EPS * (1 + score))


def _largest_score(problem: Problem) -> float:
    """A bound of the magnitude of every sum that a score goes through."""
    if problem.k.numel() == 0:
        return 0.0
    scale = problem.options.get("softmax_scale")
    scale = problem.q.shape[3] ** -0.5 if scale is None else abs(scale)
    norms = [_finite(x).norm(dim=-1).max().item() for x in (problem.q, problem.k)]
    score = scale * norms[0] * norms[1]
    slopes = problem.options.get("alibi_slopes")
    if slopes is not None:
        first, block, stride = problem.options["key_layout"]
        last = first + (problem.k.shape[2] * problem.k.shape[0] // block + 1) * stride
        positions = problem.options["query_positions"].abs().max().item()
        score += slopes.abs().max().item() * (last + positions)
    return score


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x.double(), 0.0, 0.0, 0.0)


def _check(name: str, found: Tensor, expected: Tensor, limit: float) -> None:
    error = torch.where(expected.isfinite(), found.double() - expected, 0.0).abs().max().item()
    assert error <= limit, f"{name} is off by {error:.3g}, limit {limit:.3g}"


def all_reduce(parts: Sequence[Tensor], payload_dtype: torch.dtype) -> Tensor:
    """As the documentation of `Communicator.all_reduce` prints it: to the bit."""
    total = parts[0].to(payload_dtype).float()
    for part in parts[1:]:
        total = total + part.to(payload_dtype).float()
    return total.to(payload_dtype).to(parts[0].dtype)


def owners(layout: ShardLayout, length: int) -> list[int]:
    """The rank of each slot below `length`, dealt one after the other; -1 if there is none."""
    if isinstance(layout, BlockCyclic):
        dealt: list[int] = []
        while len(dealt) < length:
            for rank in range(layout.world_size):
                count = 1 if layout.shares is None else layout.shares[rank]
                dealt += [rank] * (count * layout.block)
        return dealt[:length]
    assert isinstance(layout, Contiguous | ContiguousThenCyclic)
    prefilled: list[int] = []
    for rank in range(layout.world_size):
        prefilled += [rank] * (layout.bounds[rank + 1] - layout.bounds[rank])
    if isinstance(layout, Contiguous):
        return (prefilled + [-1] * length)[:length]
    return (prefilled + owners(BlockCyclic(layout.world_size, layout.block), length))[:length]


def bits(*tensors: Tensor) -> str:
    """A text that is equal where shapes, dtypes and bits are."""
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(f"{x.dtype} {tuple(x.shape)}".encode())
        if x.device.type != "meta":
            digest.update(x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
