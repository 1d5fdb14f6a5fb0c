# SPDX-License-Identifier: BSD-3-Clause
"""Are the queries the same on all ranks? The call id in a call's messages is a digest of them.

Ranks that merge states of different queries have a result that belongs to no query. This happens if
a rank left out a call, or generated another token. If digests differ, every rank compares all
values of its queries with the queries of rank 0.
"""

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..._loader import load
from ..notes import Note, Signature, ranks_text
from ..transport.messages import SAME_CALL
from ..transport.process_group import Link
from .session import Session

# Processors and libraries of several kinds round a model's queries differently, and by less than
# this, relative to the largest value of a query's row. Queries of other tokens or steps are further
# apart.
_ROUNDING = {torch.float16: 0.02, torch.bfloat16: 0.05}
_ROUNDING_OF_32_BITS = 1e-3
# Bounds the memory of a comparison: so much of the queries is sent, and compared, at a time.
_PIECE_BYTES = 1 << 20


class Queries:
    """The comparison of the queries of a communicator's calls."""

    def __init__(self) -> None:
        self.are_compared = True

    def call_id(self, queries: Sequence[Tensor]) -> int:
        """The id of a call with these queries, which their positions may follow."""
        if not queries or not self.are_compared or queries[0].device.type != "cpu":
            return SAME_CALL
        return max(load().digest(queries), SAME_CALL + 1)

    def settle(
        self, session: Session, signature: Signature, queries: Sequence[Tensor], deadline: float
    ) -> None:
        """Why a call with this signature met one of another id: raises Disagreement on every
        rank unless all call the same, with queries that differ by rounding alone, which are then
        compared no more. Collective.
        """
        is_digest = self.call_id(queries) != SAME_CALL
        positions = load().digest(queries[1:]) if is_digest else 0
        session.compare(signature, deadline, {"positions": positions}, _other_positions)
        if not is_digest:
            return
        with session.link.uncounted():
            difference = _difference(session.link, queries[0], deadline)
        step = (("step", "queries of all ranks"),)
        session.compare(step, deadline, {"difference": difference}, _other_queries)
        self.are_compared = False


def warn_of_rounding() -> None:
    warnings.warn(
        "tree_attention: the queries of the ranks differ by rounding, as on processors of "
        "several kinds; they are no longer compared",
        RuntimeWarning,
        stacklevel=3,
    )


def _difference(link: Link, q: Tensor, deadline: float) -> str:
    """Where the queries of this rank differ most from those of rank 0, if by more than rounding."""
    _, num_heads, seqlen_q, head_dim = q.shape
    num_rows = q.numel() // head_dim
    bound, worst, text = _ROUNDING.get(q.dtype, _ROUNDING_OF_32_BITS), 0.0, ""
    size = max(1, _PIECE_BYTES // (head_dim * q.itemsize))
    for begin in range(0, num_rows, size):
        rows = torch.arange(begin, min(begin + size, num_rows), device="cpu")
        places = rows // seqlen_q // num_heads, rows // seqlen_q % num_heads, rows % seqlen_q
        own = q[places]  # a copy of this piece alone
        first = own.clone()
        link.broadcast(first, deadline)
        apart, largest = _distances(own.double(), first.double())
        excess = torch.where(apart > bound * largest, apart / largest, 0.0)
        row = int(excess.argmax())
        if excess[row] > worst:
            worst = float(excess[row])
            sequence, head, token = (int(place[row]) for place in places)
            text = (
                f"those of token {token}, head {head}, sequence {sequence} differ by "
                f"{float(apart[row]):.3g}, and their largest value is {float(largest[row]):.3g}"
            )
    return text


def _distances(own: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """The largest distance in each row, and the largest finite value of `first` there."""
    is_same = (own == first) | (own.isnan() & first.isnan())
    # A value that is finite, or a number, on one of the ranks alone is as far away as can be.
    apart = (own - first).abs().nan_to_num(math.inf, math.inf).masked_fill(is_same, 0.0)
    return apart.amax(-1), first.abs().nan_to_num(0.0, 0.0).amax(-1)


def _other_positions(notes: Sequence[Note]) -> str:
    positions = [note.get("positions") for note in notes]
    differing = [rank for rank, own in enumerate(positions) if own != positions[0]]
    if not differing:
        return ""
    return f"query_positions of {ranks_text(differing)} are not those of rank 0"


def _other_queries(notes: Sequence[Note]) -> str:
    differing = [rank for rank, note in enumerate(notes) if note.get("difference")]
    if not differing:
        return ""
    return (
        f"the queries of {ranks_text(differing)} are not those of rank 0: on rank {differing[0]} "
        f"{notes[differing[0]]['difference']}; a rank left out a call, or computed something else "
        "before it"
    )
