# SPDX-License-Identifier: BSD-3-Clause
"""Several hosts on one: network namespaces whose links have a given delay and bandwidth.

    with EmulatedCluster(LINKS["metro"], 8) as cluster:
        status = cluster.run(["torchrun", ...])        # once on each host
        cluster.relay.cut(0, 5)                        # while something runs

`links` says what there is, `network` makes it, `relay` delays its packets (in `relay.cpp`, which is
compiled on demand), `hosts` runs programs on it and `probe` measures it. Needs root on Linux.
"""

from .hosts import EmulatedCluster, exit_on_sigterm
from .network import Unsupported, unsupported
from .wiring import LINKS, LinkSpec, Wiring, parse_link

__all__ = [
    "LINKS",
    "EmulatedCluster",
    "LinkSpec",
    "Unsupported",
    "Wiring",
    "exit_on_sigterm",
    "parse_link",
    "unsupported",
]
