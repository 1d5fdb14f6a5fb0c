# SPDX-License-Identifier: BSD-3-Clause
"""A device that is not there, whose allocator and synchronisations are counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

import torch

from fake_device import fake_cuda

PEAK = 12_345


def no_gradient(mode: bool = True) -> AbstractContextManager[None]:
    return torch.no_grad() if mode else nullcontext()


@contextmanager
def device_that_counts() -> Iterator[dict[str, int]]:
    """Its allocator has given out so many bytes at most since the peak was forgotten."""
    calls = {"synchronize": 0, "reset": 0}

    def count(name: str) -> None:
        calls[name] += 1

    with (
        fake_cuda(),
        # Views of its tensors cannot be made in inference mode.
        mock.patch.object(torch, "inference_mode", no_gradient),
        mock.patch.multiple(
            torch.cuda,
            synchronize=lambda *_: count("synchronize"),
            reset_peak_memory_stats=lambda *_: count("reset"),
            memory_allocated=lambda *_: 1000,
            max_memory_allocated=lambda *_: 1000 + PEAK,
        ),
    ):
        yield calls
