# SPDX-License-Identifier: BSD-3-Clause
"""Work that every rank does by itself, and that succeeds on all ranks or raises on all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ..errors import ExchangeError, sentence
from ..notes import Note, Signature
from .call import Calls

T = TypeVar("T")


def on_every_rank(
    op: str,
    comm: Calls,
    timeout: float,
    run: Callable[[], tuple[Signature, T]],
    note_of: Callable[[T], Note] = lambda result: {},
) -> tuple[T, list[Note]]:
    """Return what `run` does, if it raised on no rank and gave the same signature on all.

    Returns:
        Its result, and the notes that `note_of` makes of the results of all ranks, in rank order.
    """
    try:
        signature, result = run()
    except Exception as error:
        with suppress(ExchangeError):  # the others have it from this rank, and this one its own
            comm.agree((("outcome", sentence(error)),), timeout, op)
        raise
    notes = comm.agree((("outcome", "success"), *signature), timeout, op, note_of(result))
    return result, notes
