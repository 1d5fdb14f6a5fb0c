# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the fuzzer: it notices when a mending is undone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from adversary.mutations import MUTATIONS, Mutation, is_found, report

QUICK = [mutation for mutation in MUTATIONS if mutation.in_tests]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Mutation, Future[str]]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {m: pool.submit(report, m, tmp_path_factory.mktemp("mutant")) for m in QUICK}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mutation", QUICK, ids=lambda mutation: mutation.name)
def test_mutation_is_found(mutation: Mutation, reports: dict[Mutation, Future[str]]) -> None:
    text = reports[mutation].result()
    assert is_found(mutation, text), text or "not found"
