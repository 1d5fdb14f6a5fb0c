# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the fuzzer: it notices when a mending is undone."""

from __future__ import annotations

from pathlib import Path

import pytest

from adversary.mutations import MUTATIONS, Mutation, report


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_found(mutation: Mutation, tmp_path: Path) -> None:
    text = report(mutation, mutation.part, mutation.kind, mutation.num_cases, tmp_path)
    assert "python tests/adversary --only" in text, "not found"
