# SPDX-License-Identifier: BSD-3-Clause
"""Exchanges whose times are known, and what they say about others like them."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from .state import Message
from .topology import Topology
from .traffic import Case


@dataclass(frozen=True)
class MeasuredExchange:
    """Of a float32 state, into float32."""

    strategy: str
    num_rows: int
    head_dim: int
    seconds: float

    @property
    def message(self) -> Message:
        return Message((self.num_rows,), self.head_dim, torch.float32)


@dataclass(frozen=True)
class MeasuredExchanges:
    """Those of one group of ranks: its nodes, in rank order, and its backend."""

    backend: str
    nodes: tuple[int, ...]
    exchanges: tuple[MeasuredExchange, ...]

    def cover(self, strategy: str, case: Case) -> bool:
        """Whether they say anything about the case: the strategy was measured on its links."""
        return (
            (case.backend, case.topology.nodes) == (self.backend, self.nodes)
            and not case.head_sharded
            and strategy in self._by_strategy
        )

    def correction(self, strategy: str, case: Case, model: Callable[[str, Case], float]) -> float:
        """Measured over modelled seconds, between sizes that were measured interpolated.

        On logarithms of both, and beyond the smallest and the largest size as there. So a measured
        size gets its measured time.
        """
        points = self._by_strategy[strategy]
        sizes = [exchange.message.num_bytes for exchange in points]
        size = min(max(case.message.num_bytes, sizes[0]), sizes[-1])
        above = min(bisect(sizes, size), len(sizes) - 1)
        below = max(above - 1, 0)
        first, last = (self._ratio(points[i], model) for i in (below, above))
        if below == above:
            return last
        share = math.log(size / sizes[below]) / math.log(sizes[above] / sizes[below])
        return first ** (1 - share) * last**share

    def _ratio(self, exchange: MeasuredExchange, model: Callable[[str, Case], float]) -> float:
        case = Case(Topology(self.nodes), exchange.message, torch.float32, backend=self.backend)
        modelled = model(exchange.strategy, case)
        return exchange.seconds / modelled if modelled else 1.0

    @cached_property
    def _by_strategy(self) -> dict[str, list[MeasuredExchange]]:
        """By size; of one size the last."""
        found: dict[str, dict[int, MeasuredExchange]] = {}
        for exchange in self.exchanges:
            found.setdefault(exchange.strategy, {})[exchange.message.num_bytes] = exchange
        return {name: [sizes[n] for n in sorted(sizes)] for name, sizes in found.items()}
