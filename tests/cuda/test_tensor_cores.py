# SPDX-License-Identifier: BSD-3-Clause
"""Tensor cores cut sums off where float32 rounds them: what that costs, on the emulated device."""

import functools
from pathlib import Path

import pytest
import torch

import emulated
from emulated import TENSOR_CORES, TensorCore, emulated_operators
from helpers import assert_same_bits
from tensor_core_errors import ALL_ONES, HEAD_DIM, MeanOfValues
from tree_attention import lean_decode

pytestmark = pytest.mark.parametrize("core", TENSOR_CORES.values(), ids=TENSOR_CORES.keys())


@functools.cache
def problem_of(keys: int, rows: int, value: float | None) -> MeanOfValues:
    return MeanOfValues(keys, rows, value)


@functools.cache
def result_of(
    core: TensorCore, keys: int, rows: int, value: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return problem_of(keys, rows, value).run(core)


@pytest.mark.parametrize("rows, keys", [(8, 1 << 17), (16, 1 << 17), (48, 1 << 16)])
def test_one_block_of_a_long_context(rows, keys, core):
    """docs/numerics.md has longer ones."""
    assert problem_of(keys, rows, None).check.accuracy(*result_of(core, keys, rows, None)).right
    cut, rounded = (result_of(x, keys, rows, None)[0] for x in (core, TensorCore()))
    assert (cut.abs() <= rounded.abs()).all() and (cut != rounded).any(), "nothing was cut off"


@pytest.mark.deep
@pytest.mark.parametrize("rows, value", [(8, None), (16, None), (48, None), (16, ALL_ONES)])
def test_row_of_the_page(rows, value, core):
    """The shortest contexts in the table of docs/numerics.md; the program writes all rows."""
    keys = 1 << 16
    found = problem_of(keys, rows, value).check.accuracy(*result_of(core, keys, rows, value))
    shown = f"{found.o_error:.1e}" + " WRONG" * (not found.right)
    values = "about 0.5" if value is None else "2 − 2^-10"  # noqa: RUF001
    page = (Path(__file__).parents[2] / "docs/numerics.md").read_text()
    (row,) = (x for x in page.splitlines() if x.startswith(f"| {values} | {rows} | 65,536 |"))
    column = list(emulated.TENSOR_CORES.values()).index(core)
    assert row.split(" | ")[4 + column :][0] == shown
    assert row.endswith(f" {found.o_bound:.1e} |")


def test_shorter_contexts_lose_nothing(core):
    """Of what every block has by default."""
    problem = MeanOfValues(1 << 12)
    rounded = problem.accuracy(TensorCore())
    assert problem.accuracy(core).o_error == pytest.approx(rounded.o_error, rel=0.1)
    assert torch.isfinite(problem.run(core)[1]).all()


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8])
def test_chains_of_8_rows_are_those_of_16(core, kv_dtype):
    """Values are the left operand of 8 rows and the right one of 16: in both, 16 keys are added at
    a time, in the order of the keys."""
    for rows in (8, 16):
        plan = emulated.plan(torch.float16, HEAD_DIM, rows, emulated.H100, kv_dtype)
        assert plan.row_tile == rows
    q, k, v = MeanOfValues(1 << 14).inputs
    scales = {}
    if kv_dtype == torch.int8:
        q, k, v = 0 * q, k.to(kv_dtype), (100 * v).clamp(-128, 127).to(kv_dtype)
        scale = torch.rand(v.shape[:-1], generator=torch.Generator().manual_seed(1))
        scale[..., :256] = 1.0  # so that all weights are one, and their sums exact in any order
        scales = {"k_scale": torch.ones_like(scale), "v_scale": scale}

    def run(core: TensorCore, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        with emulated_operators(0, tensor_core=core):
            return lean_decode(q[:, :rows], k, v, num_workers=1, out_dtype=torch.float32, **scales)

    (o, lse), (o_of_16, lse_of_16) = run(core, 8), run(core, 16)
    assert_same_bits((o, lse), (o_of_16[:, :8], lse_of_16[:, :8]))
    assert (o != run(TensorCore(), 8)[0]).any(), "nothing was cut off"
