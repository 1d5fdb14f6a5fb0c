# SPDX-License-Identifier: BSD-3-Clause
"""`shares="auto"`: shares by the measured speed and memory of the ranks' hosts."""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from .._numbers import integer
from ..exchange import Communicator, Signature, on_every_rank
from ..planning.arithmetic import PROMPTS, SPLIT, Work
from ..planning.measuring import known_machines
from ..planning.models import Model
from ..planning.unequal import Group, gigabytes, in_words, milliseconds
from ..shares import EQUAL, ModelShares
from .options import CacheOptions
from .shape import shape_of

# Tokens in the cache of the token that is timed, where the model does not end before.
_CONTEXT = 32 << 10
_WEIGHTS = {torch.float32: 4.0}  # bytes; of other dtypes 2


def shape_in(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    weights: str | None = None,
    kv_dtype: str | None = None,
) -> Model:
    """The planner's shape of a model whose weights have this dtype, or are quantised."""
    model = shape_of(str(config.model_type), copy.deepcopy(config))
    itemsize = _WEIGHTS.get(dtype, 2.0)
    found = replace(
        model.weights, itemsize=itemsize, matrix_itemsize=itemsize, expert_itemsize=itemsize
    )
    if weights is not None:
        found = found.quantised(weights)
    of_cache = "float32" if dtype == torch.float32 else "bf16"
    return replace(model, weights=found, kv_dtype=kv_dtype or of_cache)


def measured_group(
    op: str,
    comm: Communicator,
    shape: Callable[[], Model],
    *,
    timeout: float,
    device: torch.device,
    is_split: bool = True,
    tensor_parallel_size: int = 1,
    max_length: int | None = None,
    held: int = 0,
) -> Group:
    """Collective: a model over the hosts of all ranks, the same on every rank.

    Args:
        is_split: its weights are, and with it the prompts.
        held: bytes of weights that are in this rank's memory already.
    """

    context = _CONTEXT if max_length is None else integer(op, "max_length", max_length, 1)

    def read() -> tuple[tuple[()], Model]:
        return (), shape()

    model, _ = on_every_rank(op, comm, timeout, read)
    form = SPLIT if is_split and not model.not_split else PROMPTS
    size = tensor_parallel_size if form == SPLIT else 1
    attention = max(model.attention, key=lambda x: x.layers * x.attended(context))
    if attention.latent is not None:  # which ranks of a tensor group read whole, with fewer heads
        attention = replace(attention, heads=max(1, attention.heads // size))
    machines, link = known_machines(op, comm, device, timeout, attention, held)
    work = Work(context)
    return Group(model, form, machines, link, work, size)


def choose(op: str, comm: Communicator, group: Group, timeout: float) -> ModelShares:
    """Collective: the shares for a group; the first rank logs what they are and why.

    Raises:
        ValueError: the model fits under no shares.
        ExchangeError: ranks found different ones.
    """

    def best() -> tuple[Signature, ModelShares]:
        try:
            shares = group.best
        except ValueError as error:
            raise ValueError(f"{op}: shares='auto': {error}") from None
        return (("shares", tuple(shares)),), shares

    # Each rank may have read a table of its own.
    shares, _ = on_every_rank(op, comm, timeout, best)
    log = logging.getLogger("tree_attention")
    if comm.rank == 0:
        log.info(f"{op}: {said(group, shares)}")
        if warning := group.advice:
            log.warning(f"{op}: {warning}; {group.what_to_do}")
    return shares


def said(group: Group, shares: ModelShares, ranks: Sequence[int] | None = None) -> str:
    """A sentence on what was measured and taken; `ranks` have other numbers than in the group."""
    numbers = range(len(group.machines)) if ranks is None else ranks
    named = [f"rank {r} ({x.name})" for r, x in zip(numbers, group.machines, strict=True)]
    rates = [gigabytes(machine.memory_bandwidth) for machine in group.machines]
    seconds = milliseconds(group.token_seconds(shares))
    takes = f"after {group.work.context:,} tokens the next takes about {seconds}"
    if len(named) == 1:
        return f"{named[0]} alone, which reads {rates[0]} GB/s: {takes}"
    hosts = ", ".join(map(" ".join, zip(named, rates, strict=True)))
    even = f", and {milliseconds(group.token_seconds(EQUAL))} with equal ones"
    even *= group.token_seconds(shares) != group.token_seconds(EQUAL)
    return f"hosts read, in GB/s: {hosts}; {in_words(shares)}: {takes} with them{even}"


def auto_for_enabled(
    op: str,
    comm: Communicator,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    held: int,
    options: CacheOptions,
) -> ModelShares:
    """Collective: shares of the cache and of prompts of a model with replicated weights."""
    if comm.world_size == 1:
        return ModelShares()
    timeout = comm.seconds_of(op, options["timeout"])
    group = measured_group(
        op,
        comm,
        lambda: shape_in(config, dtype, kv_dtype=options["kv_dtype"]),
        timeout=timeout,
        device=device,
        is_split=False,
        max_length=options["max_length"],
        held=held,
    )
    return choose(op, comm, group, timeout)
