# SPDX-License-Identifier: BSD-3-Clause
"""Which strategy an exchange takes, and its preparation: by what all ranks know of one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from . import one_shot
from .agreement import Disagreement
from .costs import CostModel, choose, costs_for
from .costs import explain as explain_costs
from .link import Link
from .one_shot_memory import Memory
from .state import Message, State
from .strategies import STRATEGIES, unavailable
from .strategy import Exchange, Options, Setting
from .symmetric import Gather, connect
from .topology import Topology
from .traffic import Case


class Selection:
    """What the ranks of a group can run, and what it costs."""

    def __init__(self, link: Link, costs: CostModel | None) -> None:
        """`costs`: instead of shipped ones."""
        self._link, self._given = link, costs
        self._obstacles: dict[str, dict[str, str]] = {}  # by kind of device
        self._memories: dict[str, Memory] = {}  # by kind of device
        # At the last exchange: strategies that a rank could not take part in, and why.
        self.unavailable: Mapping[str, str] = {}

    @property
    def constants(self) -> str:
        """Equal on ranks that predict alike."""
        return "shipped" if self._given is None else self._given.digest

    def backend(self, device: torch.device) -> str:
        """What moves the tensors of `device`, perhaps through the memory of another."""
        return self._link.backend(self._link.transport_device(device))

    def costs(self, device: torch.device) -> CostModel:
        """What "auto" goes by for tensors of `device`."""
        return costs_for(self.backend(device), self._given)

    def obstacles(self, device: torch.device) -> dict[str, str]:
        """The strategies in which this rank cannot take part, and why."""
        if device.type not in self._obstacles:
            reasons = {name: way.obstacle(self._link, device) for name, way in STRATEGIES.items()}
            self._obstacles[device.type] = {name: why for name, why in reasons.items() if why}
        return self._obstacles[device.type]

    def learn(self, obstacles: Sequence[Mapping[str, str]]) -> None:
        """What each rank says about itself, in rank order."""
        self.unavailable = unavailable(obstacles)

    def share_memory(
        self, device: torch.device, topology: Topology, gather: Gather, deadline: float
    ) -> None:
        """Collective: sets up what "one_shot" needs, or finds out that it cannot be."""
        obstacles = self.obstacles(device)
        own = obstacles.get("one_shot", "")
        found = connect(self._link.group, device, topology, own, gather, deadline)
        if isinstance(found, str):
            obstacles["one_shot"] = found
            self.unavailable = {**self.unavailable, "one_shot": found}
        else:
            self._memories[device.type] = found

    def check(self) -> None:
        """Raises RuntimeError if an exchange is known to have failed. Waits for nothing."""
        for memory in self._memories.values():
            memory.check()

    def abort(self) -> None:
        """Ends waits on devices. From any thread."""
        for memory in list(self._memories.values()):
            memory.abort()

    def seconds(
        self, message: Message, device: torch.device, topology: Topology, options: Options
    ) -> float:
        """Predicted, of an exchange."""
        case, costs = self._case(message, device, topology, options), self.costs(device)
        return costs.predict(self._strategy(case, costs, options), case)

    def prepare(
        self, state: State, topology: Topology, options: Options, explain: bool
    ) -> Exchange:
        """
        Raises:
            Disagreement: the strategy that was asked for is not available, as all ranks know.
        """
        if state.message.num_bytes == 0:
            return lambda deadline, o, lse: None
        costs = self.costs(state.device)
        case = self._case(state.message, state.device, topology, options)
        strategy = self._strategy(case, costs, options)
        refused = self._unavailable_for(case)
        if strategy in refused:
            raise Disagreement(f"{strategy} is not available: {refused[strategy]}")
        if explain and self._link.rank == 0:
            print(explain_costs(case, costs, strategy, refused), flush=True)
        setting = Setting(
            self._link, topology, state, options.out_dtype, options.head_sharded,
            self._memories.get(state.device.type),
        )  # fmt: skip
        # Views that are made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            return STRATEGIES[strategy].prepare(setting)

    def _case(
        self, message: Message, device: torch.device, topology: Topology, options: Options
    ) -> Case:
        backend = self.backend(device)
        return Case(topology, message, options.out_dtype, options.head_sharded, backend)

    def _strategy(self, case: Case, costs: CostModel, options: Options) -> str:
        if options.strategy == "auto":
            return choose(case, costs, self._unavailable_for(case))
        return options.strategy

    def _unavailable_for(self, case: Case) -> Mapping[str, str]:
        refusal = one_shot.refusal(case.message)
        return {"one_shot": refusal, **self.unavailable} if refusal else self.unavailable
