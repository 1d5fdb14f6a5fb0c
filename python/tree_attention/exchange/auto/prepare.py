# SPDX-License-Identifier: BSD-3-Clause
"""A strategy taken and prepared for one state, once."""

from __future__ import annotations

import torch

from ..errors import Disagreement
from ..options import ExchangeOptions
from ..strategies import STRATEGIES, Context, Exchange
from ..transport.buffers import State
from ..transport.process_group import Link
from ..transport.topology import Topology
from .choose import Choice, CostTable, choose, explain_choice
from .setup import Resources


def prepare(
    state: State,
    options: ExchangeOptions,
    link: Link,
    topology: Topology,
    resources: Resources,
    costs: CostTable | None,
    explain: bool,
) -> Exchange:
    """The exchange of `state` by the strategy that `options` name, or that "auto" takes.

    `explain`: print on rank 0 which one that is, and why.
    """
    layout = state.layout
    if layout.num_bytes == 0:
        return lambda deadline, o, lse: None
    unavailable = resources.unavailable(state.device, layout)
    choice = Choice(options.strategy, "asked for")
    if options.strategy == "auto":
        choice = choose(
            layout,
            topology,
            link.backend(state.device),
            head_sharded=options.head_sharded,
            costs=costs,
            unavailable=unavailable,
        )
    name = choice.strategy
    if name in unavailable:
        raise Disagreement(f"{name} is not available: {unavailable[name]}")
    if explain and link.rank == 0:
        text = explain_choice(choice, layout, topology, options.out_dtype, options.head_sharded)
        is_on_host = link.transport_device(state.device).type == "cpu"
        if is_on_host and STRATEGIES[name].is_canonical:  # the others' all-reduces are the group's
            if isinstance(link.shared_memory, str):
                text += f"; no shared memory: {link.shared_memory}"
            elif link.shared_memory is not None:
                text += "; within a node through shared memory"
        print(text, flush=True)
    context = Context(
        link,
        topology,
        state,
        options.out_dtype,
        options.head_sharded,
        resources.of(name, state.device),
    )
    # Views that are made in inference mode cannot be written to outside of it.
    with torch.inference_mode(False):
        return STRATEGIES[name].prepare(context)
