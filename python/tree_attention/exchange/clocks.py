# SPDX-License-Identifier: BSD-3-Clause
"""One clock for all ranks, to begin at the same time and to tell who was last."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .link import Link
from .messages import Messages

_QUESTIONS = 9


@dataclass(frozen=True)
class Clock:
    """Reads alike on all ranks, up to half the difference of a link's two directions."""

    device: torch.device
    offset: float  # to add to this rank's own

    def now(self) -> float:
        """The time at which what was queued on the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() + self.offset

    @staticmethod
    def agree(link: Link, device: torch.device, deadline: float) -> Clock:
        """Collective: every rank asks rank 0 for the time, and goes by the quickest answer."""
        own = Clock(device, 0.0)
        time_of_0 = torch.zeros(1, dtype=torch.float64, device=device)
        question = torch.zeros(1, dtype=torch.uint8, device=device)
        answer = time_of_0.view(torch.uint8)

        def round_of(sender: int, receiver: int, tensor: Tensor, tag: int) -> Messages:
            to: Mapping[int, Tensor] = {receiver: tensor} if link.rank == sender else {}
            of: Mapping[int, Tensor] = {sender: tensor} if link.rank == receiver else {}
            return Messages(link, of, to, tag, device)

        offset = 0.0
        for rank in range(1, link.world_size):
            ask, reply = round_of(rank, 0, question, 0), round_of(0, rank, answer, 1)
            quickest = float("inf")
            for _ in range(_QUESTIONS):
                reply.post()
                begin = own.now()
                ask.run(deadline)
                if link.rank == 0:
                    time_of_0.fill_(own.now())
                reply.run(deadline)
                end = own.now()
                if link.rank == rank and end - begin < quickest:
                    quickest = end - begin
                    offset = float(time_of_0) - (begin + end) / 2
        return Clock(device, offset)
