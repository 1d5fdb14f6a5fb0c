# SPDX-License-Identifier: BSD-3-Clause
from collections.abc import Iterator

import pytest

from instruction_sets import NAMES, QUICK, use
from tiers import tiers


@pytest.fixture(params=tiers(QUICK, [name for name in NAMES if name not in QUICK]))
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with use(request.param):
        yield request.param
