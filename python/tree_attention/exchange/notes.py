# SPDX-License-Identifier: BSD-3-Clause
"""Short messages that ranks tell one another beside their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# The fields of a call that must be equal on all ranks, by name.
Signature = tuple[tuple[str, object], ...]
# What a rank tells the others about itself, in terms of JSON; it may differ from theirs.
Note = dict[str, Any]
# Collective: gives all ranks, for a step by this name, the notes of all ranks in rank order.
Gather = Callable[[str, Note], Sequence[Note]]


def first_reason(notes: Sequence[Note]) -> str:
    """The first rank with a reason in its note and that reason, or nothing."""
    reasons = (note.get("reason") for note in notes)
    return next((f"rank {r}: {reason}" for r, reason in enumerate(reasons) if reason), "")
