# SPDX-License-Identifier: BSD-3-Clause
"""Strategies made ready: set up for a group by kind of device, and prepared for a state."""

from collections.abc import Mapping

import torch

from ..notes import Disagreement, Gather
from ..options import ExchangeOptions
from ..strategies import STRATEGIES, Context, Exchange
from ..transport.buffers import State, StateLayout
from ..transport.process_group import Link
from ..transport.symmetric_memory import SymmetricMemory
from ..transport.topology import Topology
from .choose import Choice, CostTable, choose


class Resources:
    """The resources of one communicator, which all ranks set up together once."""

    def __init__(self) -> None:
        self._unavailable: dict[str, dict[str, str]] = {}  # by kind of device, then by strategy
        self._resources: dict[
            tuple[str, str], SymmetricMemory
        ] = {}  # by strategy and kind of device
        self.costs: CostTable | None = None  # measured ones, by which "auto" goes

    def are_known(self, device: torch.device) -> bool:
        return device.type in self._unavailable

    def set_up(
        self, link: Link, device: torch.device, topology: Topology, gather: Gather, deadline: float
    ) -> None:
        """Collective: sets up the strategies that need it for tensors of `device`."""
        self._link, self._topology = link, topology
        unavailable = {}
        for name, strategy in STRATEGIES.items():
            if strategy.set_up is None:
                continue
            found = strategy.set_up(link, device, topology, gather, deadline)
            if isinstance(found, str):
                unavailable[name] = found
            else:
                self._resources[name, device.type] = found
        self._unavailable[device.type] = unavailable

    def unavailable(
        self, device: torch.device, layout: StateLayout | None = None
    ) -> Mapping[str, str]:
        """Strategies that cannot be used with tensors of `device`, and why.

        Known after `set_up`. With `layout`, also those that cannot exchange such a state.
        """
        found = dict(self._unavailable.get(device.type, {}))
        if layout is not None:
            refusals = {name: strategy.refusal(layout) for name, strategy in STRATEGIES.items()}
            found = {name: reason for name, reason in refusals.items() if reason} | found
        return found

    def prepare(self, state: State, options: ExchangeOptions) -> Exchange:
        """The exchange of `state` by the strategy that `options` name, or that "auto" takes.

        After `set_up`.
        """
        layout, device = state.layout, state.device
        if layout.num_bytes == 0:
            return lambda deadline, o, lse: None
        name = self._choice(layout, device, options).strategy
        unavailable = self.unavailable(device, layout)
        if name in unavailable:
            raise Disagreement(f"{name} is not available: {unavailable[name]}")
        resource = self._resources.get((name, device.type))
        context = Context(
            self._link, self._topology, state, options.out_dtype, options.head_sharded, resource
        )
        # Views that are made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            return STRATEGIES[name].prepare(context)

    def explanation(
        self, layout: StateLayout, device: torch.device, options: ExchangeOptions
    ) -> str:
        """Which strategy that one is, why, and what it costs."""
        link, topology = self._link, self._topology
        choice = self._choice(layout, device, options)
        strategy = STRATEGIES[choice.strategy]
        traffic = strategy.traffic(layout, topology, options.out_dtype, options.head_sharded)
        text = (
            f"exchange of {layout.num_rows} rows of {layout.head_dim} ({layout.num_bytes:,} "
            f"bytes) over {topology.world_size} ranks, {topology}: {choice.strategy} "
            f"({choice.reason}); {traffic.steps} steps, at most {traffic.bytes_sent:,} bytes sent "
            "per rank"
        )
        is_on_host = link.transport_device(device).type == "cpu"
        if is_on_host and strategy.is_canonical:  # others' all-reduces are the group's
            for transport, where, what in (
                (link.shared_memory, "within a node", "shared memory"),
                (link.sockets, "between nodes", "connections of its own"),
            ):
                if isinstance(transport, str):
                    text += f"; no {what}: {transport}"
                elif transport is not None:
                    text += f"; {where} through {what}"
        return text

    def _choice(
        self, layout: StateLayout, device: torch.device, options: ExchangeOptions
    ) -> Choice:
        if options.strategy != "auto":
            return Choice(options.strategy, "asked for")
        return choose(
            layout,
            self._topology,
            self._link.backend(device),
            head_sharded=bool(options.head_sharded),
            costs=self.costs,
            unavailable=self.unavailable(device, layout),
        )

    def check(self) -> None:
        """Raises RuntimeError if an exchange is known to have failed. Waits for nothing."""
        for resource in self._resources.values():
            resource.check()

    def abort(self) -> None:
        """Ends waits on devices. From any thread."""
        for resource in list(self._resources.values()):
            resource.abort()
