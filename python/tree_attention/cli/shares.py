# SPDX-License-Identifier: BSD-3-Clause
"""`--shares` of generate: how much each process gets, and which of them are better left out."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .usage import UsageError, report

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from ..shares import GivenShares
    from .world import World

# Keys in the store of all processes. With a rank's number appended: that rank needs it no longer,
# and a number that grows while the rank runs.
_ENDED, _ALIVE = "tree_attention/generate/ended", "tree_attention/generate/alive"
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Part:
    """The processes that generate, as this one of them sees them."""

    world: World
    group: ProcessGroup | None  # None: all
    shares: GivenShares


def given_shares(text: str) -> list[int] | None:
    """The numbers of --shares; None for equal ones."""
    if text == "even":
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(
            "--shares must be even, auto, or integers with commas between, one for each process, "
            f"such as 3,1, got {text!r}"
        ) from None


def check_shares(text: str, num_ranks: int, tensor_parallel_size: int) -> None:
    """Raises UsageError unless --shares are those of so many ranks."""
    from ..shares import ModelShares

    try:
        ModelShares.of("--shares", given_shares(text), num_ranks, tensor_parallel_size)
    except ValueError as error:
        raise UsageError(str(error)) from error


def may_split(arguments: argparse.Namespace) -> bool:
    """Prompts are split over processes only if each has all weights."""
    return arguments.weights != "replicated" and arguments.prefill != "split"


def strategies_of_split() -> tuple[str, ...]:
    """Names of --strategy that give each process the heads that are its own."""
    import torch

    from ..exchange import candidates

    return ("auto", *candidates(torch.float32, head_sharded=True))


def takes_strategy(arguments: argparse.Namespace, num_ranks: int) -> bool:
    """True where weights can be split under --strategy, which matters where several processes share
    a cache."""
    size = arguments.tensor_parallel_size
    return size >= num_ranks or arguments.strategy in strategies_of_split()


@contextmanager
def taking_part(
    arguments: argparse.Namespace, world: World, device: torch.device
) -> Iterator[Part | None]:
    """The part of this process under --shares, or None where the others are faster without it.

    Collective with "auto": all processes measure, and make a group of those that help.
    """
    if arguments.shares != "auto":
        yield Part(world, None, given_shares(arguments.shares))
    elif world.size == 1:
        yield Part(world, None, None)
    else:
        with _measured(arguments, world, device) as part:
            yield part


@contextmanager
def _measured(
    arguments: argparse.Namespace, world: World, device: torch.device
) -> Iterator[Part | None]:
    import torch
    import torch.distributed as dist

    from ..exchange import get_communicator
    from ..hf.auto_shares import measured_group, said, shape_in
    from ..planning.models import Model
    from ..weights.checkpoint.files import Source
    from ..weights.load import read_config

    def shape() -> Model:
        config, checkpoint = read_config(Source.of(arguments.model, None, None))
        named = None if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
        dtype: Any = named or config.dtype or checkpoint.dtype
        scheme, kv_dtype = (
            None if name == "auto" else name
            for name in (arguments.weight_dtype, arguments.kv_dtype)
        )
        return shape_in(config, dtype, scheme, kv_dtype)

    try:
        group = measured_group(
            "generate",
            get_communicator(),
            shape,
            timeout=arguments.timeout,
            device=device,
            is_split=may_split(arguments) and takes_strategy(arguments, world.size),
            tensor_parallel_size=arguments.tensor_parallel_size,
        )
        left_out = group.unhelpful
        kept = [rank for rank in range(world.size) if rank not in left_out]
        others = group.without(left_out)
        shares = others.best
    except ValueError as error:
        raise UsageError(f"--shares auto: {error}") from None
    made: Any = dist.new_group(kept) if left_out else None
    store = dist.distributed_c10d._get_default_store()
    if world.rank in left_out:
        report("generate", f"this process is left out: {group.advice}")
        yield None
        if world.rank == 0:  # which may serve the store
            _wait_for(store, kept, arguments.timeout)
        return
    if world.rank == kept[0]:
        if left_out:
            report("generate", f"left out: {group.advice}")
        report("generate", said(others, shares, kept))
    try:
        with _counting(store, f"{_ALIVE}/{world.rank}"):
            yield Part(_world_of(world, kept), made, shares.given(others.tensor_parallel_size))
    finally:
        store.set(f"{_ENDED}/{world.rank}", "")


def _world_of(world: World, kept: Sequence[int]) -> World:
    from .world import World

    return World(kept.index(world.rank), len(kept), world.local_rank)


@contextmanager
def _counting(store: Any, key: str) -> Iterator[None]:
    """Counts up a key of the store all the time."""
    own, ended = store.clone(), threading.Event()  # a wait in the other one would hold it up

    def count() -> None:
        with suppress(RuntimeError):  # a lost store, which the main thread says something of
            while not ended.wait(_LOOK_SECONDS):
                own.add(key, 1)

    thread = threading.Thread(target=count, name="tree_attention.alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _wait_for(store: Any, ranks: Sequence[int], timeout: float) -> None:
    """Returns when these ranks have ended.

    Raises:
        ExchangeError: some have neither ended nor counted for `timeout` seconds.
    """
    from ..exchange import ExchangeError, ranks_text

    counts, silent = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0.0)
    while running := [rank for rank in ranks if not store.check([f"{_ENDED}/{rank}"])]:
        for rank in running:
            count = store.add(f"{_ALIVE}/{rank}", 0)
            # Silence is counted in looks: a clock goes on while all are stopped (Ctrl-Z).
            silent[rank] = silent[rank] + _LOOK_SECONDS if count == counts[rank] else 0.0
            counts[rank] = count
        if lost := [rank for rank in running if silent[rank] > timeout]:
            raise ExchangeError(
                f"no word for {timeout:g} s from {ranks_text(lost)}, for which this process waits: "
                "it was ended, or cannot be reached"
            )
        time.sleep(_LOOK_SECONDS)
