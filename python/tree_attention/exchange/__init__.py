# SPDX-License-Identifier: BSD-3-Clause
"""Merging partial states over ranks: one small exchange, the same bits everywhere, or an error.

Read from the door to the wire, each importing only what is below it:

    merge           `all_merge_states`; `compile` makes it an operator of compiled graphs
    communicator    calls over one process group, and the buffers behind them
    agreement/      all ranks make the same call in time, or all raise
    auto/           the strategy that "auto" takes, readied for a state
    options         what callers ask for, checked
    strategies/     one file for each route of the messages
    transport/      messages between ranks, and the memory that travels

Other packages import what this module names.
"""

from .agreement.call import DEFAULT_TIMEOUT, Call, on_every_rank
from .auto.choose import COSTS_VARIABLE, CostTable, measured_costs
from .calibration import calibrate
from .communicator import Communicator, get_communicator
from .compile import collective
from .merge import all_merge_states, fake_merge
from .notes import ExchangeError, Note, Signature, ranks_text, sentence
from .options import (
    MAX_SECONDS,
    MERGE_DEFAULTS,
    MERGE_SCHEMA,
    ExchangeOptions,
    MergeOptions,
    check_options,
    check_state,
    check_timeout,
    resolve_group,
)
from .strategies import candidates, strategies
from .transport.buffers import MAX_KEPT_BYTES, State, StateLayout
from .transport.deadlines import call_before, remaining
from .transport.messages import Round
from .transport.process_group import Link
from .transport.topology import Topology

__all__ = [
    "COSTS_VARIABLE",
    "DEFAULT_TIMEOUT",
    "MAX_KEPT_BYTES",
    "MAX_SECONDS",
    "MERGE_DEFAULTS",
    "MERGE_SCHEMA",
    "Call",
    "Communicator",
    "CostTable",
    "ExchangeError",
    "ExchangeOptions",
    "Link",
    "MergeOptions",
    "Note",
    "Round",
    "Signature",
    "State",
    "StateLayout",
    "Topology",
    "all_merge_states",
    "calibrate",
    "call_before",
    "candidates",
    "check_options",
    "check_state",
    "check_timeout",
    "collective",
    "fake_merge",
    "get_communicator",
    "measured_costs",
    "on_every_rank",
    "ranks_text",
    "remaining",
    "resolve_group",
    "sentence",
    "strategies",
]
