# SPDX-License-Identifier: BSD-3-Clause
"""One rank, which soak.py runs on every host: it decodes sequences and checks every result.

It says "ready" for every group, about twice a second "done RESULTS WRONG BYTES" with its resident
memory, and "error SENTENCE" when a call raised. Then it waits to be told to form the next group.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from random import Random
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.ranks import available_strategies
from tree_attention import BlockCyclic, ExchangeError, tree_decode
from tree_attention.exchange import Communicator, StrategyName
from tree_attention.reference import attention

DEADLINE = 3.0  # seconds, of every call
_FORMING = 60.0  # for the first call of a group, as a mended link carries nothing for seconds
_BATCHES = (1, 3)
_TOKENS, _MAX_KEYS = 16, 500  # of a sequence
_SAY_EVERY = 0.5
# Largest errors of float32 results: o is a mean of normal numbers, lse about 6.
_TOLERANCE = 2e-5
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Counter:
    """Results so far, told from time to time."""

    def __init__(self) -> None:
        self._results = self._wrong = 0
        self._said = time.monotonic()

    def add(self, right: bool) -> None:
        self._results += 1
        self._wrong += not right
        if time.monotonic() - self._said > _SAY_EVERY:
            self.say()

    def say(self) -> None:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
        print(f"done {self._results} {self._wrong} {resident}", flush=True)
        self._results = self._wrong = 0
        self._said = time.monotonic()


def decode_sequences(comm: Communicator, seed: str, counter: Counter) -> None:
    """Until a call raises: the same sequences on every rank, each with a strategy of its own."""
    cases = [(name, batch) for name in available_strategies(comm) for batch in _BATCHES]
    for number in itertools.count():
        random = Random(f"{seed} {number}")
        name, batch = cases[number % len(cases)]
        strategy = cast(StrategyName, name)
        layout = BlockCyclic(comm.world_size, random.choice((1, 4, 64)))
        generator = torch.Generator().manual_seed(random.getrandbits(32))
        k, v = torch.randn(2, batch, 2, _MAX_KEYS, 64, generator=generator)
        mine = layout.local_slots(comm.rank, 0, _MAX_KEYS)
        k_mine, v_mine = k[:, :, mine], v[:, :, mine]
        begin = random.randrange(1, _MAX_KEYS - _TOKENS)
        for length in range(begin, begin + _TOKENS):
            q = torch.randn(batch, 8, 1, 64, generator=generator)
            held = layout.count(comm.rank, length)
            k_held, v_held = k_mine[:, :, :held], v_mine[:, :, :held]
            result = tree_decode(q, k_held, v_held, group=comm, strategy=strategy)
            counter.add(is_right(result, attention(q, k[:, :, :length], v[:, :, :length])))


def is_right(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Tell if o and lse are the reference's in float64."""
    errors = ((x - y).abs().max().item() for x, y in zip(result, expected, strict=True))
    return all(error <= _TOLERANCE for error in errors)  # false of NaN


def main(seed: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    counter = Counter()
    for number in itertools.count():
        group = dist.new_group(list(range(dist.get_world_size())))
        assert isinstance(group, dist.ProcessGroup)  # this rank is in it
        comm = Communicator(group, DEADLINE)
        comm.all_merge_states(torch.ones(1, 1, 1, 8), torch.zeros(1, 1, 1), timeout=_FORMING)
        print("ready", flush=True)
        try:
            decode_sequences(comm, f"{seed} {number}", counter)
        except ExchangeError as error:
            counter.say()
            print("error", str(error).replace("\n", " "), flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # connections of lost peers would delay the end
        del comm
        dist.destroy_process_group(group)


if __name__ == "__main__":
    main(sys.argv[1])
