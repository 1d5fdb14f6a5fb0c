# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of questions behind one document, with a tiny model."""

from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("transformers")

from benchmarks import documents
from tree_attention.hf import TreeCache

TINY = documents.DocumentCase("tiny", document=1024)


@pytest.fixture(autouse=True)
def not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "pin_threads", list)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_case_is_measured_and_right(kv_dtype: str | None) -> None:
    """The document is saved by two ranks, and asked about in one process."""
    case = documents.DocumentCase("tiny", kv_dtype, 1024, with_ask=kv_dtype is not None)
    report = documents.measure([case], 2)
    assert report.wrong == []
    (row,) = report.rows
    slot = 2 * 2 * 2 * (16 * 2 if kv_dtype is None else 16 + 4)  # layers, keys and values, heads
    assert row["document_bytes"] == 1024 * slot
    assert 1.0 <= row["memory"] < 3.0
    assert ("first_token_seconds" in row) == case.with_ask


def test_a_row_that_reads_another_document_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    share = TreeCache.share

    def changed(self: TreeCache, batch: int) -> Any:
        shared = share(self, batch)
        if batch > 1:
            for layer in shared.kv_layers:
                buffers = {name: _turned(x) for name, x in layer.prefix.buffers.items()}
                layer.prefix.buffers = buffers
        return shared

    monkeypatch.setattr(TreeCache, "share", changed)
    (row,) = documents.measure([TINY], 2).rows
    assert row["wrong"]


def _turned(x: Tensor) -> Tensor:
    return -x.flip(1)
