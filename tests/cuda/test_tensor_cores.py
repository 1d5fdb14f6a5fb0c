# SPDX-License-Identifier: BSD-3-Clause
"""Tensor cores cut sums off where float32 rounds them: what that costs, on the emulated device."""

import pytest
import torch

from emulated import TENSOR_CORES, TensorCore
from tensor_core_errors import MeanOfValues

pytestmark = pytest.mark.parametrize("core", TENSOR_CORES.values(), ids=TENSOR_CORES.keys())


@pytest.mark.parametrize("rows, keys", [(16, 1 << 17), (48, 1 << 16)])
def test_one_block_of_a_long_context(rows, keys, core):
    """docs/numerics.md has longer ones."""
    problem = MeanOfValues(keys, rows)
    assert problem.accuracy(core).right
    cut, rounded = problem.run(core)[0], problem.run(TensorCore())[0]
    assert (cut.abs() <= rounded.abs()).all() and (cut != rounded).any(), "nothing was cut off"


def test_shorter_contexts_lose_nothing(core):
    """Of what every block has by default."""
    problem = MeanOfValues(1 << 12)
    rounded = problem.accuracy(TensorCore())
    assert problem.accuracy(core).o_error == pytest.approx(rounded.o_error, rel=0.1)
    assert torch.isfinite(problem.run(core)[1]).all()
