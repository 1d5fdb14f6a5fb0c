# SPDX-License-Identifier: BSD-3-Clause
"""Keys and values of the tokens with which all rows of a cache begin, if they share them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Prefix:
    """The keys and values of one layer for the tokens with which rows begin."""

    def __init__(self, length: int, buffers: Mapping[str, Tensor]) -> None:
        self.length = length  # on all ranks together
        self.buffers = buffers  # this rank's, of one row

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.buffers.values())

    def move(self, device: torch.device) -> None:
        self.buffers = {name: x.to(device) for name, x in self.buffers.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Prefix":
        return self  # nobody writes to it
