# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the fuzzer: it notices when a mending is undone."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.adversary.mutations import MUTATIONS, ROOT, Mutation, is_found, report

QUICK = [mutation for mutation in MUTATIONS if mutation.in_tests]


@pytest.mark.parametrize("mutation", QUICK, ids=lambda mutation: mutation.name)
def test_mutation_is_found(mutation: Mutation, tmp_path: Path) -> None:
    text = report(mutation, tmp_path)
    assert is_found(mutation, text), text or "not found"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_of_text_that_is_there(mutation: Mutation) -> None:
    text = (ROOT / "python/tree_attention" / mutation.file).read_text()
    assert text.count(mutation.old) == 1
