# SPDX-License-Identifier: BSD-3-Clause
"""The fuzzer notices when a correction is undone."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.adversary.mutations import MUTATIONS, PACKAGE, WITHOUT, Mutation, is_found, report

QUICK = [mutation for mutation in MUTATIONS if mutation.in_tests]


@pytest.mark.parametrize("mutation", QUICK, ids=lambda mutation: mutation.says)
def test_mutation_is_found(mutation: Mutation, tmp_path: Path) -> None:
    text = report(mutation, tmp_path)
    assert is_found(mutation, text), text or "not found"


def test_each_comment_is_tried() -> None:
    said = [x for file in PACKAGE.rglob("*.py") for x in WITHOUT.findall(file.read_text())]
    assert sorted(said) == sorted(mutation.says for mutation in MUTATIONS)
    for mutation in MUTATIONS:
        text = (PACKAGE / mutation.file).read_text()
        undone = mutation.undone(text)
        assert undone != text and compile(undone, mutation.file, "exec")
