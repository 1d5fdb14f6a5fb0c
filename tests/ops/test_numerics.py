# SPDX-License-Identifier: BSD-3-Clause
"""scripts/numerics.py, on lengths that take a second, and the page that it writes."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.harness.regions import END, mark

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def numerics() -> ModuleType:
    spec = importlib.util.spec_from_file_location("numerics", ROOT / "scripts" / "numerics.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["numerics"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scores", ["flat", "normal", "peaked"])
def test_measured_errors_are_within_their_bounds(numerics, scores, dtype):
    result = numerics.measure(scores, 2048, dtype)
    assert result.right and result.same_bits
    assert list(result.tree_o) == numerics.WORLDS
    assert 0 < result.plain_o < 0.5 and all(error > 0 for error in result.tree_o.values())


def test_wrong_result_is_called_so(numerics):
    result = numerics.measure("normal", 1024, torch.float32)
    assert "WRONG" not in numerics.table([result])
    result.tree_o[8] = 10 * result.plain_o
    assert not result.right and "WRONG" in numerics.table([result])
    result.tree_o[8] = float("nan")
    assert not result.right


def test_oracle_in_chunks_equals_the_reference(numerics, monkeypatch):
    monkeypatch.setattr(numerics, "CHUNK", 100)
    q, k, v = (torch.randn(1, 2, n, 8) for n in (1, 1024, 1024))
    in_chunks = numerics.float64_attention(q, k, v)
    torch.testing.assert_close(in_chunks, numerics.attention(q, k, v), rtol=1e-12, atol=1e-12)


def test_page_holds_a_full_table(numerics):
    page = (ROOT / "docs" / "numerics.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith(tuple(
        f"| {scores} |" for scores in numerics.SCORES
    ))]  # fmt: skip
    assert len(rows) == len(numerics.SCORES) * len(numerics.LENGTHS)
    # The table of tensor cores has WRONG where the sums of a GPU would break the bound.
    measured = page.partition(mark("scripts/numerics.py"))[2].partition(END)[0]
    assert measured and "WRONG" not in measured and "-dirty" not in page
