# SPDX-License-Identifier: BSD-3-Clause
"""Counts of a collective over simulated ranks: steps, messages, bytes, and merges between."""

from collections import Counter
from typing import Any

from torch import Tensor


class Counts:
    """Steps, messages and bytes, which the collectives that it is handed to add up.

    A step is a round of messages of which none needs another one of the same round.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.merges = 0  # along the longest path: each waits for the one before it
        self.messages = 0
        self.bytes_sent: Counter[int] = Counter()  # by rank

    @property
    def num_bytes(self) -> int:
        """Of all ranks together."""
        return self.bytes_sent.total()

    @property
    def busiest(self) -> int:
        """The bytes that the busiest rank sends."""
        return max(self.bytes_sent.values(), default=0)

    def message(self, source: int, content: Any) -> None:
        """Counts a message: a tensor, or a tuple of tensors and of what is sent for nothing."""
        self.messages += 1
        self.bytes_sent[source] += _num_bytes(content)


def _num_bytes(content: Any) -> int:
    if isinstance(content, Tensor):
        return content.nbytes
    return sum(map(_num_bytes, content)) if isinstance(content, tuple) else 0
