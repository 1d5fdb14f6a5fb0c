# SPDX-License-Identifier: BSD-3-Clause
"""Notes that ranks send one another in addition to their states, and the errors that they raise."""

import re
from collections.abc import Callable, Sequence
from typing import Any

# The fields of a call that must be equal on all ranks, by name.
Signature = tuple[tuple[str, object], ...]
# What a rank tells the others about itself, in terms of JSON; it may differ from theirs.
Note = dict[str, Any]
# Collective: gives all ranks, for a step by this name, the notes of all ranks in rank order.
Gather = Callable[[str, Note], Sequence[Note]]

_PLACE_IN_SOURCE = re.compile(r"\[\S+\.(cc|cpp|h):\d+\] ")


class ExchangeError(RuntimeError):
    """The ranks of a group could not complete an exchange; no rank has a result.

    Raised on every rank that is left, within the timeout, when a rank is lost or stalled, which
    also makes the communicator unusable, or when ranks called with different arguments.
    """


class Disagreement(RuntimeError):
    """All ranks know that their signatures differ: nothing was sent, and nobody waits."""


class OtherCall(Exception):
    """A message is of another call; raised on every rank, before anything else is sent."""


def sentence(error: BaseException) -> str:
    """Message of a library's error, without its place in the source, the C++ stack and advice."""
    line, _, rest = str(error).strip().partition("\n")
    if line.endswith(":") and rest:  # the reason is on the next one
        line = f"{line} {rest.strip().partition(chr(10))[0]}"
    line = line or type(error).__name__
    return _PLACE_IN_SOURCE.sub("", line).partition(" This is typically")[0]


def attempt(step: Callable[[], Note]) -> Note:
    """Return the note of `step` for the other ranks, or the reason why it failed."""
    try:
        return step()
    except (AttributeError, OSError, RuntimeError) as error:  # the first where it is not Linux
        return {"reason": sentence(error)}


def ranks_text(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Ranks by their numbers; `hosts` are the hosts of all ranks, as far as they are known."""
    names = (f"{rank} ({hosts[rank]})" if hosts and hosts[rank] else str(rank) for rank in ranks)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(names)}"


def first_reason(notes: Sequence[Note]) -> str:
    """The first rank with a reason in its note and that reason, or nothing."""
    reasons = (note.get("reason") for note in notes)
    return next((f"rank {r}: {reason}" for r, reason in enumerate(reasons) if reason), "")
