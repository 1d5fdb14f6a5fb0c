# SPDX-License-Identifier: BSD-3-Clause
"""Merging partial states over ranks: one small exchange, the same bits everywhere, or an error.

From the public function down to the sockets; a module imports only what stands below it:

    merge, topk     `all_merge_states` and `all_merge_topk`; `compile` makes them operators of
                    compiled graphs
    communicator    the collective calls of one process group, and their buffers
    agreement/      all ranks make the same call and return in time, or all raise
    auto/           the strategy that "auto" takes, prepared for a state
    options         validation of what callers ask for
    strategies/     one file for each way to exchange and merge states
    transport/      messages between ranks, and the memory that they are in

Other packages import from this module only.
"""

from .._numbers import DEFAULT_TIMEOUT
from .auto.choose import CostTable, MeasuredHost, measured_costs
from .calibration import calibrate
from .communicator import Call, Communicator, get_communicator, on_every_rank
from .compile import collective
from .merge import all_merge_states, fake_merge
from .notes import ExchangeError, Note, Signature, ranks_text, sentence
from .options import (
    MERGE_DEFAULTS,
    MERGE_SCHEMA,
    ExchangeOptions,
    GivenStrategy,
    MergeOptions,
    check_options,
    check_state,
    check_timeout,
    resolve_group,
)
from .strategies import StrategyName, candidates, strategies
from .topk import all_merge_topk
from .transport.buffers import State, StateLayout
from .transport.deadlines import call_before, remaining
from .transport.messages import Round
from .transport.process_group import Link
from .transport.topology import Topology

__all__ = [
    "DEFAULT_TIMEOUT",
    "MERGE_DEFAULTS",
    "MERGE_SCHEMA",
    "Call",
    "Communicator",
    "CostTable",
    "ExchangeError",
    "ExchangeOptions",
    "GivenStrategy",
    "Link",
    "MeasuredHost",
    "MergeOptions",
    "Note",
    "Round",
    "Signature",
    "State",
    "StateLayout",
    "StrategyName",
    "Topology",
    "all_merge_states",
    "all_merge_topk",
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
