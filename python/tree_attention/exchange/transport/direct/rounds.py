# SPDX-License-Identifier: BSD-3-Clause
"""Rounds of messages that the calling thread itself moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..messages import Transport

# (number of the peer, address, size in bytes)
_Places = list[tuple[int, int, int]]


class DirectRound(Transport):
    """Messages as long at their sender as at their receiver.

    Args:
        make: `make(receive, send)` prepares the round in C++, from places of messages.
        receive, send: contiguous byte tensors by rank.
        numbers: what C++ calls the ranks, by rank.
    """

    def __init__(
        self,
        make: Callable[[_Places, _Places], Any],
        receive: Mapping[int, Tensor],
        send: Mapping[int, Tensor],
        numbers: Mapping[int, int] | Sequence[int],
    ) -> None:
        places = (
            [(numbers[rank], tensor.data_ptr(), tensor.nbytes) for rank, tensor in tensors.items()]
            for tensors in (receive, send)
        )
        self.round = make(*places)
        self._kept = receive, send  # as `round` has addresses only

    def run(self, deadline: float) -> None:
        """Raises RuntimeError after the deadline, or when a rank has ended or closed its way."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        self.round.run(deadline - time.monotonic(), is_main_thread)
