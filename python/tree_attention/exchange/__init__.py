# SPDX-License-Identifier: BSD-3-Clause
"""Merging partial states over ranks: one small exchange, the same bits everywhere, or an error.

`merge` is the door, `all_merge_states`, which `graph` makes an operator of compiled graphs;
`communicator` is a process group prepared for it, `groups` finds the one that a caller means, and
`arguments` checks what callers ask. A strategy is a file in `strategies/`; `choice` is how "auto"
takes one, `calibration` measures what it goes by and `preparation` readies it for a state. `link`
and `rounds` are the process group's operations with deadlines and counters, `state` is the memory
that travels. `session` and `agreement` see to it that all ranks do the same or all fail, `turn`
that one thread does it at a time, and `self_test` that ranks round alike and messages arrive where
they should.
"""

from .communicator import DEFAULT_TIMEOUT, Communicator
from .errors import ExchangeError
from .groups import get_communicator
from .merge import all_merge_states
from .options import ExchangeOptions, check_options, check_timeout
from .strategies import strategies
from .transport.process_group import Link
from .transport.topology import Topology

__all__ = [
    "DEFAULT_TIMEOUT",
    "Communicator",
    "ExchangeError",
    "ExchangeOptions",
    "Link",
    "Topology",
    "all_merge_states",
    "check_options",
    "check_timeout",
    "get_communicator",
    "strategies",
]
