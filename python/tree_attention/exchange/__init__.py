# SPDX-License-Identifier: BSD-3-Clause
"""Merging partial states over ranks: one small exchange, the same bits everywhere, or an error.

`Communicator` is the prepared process group, `strategies` the ways to exchange, `link` the process
group's operations with deadlines and counters, `agreement` the check that all ranks mean the same.
"""

from .agreement import ExchangeError
from .communicator import DEFAULT_TIMEOUT, Communicator, get_communicator
from .link import Link
from .strategies import Strategy, resolve, strategies

__all__ = [
    "DEFAULT_TIMEOUT",
    "Communicator",
    "ExchangeError",
    "Link",
    "Strategy",
    "get_communicator",
    "resolve",
    "strategies",
]
