# SPDX-License-Identifier: BSD-3-Clause
"""Shares of a model, its cache and its prompts for each rank, in proportion to some integers.

Shares are a tuple of integers, one for each rank of a group, without a common divisor; None stands
for equal ones. A rank with a share of 0 gets nothing, and takes part in every exchange.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from ._numbers import as_integers, shown

Shares = tuple[int, ...] | None
# As callers give them.
GivenShares = Literal["auto"] | Sequence[int] | Mapping[str, Sequence[int] | None] | None
AUTO = "auto"  # which measures the hosts

# A cycle of the cache's slots has `sum(shares)` blocks, and only whole cycles are as shares say.
MAX_SHARE = 1024

# Ranks compute a part each of queries that all of them need, and gather them, where each then reads
# so many numbers less on average: in bf16 50 MB, for which a socket of 307 GB/s takes about as long
# as for a small message over 10 Gb/s, 0.15 ms. Of any dtype, so that all are cut alike.
LEAST_SAVED = 24 << 20


def pays_to_gather(numbers: int, ranks: int) -> bool:
    """True where `ranks` ranks share out the outputs of a projection of so many weights."""
    return ranks > 1 and numbers * (ranks - 1) >= LEAST_SAVED * ranks


def is_auto(value: object) -> bool:
    return isinstance(value, str) and value == AUTO


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


def parts(size: int, count: int, shares: Shares = None, granule: int = 1) -> list[tuple[int, int]]:
    """The parts [begin, end) of `size` things for `count` ranks, by largest remainders of granules.

    Of equal remainders the lower rank's is first. The last rank that has a share gets what is left
    of a granule.
    """
    weights = shares or (1,) * count
    granules, total = size // granule, sum(weights)
    sizes = [granules * weight // total for weight in weights]
    by_remainder = sorted(range(count), key=lambda r: (-(granules * weights[r] % total), r))
    for rank in by_remainder[: granules - sum(sizes)]:
        sizes[rank] += 1
    bounds = [granule * bound for bound in accumulate(sizes, initial=0)]
    last = max(rank for rank, weight in enumerate(weights) if weight)
    bounds[last + 1 :] = [size] * (count - last)
    return list(pairwise(bounds))


class ModelShares(NamedTuple):
    """Shares of the ranks of a group: of a model's weights, and, for the ranks that share keys, of
    the cache's slots and of the tokens of split prompts."""

    weights: Shares = None
    cache: Shares = None
    prompt: Shares = None

    def given(self, tensor_parallel_size: int = 1) -> dict[str, list[int]] | None:
        """The argument `shares` that stands for these; None: equal ones."""
        lists = {
            "weights": self.weights,
            "cache": _repeated(self.cache, tensor_parallel_size),
            "prompt": _repeated(self.prompt, tensor_parallel_size),
        }
        return {name: list(x) for name, x in lists.items() if x is not None} or None

    @staticmethod
    def of(op: str, value: object, world_size: int, tensor_parallel_size: int = 1) -> "ModelShares":
        """The argument `shares` of `op`: a list for all three, or a mapping of lists by name;
        what it leaves out is split evenly.

        Raises:
            TypeError, ValueError: as in `as_shares`; there is no such name; or ranks of a tensor
                group, which split heads evenly, have unequal shares.
        """
        if isinstance(value, str):
            raise TypeError(
                f"{op}: shares must be {AUTO!r}, or an integer for each of {world_size} ranks, got "
                f"{shown(value)}"
            )
        lists = value if isinstance(value, Mapping) else dict.fromkeys(ModelShares._fields, value)
        found: dict[str, Shares] = {}
        for name, given in lists.items():
            if name not in ModelShares._fields:
                names = ", ".join(ModelShares._fields)
                raise ValueError(f"{op}: shares must be of {names}, got {shown(name)}")
            whole = f"shares[{name!r}]" if isinstance(value, Mapping) else "shares"
            shares = as_shares(op, whole, given, world_size)
            if shares is not None:
                own, *others = (
                    shares[i::tensor_parallel_size] for i in range(tensor_parallel_size)
                )
                if any(other != own for other in others):
                    raise ValueError(
                        f"{op}: {whole} must be equal for the {tensor_parallel_size} consecutive "
                        f"ranks of each tensor group, got {shown(given)}"
                    )
                if name != "weights":
                    shares = as_shares(op, whole, own, len(own))
            found[name] = shares
        return ModelShares(**found)


EQUAL = ModelShares()


def _repeated(shares: Shares, times: int) -> Shares:
    return None if shares is None else tuple(x for x in shares for _ in range(times))
