# SPDX-License-Identifier: BSD-3-Clause
"""`shares="auto"`: shares by the measured speed and memory of the ranks' hosts."""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from .._numbers import in_digits, integer
from ..exchange import Communicator, MeasuredHost, on_every_rank
from ..planning.arithmetic import PROMPTS, SPLIT, Work
from ..planning.measuring import as_machine, measure_all
from ..planning.models import Model
from ..planning.unequal import Group, by_speed
from ..shares import GivenShares, ModelShares, Shares
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
) -> tuple[Group, tuple[MeasuredHost, ...]]:
    """Collective: the hosts of all ranks with a model over them, the same on every rank.

    Args:
        is_split: its weights are, and with it the prompts.
        held: bytes of weights that are in this rank's memory already.
    """

    context = _CONTEXT if max_length is None else integer(op, "max_length", max_length, 1)

    def read() -> tuple[tuple[()], Model]:
        return (), shape()

    model, notes = on_every_rank(op, comm, timeout, read, lambda model: {"held": held})
    hosts, link = measure_all(op, comm, device, timeout)
    machines = tuple(
        as_machine(replace(host, memory=host.memory + note["held"]))
        for host, note in zip(hosts, notes, strict=True)
    )
    form = SPLIT if is_split and not model.not_split else PROMPTS
    size = tensor_parallel_size if form == SPLIT else 1
    work = Work(context)
    return Group(model, form, machines, link, work, size), hosts


def choose(
    op: str, comm: Communicator, group: Group, hosts: tuple[MeasuredHost, ...]
) -> ModelShares:
    """The shares for a group, of which the first rank says what they are and why.

    Raises:
        ValueError: the model fits under no shares.
    """
    try:
        shares = group.best
    except ValueError as error:
        raise ValueError(f"{op}: shares='auto': {error}") from None
    log = logging.getLogger("tree_attention")
    if comm.rank == 0:
        log.info(f"{op}: {said(group, shares)}")
        if warning := advice(group, hosts):
            log.warning(f"{op}: {warning}; {what_to_do(group, hosts)}")
    size = group.tensor_parallel_size
    of_cache = None if shares is None else shares[::size]
    if group.form == SPLIT:
        return ModelShares(shares, of_cache, of_cache)
    return ModelShares(None, of_cache, by_speed([host.flop for host in hosts]))


def of_group(group: Group, hosts: Sequence[MeasuredHost]) -> GivenShares:
    """The shares of a group as `from_pretrained`, or `enable` for replicated weights, take them.

    Raises:
        ValueError: the model fits under no shares.
    """
    shares = group.best
    if group.form == SPLIT or len(hosts) == 1:
        return shares
    return {"cache": shares, "prompt": by_speed([host.flop for host in hosts])}


def said(group: Group, shares: Shares, ranks: Sequence[int] | None = None) -> str:
    """A sentence on what was measured and taken; `ranks` have other numbers than in the group."""
    numbers = range(len(group.machines)) if ranks is None else ranks
    hosts = ", ".join(
        f"rank {rank} ({machine.name}) {_gigabytes(machine.memory_bandwidth)}"
        for rank, machine in zip(numbers, group.machines, strict=True)
    )
    taken = "equal shares" if shares is None else f"shares {', '.join(map(str, shares))}"
    times = f"a token takes about {_milliseconds(group.token_seconds(shares))} with them"
    if shares is not None:
        times += f" and {_milliseconds(group.token_seconds(None))} with equal ones"
    return f"hosts read, in GB/s: {hosts}; {taken}: {times}"


def advice(group: Group, hosts: Sequence[MeasuredHost]) -> str:
    """A sentence on ranks that make a token slower, with both times, or nothing."""
    ranks = group.unhelpful
    if not ranks:
        return ""
    others = group.without(ranks)
    fastest = max(range(len(hosts)), key=lambda rank: hosts[rank].read)
    named = ", ".join(f"rank {rank} ({hosts[rank].host})" for rank in ranks)
    rates = ", ".join(_gigabytes(hosts[rank].read) for rank in ranks)
    end, them = ("", "them") if len(ranks) > 1 else ("s", "it")
    sentence = (
        f"{named} read{end} {rates} GB/s and rank {fastest} {_gigabytes(hosts[fastest].read)}: a "
        f"token takes about {_milliseconds(group.seconds)} with {them} and "
        f"{_milliseconds(others.seconds)} without"
    )
    if group.form != SPLIT:
        whole = _gigabytes(group.model.weights.num_bytes)
        sentence += f", as every rank reads all {whole} GB of weights for each token"
    return sentence


def what_to_do(group: Group, hosts: Sequence[MeasuredHost]) -> str:
    """Words on what helps where ranks make a token slower."""
    ranks = group.unhelpful
    them = "them" if len(ranks) > 1 else "it"
    if group.form != SPLIT and not group.model.not_split:
        return f"split the weights with from_pretrained, or start without {them}"
    memory = _gigabytes(sum(hosts[rank].memory for rank in ranks))
    return f"start without {them}, or keep {them} for {memory} GB of memory"


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
    group, hosts = measured_group(
        op,
        comm,
        lambda: shape_in(config, dtype, kv_dtype=options["kv_dtype"]),
        timeout=comm.seconds_of(op, options["timeout"]),
        device=device,
        is_split=False,
        max_length=options["max_length"],
        held=held,
    )
    return choose(op, comm, group, hosts)


def _gigabytes(value: float) -> str:
    return in_digits(value / 1e9)


def _milliseconds(seconds: float) -> str:
    return f"{in_digits(1e3 * seconds)} ms"
