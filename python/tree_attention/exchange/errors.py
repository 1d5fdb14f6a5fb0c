# SPDX-License-Identifier: BSD-3-Clause
"""The error of an exchange, and what the errors of libraries say in a sentence."""

from __future__ import annotations

import re

_PLACE_IN_SOURCE = re.compile(r"\[\S+\.(cc|cpp|h):\d+\] ")


class ExchangeError(RuntimeError):
    """The ranks of a group could not complete an exchange; no rank has a result.

    Raised on every rank that is left, within the timeout, when a rank is lost or stalled, which
    also makes the communicator unusable, or when ranks called with different arguments.
    """


class OtherCall(Exception):
    """A message is of another call; raised on every rank, before anything else is sent."""


def sentence(error: BaseException) -> str:
    """What a library's error says, without its place in the source, the C++ stack and advice."""
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return _PLACE_IN_SOURCE.sub("", line).partition(" This is typically")[0]
