# SPDX-License-Identifier: BSD-3-Clause
"""Products of tokens with the experts that they are sent to.

The mistakes these tests are for: rows of one expert that meet another's weights, the halves of a
pair exchanged, a scale of another output, a tail of inputs that is left out.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from quantised_numbers import DTYPES, TOLERANCE, numbers_of
from tiers import tiers
from tree_attention.weights.parts import OfFile
from tree_attention.weights.quantised import SCHEMES, Matrix

OPERATOR = torch.ops.tree_attention.linear_of_experts


def _experts(scheme: str | None, weight: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the weights of experts for the operator, and what they stand for."""
    if scheme is None:
        return weight.to(dtype), None, weight.to(dtype)
    matrices = [Matrix(OfFile(weight), None, (expert,)) for expert in range(weight.shape[0])]
    made = [matrix.quantised(scheme, dtype) for matrix in matrices]
    numbers = torch.stack([numbers_of(each, scheme, dtype) for each in weight])
    data, scale = (torch.stack(x) for x in zip(*((m.data, m.scale) for m in made), strict=True))
    return data, scale, numbers


@pytest.mark.parametrize("dtype", tiers(DTYPES[:2], DTYPES[2:]))
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize(
    "rows, choices, count",
    [
        (1, 1, 6),
        (1, 4, 6),
        (5, 2, 6),
        (90, 3, 6),
        (0, 2, 6),
        (90, 1, 1),
        (31, 1, 1),
        (32, 1, 1),
        (40, 2, 6),
    ],
)
def test_linear_of_experts(
    rows: int, choices: int, count: int, scheme: str | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(count, 48, 96, generator=generator)
    experts = torch.randint(0, count, (rows * choices,), generator=generator)
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


@pytest.mark.deep
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
        ({"experts": torch.tensor([0, 1], dtype=torch.int32)}, "must be int64, got int32"),
        ({"experts": torch.tensor([0, 1, 1])}, "as many choices for each of the 2 rows of x, got"),
        ({"x": torch.randn(32)}, "must have 2, 1 and 3 axes, got 1, 1 and 3"),
    ],
)
def test_bad_experts(change: dict[str, Tensor], says: str) -> None:
    arguments = {"x": torch.randn(2, 32), "experts": torch.tensor([0, 1])} | change
    with pytest.raises(ValueError, match=f"linear_of_experts: .*{says}"):
        torch.ops.tree_attention.linear_of_experts(
            *arguments.values(), torch.randn(2, 16, 32), None, 0, False
        )


INT8, INT4 = (torch.ones(2, 16, 32, dtype=x) for x in (torch.int8, torch.uint8))
SCALE = torch.ones(2, 16)
GROUPS = torch.ones(2, 16, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": torch.randn(2, 64)}, "x must have the 32 columns that weight takes, got 64"),
        ({"x": torch.randn(2, 8)}, "x must have the 32 columns that weight takes, got 8"),
        ({"x": torch.randn(2, 16), "is_transposed": True}, None),
        ({"x": torch.ones(2, 32).double()}, "x must be float32, bfloat16 or float16, got float64"),
        ({"weight": torch.ones(2, 16, 32).half()}, "weight must be float32, got float16"),
        ({"front": 1}, "x must have the 32 columns that weight takes, got 32 after a front of 1"),
        ({"scale": SCALE}, "scale must be None for a weight of float32, got a tensor"),
        ({"weight": INT8}, "scale must be given for a weight of int8, got None"),
        ({"weight": INT8, "scale": SCALE}, None),
        ({"weight": INT8, "scale": SCALE.half()}, "scale must be float32, got float16"),
        ({"weight": INT8, "scale": SCALE[:, :3].clone()}, r"= \[2, 16\], got \[2, 3\]"),
        ({"weight": INT8, "scale": torch.ones(16, 2).T}, "scale must be contiguous, got str"),
        ({"weight": INT8, "scale": SCALE, "is_transposed": True}, "got is_transposed = True"),
        ({"weight": INT8[..., ::2], "scale": SCALE}, "of int8 must be contiguous .* got a view"),
        ({"weight": INT4}, "scale must be given for a weight of uint8, got None"),
        ({"weight": INT4, "scale": GROUPS}, None),
        ({"weight": INT4, "scale": SCALE}, r"\[experts, outputs, groups\] = .* got \[2, 16\]"),
        ({"weight": INT4, "scale": GROUPS[:1]}, r"= \[2, 16, 1\], got \[1, 16, 1\]"),
        (
            {"weight": INT4, "scale": GROUPS[..., :0]},
            "64 or 128 of the 64 columns .* got 0 gr",
        ),
        ({"weight": INT4, "scale": torch.ones(2, 16, 2)}, "of the 64 columns .* got 2 groups"),
        ({"weight": INT4, "scale": GROUPS, "front": 33}, "got 32 after a front of 33"),
        ({"weight": INT4, "scale": GROUPS, "front": -5}, "got 32 after a front of -5"),
    ],
)
def test_bad_weights(change: dict[str, Any], says: str | None) -> None:
    """Nothing is read behind the end of a weight or of its scales."""
    arguments: dict[str, Any] = {"x": torch.randn(2, 32), "experts": torch.tensor([0, 1])}
    arguments |= {"weight": torch.randn(2, 16, 32), "scale": None, "front": 0}
    arguments |= {"is_transposed": False} | change
    if says is None:
        assert OPERATOR(*arguments.values()).isfinite().all()
        return
    with pytest.raises(ValueError, match=f"linear_of_experts: .*{says}"):
        OPERATOR(*arguments.values())


def test_no_gradient() -> None:
    x, weight = torch.randn(2, 32, requires_grad=True), torch.randn(1, 16, 32)
    with pytest.raises(RuntimeError, match="linear_of_experts: x must not require a gradient"):
        OPERATOR(x, torch.tensor([0, 0]), weight, None, 0, False)


@pytest.mark.parametrize("rows", [1, 20, 40])
def test_sums_of_integers_fit_in_float16(rows: int) -> None:
    """The sum before it is scaled is beyond 65,504, and the product is not."""
    weight = torch.full((1, 16, 64), 0.01)
    data, scale, numbers = _experts("int8", weight, torch.float16)
    x = torch.full((rows, 64), 100.0, dtype=torch.float16)
    found = OPERATOR(x, torch.zeros(rows, dtype=torch.long), data, scale, 0, False)
    torch.testing.assert_close(found.float(), x.float() @ numbers[0].float().T, rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [8, 24, 31])
def test_int8_weights_of_any_width(inputs: int, dtype: torch.dtype) -> None:
    """Of so many rows that the weights are widened."""
    weight = torch.randn(1, 64, inputs)
    data, scale, numbers = _experts("int8", weight, dtype)
    x = torch.randn(20, inputs).to(dtype)
    found = OPERATOR(x, torch.zeros(20, dtype=torch.long), data, scale, 0, False)
    wanted = x.double() @ numbers[0].double().T
    largest = wanted.abs().max().item()
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=TOLERANCE[dtype] * largest)


@pytest.mark.parametrize(
    "scheme, inputs",
    [*product((None, "int8"), (1, 31, 64, 100, 1000)), *product(["int4"], (64, 192, 256, 1024))],
)
@pytest.mark.parametrize("dtype", tiers(DTYPES[:2], DTYPES[2:]))
def test_a_row_has_the_same_bits_in_any_company(
    instruction_set: str,
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


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_autocast_changes_nothing(rows: int, is_transposed: bool) -> None:
    weight = torch.randn(2, 32, 16) if is_transposed else torch.randn(2, 16, 32)
    x, experts = torch.randn(rows, 32), torch.arange(rows) % 2
    expected = OPERATOR(x, experts, weight, None, 0, is_transposed)
    with torch.autocast("cpu", torch.bfloat16):
        found = OPERATOR(x, experts, weight, None, 0, is_transposed)
    assert torch.equal(found, expected)


def test_rows_of_experts_that_have_many_are_gathered_once() -> None:
    experts = torch.tensor([0, 1]).repeat(100)
    experts[:4] = 2
    x, weight = torch.randn(200, 32), torch.randn(3, 16, 32)
    with torch.profiler.profile(record_shapes=True) as profile:
        OPERATOR(x, experts, weight, None, 0, False)
    gathers = [event for event in profile.events() if event.name == "aten::index_select"]
    assert sorted(event.input_shapes[2][0] for event in gathers) == [4, 98, 98]
