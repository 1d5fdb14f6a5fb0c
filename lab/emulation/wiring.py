# SPDX-License-Identifier: BSD-3-Clause
"""Delays and bandwidths of links, and which of them connects two hosts."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
MAX_HOSTS_PER_NODE = 254
MAX_NODES = 255


@dataclass(frozen=True)
class LinkSpec:
    """Delay and rate that a packet meets on its way out of a host."""

    delay: float  # seconds, one way
    rate: float  # bits per second

    def __str__(self) -> str:
        return f"{1e3 * self.delay:g} ms, {self.rate / 1e9:g} Gb/s"


def parse_link(text: str) -> LinkSpec:
    """From "1ms,1gbit".

    Raises:
        ValueError: it is not of that form.
    """
    match = re.fullmatch(rf"{_NUMBER}({'|'.join(_SECONDS)}),{_NUMBER}({'|'.join(_BITS)})", text)
    if match is None:
        raise ValueError(
            f"a link is written DELAY(us|ms|s),RATE(kbit|mbit|gbit), as 1ms,1gbit; got {text!r}"
        )
    delay, delay_unit, rate, rate_unit = match.groups()
    link = LinkSpec(float(delay) * _SECONDS[delay_unit], float(rate) * _BITS[rate_unit])
    if link.rate < 1e5:
        raise ValueError(f"a link has at least 100 kbit/s, got {text!r}")
    return link


@dataclass(frozen=True)
class Wiring:
    """Hosts in nodes of equal size (the last may be smaller), with a link for each level.

    A host is one rank's world: what is a GPU of a node in a real cluster is a host here, because
    only hosts have links.
    """

    between: LinkSpec  # nodes
    inside: LinkSpec | None = None  # a node; None: every host is a node
    per_node: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.per_node <= MAX_HOSTS_PER_NODE:
            raise ValueError(f"a node has 1 to {MAX_HOSTS_PER_NODE} hosts, got {self.per_node}")
        if (self.inside is None) != (self.per_node == 1):
            raise ValueError("nodes of several hosts, and only those, need a link inside a node")

    def node(self, host: int) -> int:
        return host // self.per_node

    def address(self, host: int) -> str:
        return f"10.77.{self.node(host)}.{host % self.per_node + 1}"

    def link(self, a: int, b: int) -> LinkSpec:
        """Between two different hosts."""
        if self.inside is not None and self.node(a) == self.node(b):
            return self.inside
        return self.between

    def __str__(self) -> str:
        if self.inside is None:
            return f"{self.between}"
        return f"{self.inside} in nodes of {self.per_node}, {self.between} between them"


_LAN = LinkSpec(1e-4, 1e10)
_METRO = LinkSpec(1e-3, 1e9)
LINKS = {
    "lan": Wiring(_LAN),
    "metro": Wiring(_METRO),
    "two-level": Wiring(_METRO, _LAN, per_node=4),
}
