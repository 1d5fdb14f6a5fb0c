# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit, run again and again by one process."""

from collections.abc import Iterator
from functools import cache
from unittest import mock

import pytest

from tree_attention.reference.conformance import check

_prepare = cache(check.prepare)  # most of the time of a check; engines are given copies


@pytest.fixture(autouse=True)
def _prepared_once() -> Iterator[None]:
    with mock.patch.object(check, "prepare", _prepare):
        yield
