# SPDX-License-Identifier: BSD-3-Clause
"""Merging partial states over ranks: one small exchange, the same bits everywhere, or an error.

`Communicator` is the prepared process group; `strategies` lists the ways to exchange, each a file;
`link` and `messages` are the process group's operations with deadlines and counters, `state` and
`slices` what travels; `session` and `agreement` see to it that all ranks mean the same or all fail;
`topology`, `traffic`, `costs` and `selection` are how "auto" chooses; `symmetric` is memory
that GPUs share. `chunks` and `overlap` are how exchanges run beside the attention.
"""

from .agreement import ExchangeError
from .communicator import DEFAULT_TIMEOUT, Communicator
from .communicators import get_communicator
from .link import Link
from .strategies import check_options, strategies
from .strategy import Options, Strategy
from .topology import Topology

__all__ = [
    "DEFAULT_TIMEOUT",
    "Communicator",
    "ExchangeError",
    "Link",
    "Options",
    "Strategy",
    "Topology",
    "check_options",
    "get_communicator",
    "strategies",
]
