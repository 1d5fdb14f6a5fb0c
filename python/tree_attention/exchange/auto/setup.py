# SPDX-License-Identifier: BSD-3-Clause
"""Resources that strategies set up for a group by kind of device, and those that could not."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..notes import Gather
from ..strategies import STRATEGIES, Resource
from ..transport.buffers import StateLayout
from ..transport.process_group import Link
from ..transport.topology import Topology


class Resources:
    """The resources of one communicator, which all ranks set up together once."""

    def __init__(self) -> None:
        self._unavailable: dict[str, dict[str, str]] = {}  # by kind of device, then by strategy
        self._resources: dict[tuple[str, str], Resource] = {}  # by strategy and kind of device

    def are_known(self, device: torch.device) -> bool:
        return device.type in self._unavailable

    def set_up(
        self, link: Link, device: torch.device, topology: Topology, gather: Gather, deadline: float
    ) -> None:
        """Collective: sets up the strategies that need it for tensors of `device`."""
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

    def of(self, strategy: str, device: torch.device) -> Resource | None:
        return self._resources.get((strategy, device.type))

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

    def check(self) -> None:
        """Raises RuntimeError if an exchange is known to have failed. Waits for nothing."""
        for resource in self._resources.values():
            resource.check()

    def abort(self) -> None:
        """Ends waits on devices. From any thread."""
        for resource in list(self._resources.values()):
            resource.abort()
