# SPDX-License-Identifier: BSD-3-Clause
"""Strategies to merge the states of all ranks: one module each, registered by its file alone.

A file `NAME.py` in this folder with a constant `STRATEGY` is the strategy "NAME", for callers, for
`auto` after a calibration, for the tests and for the simulator.
"""

import importlib
import pkgutil
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from ..notes import Gather
from ..transport.buffers import State, StateLayout
from ..transport.process_group import Link
from ..transport.symmetric_memory import SymmetricMemory
from ..transport.topology import Topology

# Whether each rank keeps the result of its heads only. A tuple gives the number of heads of each
# rank; True means that `torch.tensor_split` divides them.
HeadSharding = bool | tuple[int, ...]
# Exchanges the state in the send buffer, before a `time.monotonic` deadline, and writes the merged
# o and lse into contiguous tensors.
Exchange = Callable[[float, Tensor, Tensor], None]


@dataclass(frozen=True)
class Context:
    """Everything that preparing an exchange depends on."""

    link: Link
    topology: Topology
    state: State
    out_dtype: torch.dtype
    head_sharded: HeadSharding = False
    resource: SymmetricMemory | None = None  # what the strategy's `set_up` gave


@dataclass(frozen=True)
class Traffic:
    """Cost of an exchange on a network, from sizes alone."""

    steps: int  # trips over a link, each of which waits for the one before it
    bytes_sent: int  # by the busiest rank


# Collective, at the first call with tensors of a kind of device: sets up what the strategy needs
# there before the deadline, or says why it cannot, the same on all ranks.
SetUp = Callable[[Link, torch.device, Topology, Gather, float], SymmetricMemory | str]


@dataclass(frozen=True)
class Strategy:
    """An algorithm by which ranks exchange and merge their states.

    `prepare(context)` makes buffers and views. The exchange that it returns finds this rank's state
    in `state.send`, writes nothing there but the call id, may use all other buffers of `state` as
    scratch and writes the merged `o` in `out_dtype` and the float32 `lse`, with the same bits on
    every rank. It allocates nothing. Whatever it sends
    goes through `link`, every rank calls the same operations with the same sizes, and nothing in
    it depends on the values of a device's tensors.

    `traffic(layout, topology, out_dtype, head_sharded)` says what that costs.
    """

    prepare: Callable[[Context], Exchange]
    traffic: Callable[[StateLayout, Topology, torch.dtype, HeadSharding], Traffic]
    # The bits are those of `merge_states` over the ranks' states, whatever the world looks like.
    is_canonical: bool = True
    # States may travel with a 16-bit o. Sums of such states would round at every step.
    takes_16_bit: bool = True
    can_shard_heads: bool = False
    set_up: SetUp | None = None  # None: any process group will do
    # Why a state of this layout cannot be exchanged so, or nothing.
    refusal: Callable[[StateLayout], str] = lambda layout: ""


# The files of this folder, for type checkers.
StrategyName = Literal[
    "all_gather", "butterfly", "hierarchical", "one_shot", "three_allreduce", "two_phase"
]
STRATEGIES: dict[str, Strategy] = {}


def discover() -> None:
    """Registers the modules of this package that are not yet known."""
    for module in pkgutil.iter_modules(__path__):
        if module.name not in STRATEGIES:
            found = importlib.import_module(f"{__name__}.{module.name}")
            STRATEGIES[module.name] = found.STRATEGY


def strategies() -> tuple[StrategyName, ...]:
    """The names that `strategy` takes in addition to "auto", in any process group.

    Where the GPUs of all ranks reach one another's memory it also takes "one_shot".

    For example::

        from tree_attention import strategies

        print("two_phase" in strategies())  # True
    """
    found = (name for name, strategy in STRATEGIES.items() if strategy.set_up is None)
    return cast(tuple[StrategyName, ...], tuple(found))


def candidates(
    payload_dtype: torch.dtype, head_sharded: bool, unavailable: Container[str] = ()
) -> tuple[str, ...]:
    """The strategies that can do what the options ask for and are not `unavailable`."""
    return tuple(
        name
        for name, strategy in STRATEGIES.items()
        if name not in unavailable
        and (strategy.takes_16_bit or payload_dtype == torch.float32)
        and (strategy.can_shard_heads or not head_sharded)
    )


discover()
