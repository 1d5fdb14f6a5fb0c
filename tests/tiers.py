# SPDX-License-Identifier: BSD-3-Clause
"""Which cases a contributor waits for (`scripts/test.sh`) and which are for `scripts/test_deep.sh`.

Folders are deep by conftest.py, modules by `pytestmark = pytest.mark.deep`, tests by
`@pytest.mark.deep`, and the parameters of a test by `tiers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def tiers(quick: Iterable[Any], deep: Iterable[Any]) -> list[Any]:
    """Return parameters of both tiers; several arguments of a test are a tuple."""
    marked = [
        pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.deep) for x in deep
    ]
    return [*quick, *marked]


def tiers_of(cases: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Return parameters of both tiers, of which `quick` names those that are not deep."""
    quick = list(quick)
    return tiers(quick, [case for case in cases if case not in quick])


def by_world(quick: Iterable[int], deep: Iterable[int]) -> pytest.MarkDecorator:
    """Parametrise `world_size`."""
    return pytest.mark.parametrize("world_size", tiers(quick, deep))
