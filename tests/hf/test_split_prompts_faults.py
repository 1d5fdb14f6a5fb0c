# SPDX-License-Identifier: BSD-3-Clause
"""Ranks lost while a prompt is split: an exception on every survivor, in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed import on_ranks, run_ranks
from tiers import tiers

pytest.importorskip("transformers")

from faults import AMPLE, QUICK, ROUND, SLACK, STOPPED, Once, before_operation
from hf_models import VOCAB_SIZE, make_model
from tree_attention import BlockCyclic, ExchangeError, hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.prompts import split_attention

TOKENS = 8
# Of two layers: rows to their owners, then queries and states or keys; and at last the logits.
ROUNDS = {"queries": 2 * (2 * 3 + 1), "keys": 2 * (2 * 2 + 1)}


@contextmanager
def _passing(what: str) -> Iterator[None]:
    with mock.patch.object(split_attention, "_passes_queries", lambda *_: what == "queries"):
        yield


class _Prompt:
    """A model with a cache on a group, and some tokens in it."""

    def __init__(self, model: Any, group: dist.ProcessGroup, timeout: float) -> None:
        layout = BlockCyclic(group.size(), 1000)  # the first rank keeps all
        self.model = hf.enable(model, group, layout, prefill="split")
        self.cache = hf.TreeCache(model.config, group, layout, timeout=AMPLE)
        self.ids = torch.randint(3, VOCAB_SIZE, (1, TOKENS), generator=torch.Generator())
        self.read()
        self.cache.shard.timeout = timeout

    @torch.no_grad()
    def read(self) -> None:
        self.model(self.ids, **{CACHE_NAME: self.cache}, logits_to_keep=1)

    def fail(self) -> tuple[float, str]:
        """Seconds until an exception. A survivor that was sent all may pass and fail next time."""
        try:
            for _ in range(2):
                begin = time.monotonic()
                self.read()
        except ExchangeError as error:
            seconds = time.monotonic() - begin
            with pytest.raises(
                RuntimeError, match=r"has failed before|did not reach the last layer"
            ):
                self.read()
            return seconds, str(error)
        raise AssertionError("no ExchangeError")


def _stop(rank: int, world_size: int, what: str, folder: Path) -> None:
    """Before every round, with a group of its own for each. A stopped rank goes on when all
    others have failed, and fails then too."""
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    model = make_model("llama")
    for case in range(ROUNDS[what]):
        victim = (case + world_size - 1) % world_size
        with _passing(what):
            prompt = _Prompt(model, dist.new_group(range(world_size)), STOPPED)
            dist.barrier()
            if rank == victim:
                stop = Once(ROUND * case, partial(os.kill, os.getpid(), signal.SIGSTOP))
                with before_operation(stop):
                    prompt.fail()
                assert stop.done
                continue
            seconds, message = prompt.fail()
            assert seconds < STOPPED + SLACK, message
        (folder / f"{world_size}-{case}-{rank}").touch()
        if rank == (victim + 1) % world_size:
            others = [folder / f"{world_size}-{case}-{r}" for r in range(world_size) if r != victim]
            while not all(file.exists() for file in others):
                time.sleep(0.005)
            os.kill(pids[victim], signal.SIGCONT)


@pytest.mark.parametrize("what, worlds", tiers([], [("keys", (2, 3, 4)), ("queries", (2, 3, 4))]))
def test_stopped_ranks(what: str, worlds: tuple[int, ...], tmp_path: Path) -> None:
    """All worlds at once: they wait most of the time."""
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(run_ranks, _stop, world, what, tmp_path) for world in worlds]
    for run in runs:
        run.result()


def _kill(rank: int, world_size: int, what: str, rounds: list[int]) -> None:
    """Those that are left form a group and go on."""
    model = make_model("llama")
    left = list(range(world_size))
    for number, victim in zip(rounds, (2, 1, 3), strict=True):
        group = dist.new_group(left, use_local_synchronization=True)
        with _passing(what):
            prompt = _Prompt(model, group, AMPLE)
            dist.barrier(group)
            if rank == victim:
                with before_operation(Once(ROUND * number, partial(os.kill, os.getpid(), 9))):
                    prompt.fail()
            seconds, message = prompt.fail()
        assert seconds < QUICK, message
        assert f"no word from rank {left.index(victim)}" in message
        left.remove(victim)


@pytest.mark.parametrize(
    ("what", "rounds"),
    tiers([("queries", [0, 1, 2])], [("queries", [3, 4, 5]), ("keys", [0, 1, 4])]),
)
def test_killed_ranks(what: str, rounds: list[int]) -> None:
    """Worlds of 4, 3 and 2, of the same processes."""
    run_ranks(_kill, 4, what, rounds, lost=[1, 2, 3])


@on_ranks(2, fresh=True)
def test_a_rank_that_fails_alone(rank: int, world_size: int) -> None:
    model = hf.enable(make_model("llama"), prefill="split")
    group = dist.new_group(range(world_size))
    ids = torch.randint(3, VOCAB_SIZE, (1, TOKENS), generator=torch.Generator())

    @torch.no_grad()
    def read() -> None:
        cache = hf.TreeCache(model.config, group, timeout=AMPLE)
        model(ids, **{CACHE_NAME: cache}, logits_to_keep=1)

    read()
    if rank == 1:
        hook = model.model.layers[1].register_forward_pre_hook(mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            read()
        hook.remove()
    # Rank 0 is in the second layer, and must not take the rows of the first for it.
    with pytest.raises(ExchangeError):
        read()
