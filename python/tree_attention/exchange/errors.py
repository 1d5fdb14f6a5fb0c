# SPDX-License-Identifier: BSD-3-Clause
"""The errors of an exchange, and what the errors of libraries say in a sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_PLACE_IN_SOURCE = re.compile(r"\[\S+\.(cc|cpp|h):\d+\] ")


class ExchangeError(RuntimeError):
    """The ranks of a group could not complete an exchange; no rank has a result.

    Raised on every rank that is left, within the timeout, when a rank is lost or stalled, which
    also makes the communicator unusable, or when ranks called with different arguments.
    """


class Disagreement(RuntimeError):
    """All ranks know that their signatures differ: nothing was sent, and nobody waits."""

    def __init__(self, message: str, values: Mapping[str, Sequence[str | None]] = {}) -> None:
        super().__init__(message)
        # Every rank's value of each field that differs, in rank order.
        self.values = values


class OtherCall(Exception):
    """A message is of another call; raised on every rank, before anything else is sent."""


def sentence(error: BaseException) -> str:
    """Message of a library's error, without its place in the source, the C++ stack and advice."""
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return _PLACE_IN_SOURCE.sub("", line).partition(" This is typically")[0]


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
