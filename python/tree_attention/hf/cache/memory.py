# SPDX-License-Identifier: BSD-3-Clause
"""The error of a cache that finds no memory."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..._memory import free_bytes, in_words

# The least that is compared with the memory that is free, which takes tens of microseconds: what is
# smaller is left to the allocator.
_LEAST_COMPARED = 64 << 20
_SCALE_BYTES = 4  # of keys of 8 bits, for each token and head


class Need(NamedTuple):
    """Buffers that a layer is about to allocate."""

    buffers: Mapping[str, Tensor]  # of the layer now; the new ones differ in the number of slots
    batch: int
    capacity: int  # in slots of a sequence
    num_layers: int  # that will allocate as much
    max_length: int | None  # of a cache of fixed size, on all ranks together
    world_size: int

    @property
    def token_bytes(self) -> int:
        """The bytes that one token of a sequence takes in all these layers."""
        return self.num_layers * sum(map(row_bytes, self.buffers.values()))

    @property
    def num_bytes(self) -> int:
        return self.batch * self.capacity * self.token_bytes

    @property
    def device(self) -> torch.device:
        return self.buffers["keys"].device

    def check(self) -> None:
        """Raises torch.OutOfMemoryError where the device certainly has no room."""
        free = too_few(self.device, self.num_bytes)
        if free is not None:
            raise self.error(free)

    def error(self, free: int | None = None) -> torch.OutOfMemoryError:
        free = free_bytes(self.device) if free is None else free
        there = "" if free is None else f", and {in_words(free)} are free"
        layers = f"{self.num_layers} layer{'s' * (self.num_layers > 1)}"
        each = f"{self.token_bytes:,} bytes each in {layers}"
        if self.batch > 1:
            each += f", {self.batch} sequences"
        ways = ["fewer tokens" if self.max_length is None else "a smaller max_length"]
        keys = self.buffers["keys"]
        if keys.dtype.is_floating_point and keys.itemsize > 1:
            heads = keys.shape[1]
            in_8_bits = self.token_bytes // keys.itemsize
            in_8_bits += self.num_layers * heads * _SCALE_BYTES * len(self.buffers)
            ways.append(f"kv_dtype='int8' ({in_8_bits:,} bytes each)")
        elif self.batch > 1:
            ways.append("fewer sequences")
        ways.append(f"more ranks than {self.world_size}, each of which holds its share")
        whole = "" if self.max_length is None else f" of max_length {self.max_length:,}"
        return torch.OutOfMemoryError(
            f"TreeCache: {self.capacity:,} tokens{whole} on this rank need "
            f"{in_words(self.num_bytes)} of {self.device} ({each}){there}; take "
            f"{', '.join(ways[:-1])}, or {ways[-1]}"
        )


def row_bytes(x: Tensor) -> int:
    """The bytes that one token of a sequence takes in a layer's buffer."""
    return x.itemsize * x.shape[1] * math.prod(x.shape[3:])


def too_few(device: torch.device, num_bytes: int) -> int | None:
    """The bytes that are free on a device, where they certainly are fewer than these."""
    free = free_bytes(device) if num_bytes >= _LEAST_COMPARED else None
    return free if free is not None and free < num_bytes else None
