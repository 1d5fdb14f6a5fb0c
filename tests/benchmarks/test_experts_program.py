# SPDX-License-Identifier: BSD-3-Clause
"""The program that measures a token through its experts, with small ones."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig

from benchmarks import experts

SMALL = Qwen3MoeConfig(num_experts=16, hidden_size=256, moe_intermediate_size=128)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "CONFIG", SMALL)


def test_rows_are_right_and_have_their_bytes() -> None:
    rows = experts.measure(0.0)
    assert not experts.report_of(rows).wrong
    of_dtype = {row["name"]: row["bytes"] for row in rows}
    numbers = experts.CHOICES * 3 * 256 * 128
    assert of_dtype["ours, bf16"] == of_dtype["grouped_mm, bf16"] == 2 * numbers
    assert numbers < of_dtype["ours, int8"] < 1.05 * numbers
    assert numbers / 2 < of_dtype["ours, int4"] < 0.55 * numbers


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_none(module, x, chosen, weights):
        return torch.zeros_like(x)

    monkeypatch.setattr(experts, "experts_forward", of_none)
    wrong = {row["name"] for row in experts.measure(0.0) if row["wrong"]}
    assert wrong == {"ours, bf16", "ours, int8", "ours, int4"}
