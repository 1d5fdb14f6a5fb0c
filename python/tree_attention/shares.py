# SPDX-License-Identifier: BSD-3-Clause
"""How much of a model, its cache and its prompts each rank gets, in proportion to some integers.

Shares are a tuple of integers, one for each rank of a group, without a common divisor; None stands
for equal ones. A rank with a share of 0 gets nothing, and takes part in every exchange.
"""

import math

from ._numbers import as_integers, shown

Shares = tuple[int, ...] | None

# A cycle of the cache's slots has `sum(shares)` blocks, and only whole cycles are as shares say.
MAX_SHARE = 1024


def as_shares(op: str, name: str, value: object, world_size: int) -> Shares:
    """The shares that the argument `name` of `op` is, for a group of `world_size` ranks.

    Raises:
        TypeError: it is no list of integers.
        ValueError: it has not one for each rank, one is out of range, or all are 0.
    """
    if value is None:
        return None
    found = as_integers(value)
    if (
        found is None
        or len(found) != world_size
        or min(found) < 0
        or not 0 < max(found) <= MAX_SHARE
    ):
        error = TypeError if found is None else ValueError
        raise error(
            f"{op}: {name} must be an integer from 0 to {MAX_SHARE:,} for each of {world_size} "
            f"ranks, and not all 0, got {shown(value)}"
        )
    divisor = math.gcd(*found)
    shares = tuple(share // divisor for share in found)
    return None if min(shares) == max(shares) else shares
