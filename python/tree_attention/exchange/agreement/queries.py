# SPDX-License-Identifier: BSD-3-Clause
"""Are the queries the same on all ranks? A digest of them is the seal of a call's messages.

Ranks that merge states of different queries have a result that is nobody's: after a rank left out a
call, or generated another token.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..._loader import load
from ..notes import Disagreement, Note
from ..transport.messages import SAME

# Values of the queries that ranks tell one another when digests differ: all of 32 heads of 128.
_NUM_SAMPLES = 4096
# Processors and libraries of several kinds round a model's queries differently, and by less than
# this, relative to the largest value. Queries of other tokens or steps are further apart.
_ROUNDING = {torch.float16: 0.02, torch.bfloat16: 0.05}
_ROUNDING_OF_32_BITS = 1e-3


class Queries:
    """The comparison of the queries of a communicator's calls."""

    def __init__(self) -> None:
        self._are_compared = True

    def seal(self, queries: Sequence[Tensor]) -> int:
        """The seal of a call with these queries, behind which their positions may stand."""
        if not queries or not self._are_compared or queries[0].device.type != "cpu":
            return SAME
        return max(load().digest(queries), SAME + 1)

    def note(self, queries: Sequence[Tensor]) -> Note:
        """Some values of the queries and the digest of their positions, for the other ranks."""
        if not queries:
            return {}
        values = queries[0].reshape(-1)
        step = max(1, -(-values.numel() // _NUM_SAMPLES))
        return {
            "queries": values[::step].double().tolist(),
            "rounding": _ROUNDING.get(values.dtype, _ROUNDING_OF_32_BITS),
            "positions": load().digest(queries[1:]),
        }

    def check(self, notes: Sequence[Note]) -> None:
        """Raises Disagreement if the queries of ranks differ by more than rounding."""
        samples = [torch.tensor(note["queries"], dtype=torch.float64) for note in notes]
        first = samples[0]
        most = notes[0]["rounding"] * float(first.nan_to_num(0.0, 0.0, 0.0).abs().max())
        for rank, (note, sample) in enumerate(zip(notes, samples, strict=True)):
            if note["positions"] != notes[0]["positions"]:
                raise Disagreement(f"query_positions of rank {rank} are not those of rank 0")
            if not torch.allclose(sample, first, rtol=0.0, atol=most, equal_nan=True):
                raise Disagreement(
                    f"the queries of rank {rank} are not those of rank 0: a rank left out a call, "
                    "or computed something else before it"
                )
        self._are_compared = False
        warnings.warn(
            "tree_attention: the queries of the ranks differ by rounding, as on processors of "
            "several kinds; they are no longer compared",
            RuntimeWarning,
            stacklevel=2,
        )
