# SPDX-License-Identifier: BSD-3-Clause
"""The messages of the last call once more, for ranks that repeat it where this one does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Sends and receives in given tensors over a link, before a `time.monotonic` deadline.
_Step = Callable[[Any, list[Tensor], float], object]


class Replay:
    """The steps of a link in the call that ranks may be repeating, with the sizes of messages.

    The signature of a call determines them up to the first comparison of call ids, so they are
    recorded once, after ranks have agreed on it, and no tensor is kept.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[_Step, list[Callable[[], Tensor]]]] = []
        self.is_recording = False

    def record(self, is_needed: bool = True) -> None:
        """Forgets what was recorded, and begins anew if that is needed."""
        self._steps, self.is_recording = [], is_needed

    def note(self, step: _Step, tensors: Sequence[Tensor]) -> None:
        """Records a step, which must keep no tensor, while a call is recorded."""
        if self.is_recording:
            blanks: list[Callable[[], Tensor]] = [
                partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device) for x in tensors
            ]
            self._steps.append((step, blanks))

    def run(self, link: Any, deadline: float) -> None:
        """Repeats all steps with zeros, which the ranks in that call drop by the link's call id."""
        self.is_recording = False
        for step, blanks in self._steps:
            step(link, [blank() for blank in blanks], deadline)
