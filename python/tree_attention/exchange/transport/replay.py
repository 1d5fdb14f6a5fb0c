# SPDX-License-Identifier: BSD-3-Clause
"""The messages of the last call once more, for ranks that repeat it where this one does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Sends and receives in given tensors over a link, before a `time.monotonic` deadline.
Step = Callable[[Any, list[Tensor], float], object]
_Kind = tuple[torch.Size, torch.dtype, torch.device]  # of a tensor


class Replay:
    """The steps of a link in the call that ranks may be repeating, with the sizes of messages.

    The signature of a call determines them up to the first comparison of call ids, so they are
    recorded once, after ranks have agreed on it, and no tensor is kept.
    """

    def __init__(self) -> None:
        # With the tensors of each, by numbers that are equal where one is sent to several ranks.
        self._steps: list[tuple[Step, list[int], dict[int, _Kind]]] = []
        self.is_recording = False

    def record(self, is_needed: bool = True) -> None:
        """Forgets what was recorded, and begins a new record if one is needed."""
        self._steps, self.is_recording = [], is_needed

    def note(self, step: Step, tensors: Sequence[Tensor]) -> None:
        """Records a step, which must keep no tensor, while a call is recorded."""
        if self.is_recording:
            kinds = {id(x): (x.shape, x.dtype, x.device) for x in tensors}
            self._steps.append((step, [id(x) for x in tensors], kinds))

    def run(self, link: Any, deadline: float) -> None:
        """Repeats all steps with zeros, which the ranks in that call drop by the link's call id."""
        self.is_recording = False
        for step, numbers, kinds in self._steps:
            zeros = {
                number: torch.zeros(shape, dtype=dtype, device=device)
                for number, (shape, dtype, device) in kinds.items()
            }
            step(link, [zeros[number] for number in numbers], deadline)
