# SPDX-License-Identifier: BSD-3-Clause
"""Operations on an enabled model and its cache in random order, in interpreters of their own."""

from __future__ import annotations

import torch

from . import session_caches as caches
from . import session_documents
from . import session_operations as operations
from .cases import Case
from .conversation import Conversation
from .session_operations import Operation

_INTERPRETERS_FOR = 20  # sessions that follow one another


def world_size(case: Case) -> int:
    return case.first.choice([1, 2, 2, 2, 3, 3, 4])


def hash_seed(case: Case) -> int:
    """Strings are in another order in the sets of each rank, and of other sessions."""
    return (1 + 1000 * case.seed + 10 * (case.index // _INTERPRETERS_FOR)) % 2**31


def play(case: Case, rank: int) -> str:
    torch.manual_seed(case.seed)
    session = Conversation.begin(case.rng, world_size(case))
    begun, steps, digest = str(session), [], []
    try:
        for step in range(case.rng.randint(3, 9)):
            # What one kind of operation did is seen by the forward pass after it.
            is_drawn = step % 2 == 1 or not case.kind
            act = case.draw(KINDS) if is_drawn else operations.forward
            steps.append(act.__name__)
            with torch.no_grad():
                digest.append(act(session, case.rng))
    except Exception as error:
        raise AssertionError(f"{begun}, steps {', '.join(steps)}: {error}") from error
    return f"{steps} {digest}"


KINDS: dict[str, tuple[float, Operation]] = {
    "forward": (4, operations.forward),
    "generate": (3, operations.generate),
    "generate_alone": (1.5, operations.generate_alone),
    "speculate": (1, operations.speculate),
    "interrupt": (0.7, operations.interrupt),
    "refuse": (1.5, operations.refuse),
    "without_cache": (0.7, operations.without_cache),
    "compiled": (0.05, operations.compiled),
    "two_threads": (0.3, operations.two_threads),
    "crop": (2, caches.crop),
    "reset": (1, caches.reset),
    "reorder": (1, caches.reorder),
    "repeat": (1, caches.repeat),
    "branch": (1.5, caches.branch),
    "documents": (1.5, session_documents.documents),
    "reshard": (1.5, caches.reshard),
    "restore": (1.5, caches.restore),
    "restore_elsewhere": (1, caches.restore_elsewhere),
}
