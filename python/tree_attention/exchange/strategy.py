# SPDX-License-Identifier: BSD-3-Clause
"""What every way of exchanging is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .link import Link
from .one_shot_memory import Memory
from .state import State
from .topology import Topology

# Exchanges the state that the send buffer holds, before a `time.monotonic` deadline, and writes the
# merged o and lse into contiguous tensors.
Exchange = Callable[[float, Tensor, Tensor], None]


@dataclass(frozen=True)
class Options:
    """What a caller asks of an exchange."""

    strategy: str  # or "auto"
    out_dtype: torch.dtype
    payload_dtype: torch.dtype = torch.float32
    head_sharded: bool = False


@dataclass(frozen=True)
class Setting:
    """What an exchange is prepared for, once."""

    link: Link
    topology: Topology
    state: State
    out_dtype: torch.dtype
    # Each rank keeps the result of its heads only.
    head_sharded: bool = False
    # That the ranks' GPUs share, where "one_shot" is available.
    memory: Memory | None = None


@dataclass(frozen=True)
class Strategy:
    """How ranks exchange and merge their states.

    `prepare(setting)` makes buffers and views; the exchange that it returns finds this rank's state
    in `state.send`, may use all of `state` as scratch and writes the merged `o` in `out_dtype` and
    the float32 `lse`, with the same bits on every rank. It allocates nothing. Whatever it sends
    goes through `link`, every rank calls the same operations with the same sizes, and nothing in
    it depends on the values of a device's tensors.
    """

    prepare: Callable[[Setting], Exchange]
    # The bits are those of `merge_states` over the ranks' states, whatever the world looks like.
    is_canonical: bool = True
    # States may travel with a 16-bit o. Sums of those would round at every step.
    takes_16_bit: bool = True
    can_shard_heads: bool = False
    # Any process group will do.
    runs_everywhere: bool = True
    # Why this rank cannot take part with tensors of a device, or nothing. Ranks tell each other; a
    # strategy is available where all can.
    obstacle: Callable[[Link, torch.device], str] = lambda link, device: ""
