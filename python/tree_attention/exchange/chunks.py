# SPDX-License-Identifier: BSD-3-Clause
"""Into which parts a call may be cut, so that one is exchanged while the next computes, and when.

The parts that ranks exchange follow from the shape of the state, which they share. Whether a rank
also computes part by part follows from its own shard: a short one is computed at once, as launches
would take longer than what they hide. Neither depends on whether exchanges overlap, and so the bits
do not either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .state import Message

_MAX_CHUNKS = 4
# Below this the fixed part of an exchange outweighs what a part of it hides.
_MIN_MESSAGE_BYTES = 128 << 10
# By how much overlapping must win by prediction: predictions err, and threads cost something too.
_MARGIN = 0.95


@dataclass(frozen=True)
class Chunks:
    """Runs of sequences (axis 0 of a state) or, of a single one, of heads (axis 1)."""

    axis: int
    bounds: tuple[int, ...]  # in sequences, or in heads of keys and values

    @staticmethod
    def of(message: Message, num_heads_kv: int) -> Chunks:
        """As many as keep messages long enough, of the rows `[batch, num_heads_q, seqlen_q]`."""
        batch, num_heads_q, _ = message.shape
        divisible = num_heads_kv > 0 and num_heads_q % num_heads_kv == 0
        axis, units = (0, batch) if batch != 1 or not divisible else (1, num_heads_kv)
        count = max(1, min(_MAX_CHUNKS, units, message.num_bytes // _MIN_MESSAGE_BYTES))
        return Chunks(axis, tuple(units * i // count for i in range(count + 1)))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def longest(self, message: Message) -> Message:
        """What is exchanged of the largest chunk."""
        sizes = [end - begin for begin, end in zip(self.bounds, self.bounds[1:], strict=False)]
        shape = list(message.shape)
        shape[self.axis] = shape[self.axis] // self.bounds[-1] * max(sizes)
        return replace(message, shape=tuple(shape))

    def part(self, x: Tensor, index: int, axis: int | None = None) -> Tensor:
        """What chunk `index` has of `x`, of which `axis` runs over sequences or any heads."""
        axis = self.axis if axis is None else axis
        each = x.shape[axis] // self.bounds[-1]
        begin, end = self.bounds[index], self.bounds[index + 1]
        return x.narrow(axis, begin * each, (end - begin) * each)


@dataclass(frozen=True)
class Attention:
    """The local part of a call: how long it may take, and how to run it."""

    # Computes everything, or one chunk, into (o, lse).
    run: Callable[[int | None, tuple[Tensor, Tensor]], None]
    chunks: Chunks
    is_chunked: bool  # computed chunk by chunk
    seconds: float


@dataclass(frozen=True)
class Speed:
    """Of attention on a kind of device, roughly."""

    bytes_per_second: float
    flops_per_second: float
    # Of a chunk, of which one launch more, on a CPU 40 to 200 us and on a GPU a few, is about a
    # fiftieth.
    min_seconds: float


_SPEEDS = {
    "cpu": Speed(20e9, 100e9, 10e-3),
    "cuda": Speed(2.5e12, 200e12, 200e-6),
}


def attention_seconds(q: Tensor, k: Tensor, v: Tensor, num_keys: int) -> float:
    """From shapes alone, which a captured graph keeps: `num_keys` of each sequence are read."""
    speed = speed_of(q.device)
    batch, num_heads_q, seqlen_q, _ = q.shape
    keys = batch * num_keys
    head_dims = k.shape[3] + v.shape[3]
    num_bytes = keys * k.shape[1] * head_dims * k.element_size()
    flops = 2 * keys * num_heads_q * seqlen_q * head_dims
    return max(num_bytes / speed.bytes_per_second, flops / speed.flops_per_second)


def speed_of(device: torch.device) -> Speed:
    return _SPEEDS.get(device.type, _SPEEDS["cpu"])


@dataclass(frozen=True)
class Forecast:
    """What exchanging once, and part by part, is predicted to take; the same on all ranks."""

    num_chunks: int
    attention: float  # of the rank that takes longest, in seconds
    whole: float  # one exchange of everything
    chunk: float  # the exchange of a chunk

    @property
    def after(self) -> float:
        """All attention, then one exchange."""
        return self.attention + self.whole

    @property
    def during(self) -> float:
        """Each exchange while the next chunk computes."""
        compute = self.attention / self.num_chunks
        return compute + (self.num_chunks - 1) * max(compute, self.chunk) + self.chunk

    def pays(self, device: torch.device) -> bool:
        """Whether the rank that takes longest computes chunk by chunk, and that clearly wins."""
        is_chunked = self.attention >= self.num_chunks * speed_of(device).min_seconds
        return is_chunked and self.during < _MARGIN * self.after

    def __str__(self) -> str:
        return (
            f"attention {1e6 * self.attention:,.1f} us on the slowest rank; with one exchange "
            f"{1e6 * self.after:,.1f} us, with {self.num_chunks} that overlap it "
            f"{1e6 * self.during:,.1f} us"
        )
