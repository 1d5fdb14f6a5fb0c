# SPDX-License-Identifier: BSD-3-Clause
"""Products of tokens with the experts that they are sent to.

The mistakes these tests are for: rows of one expert that meet another's weights, the halves of a
pair exchanged, a scale of another output, a tail of inputs that is left out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from quantised_numbers import DTYPES, TOLERANCE, numbers_of
from test_instruction_sets import instruction_set  # noqa: F401
from tree_attention.hf.weights.parts import OfFile
from tree_attention.hf.weights.quantised import SCHEMES, Matrix

OPERATOR = torch.ops.tree_attention.linear_of_experts


def _experts(scheme: str | None, weight: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the weights of experts for the operator, and what they stand for."""
    if scheme is None:
        return weight.to(dtype), None, weight.to(dtype)
    matrices = [
        Matrix(OfFile(weight), ((0, weight.shape[1]),), (0, weight.shape[2]), (expert,))
        for expert in range(weight.shape[0])
    ]
    made = [matrix.quantised(scheme, dtype) for matrix in matrices]
    numbers = torch.stack([numbers_of(each, scheme, dtype) for each in weight])
    data, scale = (torch.stack(x) for x in zip(*((m.data, m.scale) for m in made), strict=True))
    return data, scale, numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("rows, choices", [(1, 1), (1, 4), (5, 2), (90, 3), (0, 2)])
def test_linear_of_experts(rows: int, choices: int, scheme: str | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(6, 48, 96, generator=generator)
    experts = torch.randint(0, 6, (rows * choices,), generator=generator)
    experts[experts == 3] = 2  # one that nobody chooses
    x = torch.randn(rows, 192, generator=generator).to(dtype)[:, ::2]  # not contiguous
    data, scale, numbers = _experts(scheme, weight, dtype)
    operator = torch.ops.tree_attention.linear_of_experts
    found = operator(x, experts, data, scale, 0, False)
    pairs = zip(x.repeat_interleave(choices, 0), experts, strict=True)
    expected = [numbers[expert].double() @ row.double() for row, expert in pairs]
    wanted = torch.stack(expected) if expected else torch.empty(0, 48, dtype=torch.float64)
    assert found.dtype == dtype
    largest = wanted.abs().max().item() if rows else 1.0
    torch.testing.assert_close(found.double(), wanted, rtol=0.0, atol=TOLERANCE[dtype] * largest)
    if scheme is None:
        transposed = operator(x, experts, data.transpose(1, 2).contiguous(), None, 0, True)
        torch.testing.assert_close(
            transposed.double(), wanted, rtol=0.0, atol=TOLERANCE[dtype] * largest
        )


def test_operator_check() -> None:
    x, experts = torch.randn(2, 32), torch.tensor([0, 1, 1, 0])
    weight = torch.randn(2, 16, 32)
    torch.library.opcheck(
        torch.ops.tree_attention.linear_of_experts, (x, experts, weight, None, 0, False)
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"experts": torch.tensor([0, 2])}, r"experts must be in \[0, 2\), got 2"),
        ({"experts": torch.tensor([0, -1])}, r"experts must be in \[0, 2\), got -1"),
        ({"experts": torch.tensor([0, 1], dtype=torch.int32)}, "must be int64, got Int"),
        ({"experts": torch.tensor([0, 1, 1])}, "as many choices for each of the 2 rows of x, got"),
        ({"x": torch.randn(32)}, "must have 2, 1 and 3 axes, got 1, 1 and 3"),
    ],
)
def test_bad_experts(change: dict[str, Tensor], says: str) -> None:
    arguments = {"x": torch.randn(2, 32), "experts": torch.tensor([0, 1])} | change
    with pytest.raises(RuntimeError, match=f"linear_of_experts: .*{says}"):
        torch.ops.tree_attention.linear_of_experts(
            *arguments.values(), torch.randn(2, 16, 32), None, 0, False
        )


@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [1, 31, 64, 100, 1000])
def test_a_row_has_the_same_bits_in_any_company(
    instruction_set: str,  # noqa: F811
    inputs: int,
    dtype: torch.dtype,
    scheme: str | None,
) -> None:
    weight = torch.randn(2, 37, inputs)
    data, scale, _ = _experts(scheme, weight, dtype)
    x, experts = torch.randn(13, inputs).to(dtype), torch.arange(13) % 2
    together = OPERATOR(x, experts, data, scale, 0, False)
    for row in range(13):
        one = slice(row, row + 1)
        assert torch.equal(OPERATOR(x[one], experts[one], data, scale, 0, False)[0], together[row])
