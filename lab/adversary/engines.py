# SPDX-License-Identifier: BSD-3-Clause
"""What an engine does with its group around calls of ours: messages and collectives of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor

from distributed import through_the_group
from tree_attention import Communicator

from . import model
from .cases import Case
from .changes import OPS, Call
from .outcome import AMPLE
from .places import Place

# Those of a communicator used to be 256 times its number.
_TAGS = (0, 1, 2, 255, 256, 257, 511, 512, 513, 768, 1024, 2560, 0x7A77, 65535, 65536)
# Bytes: of a delivery test, a call id, small states, a ring's keys.
_SIZES = (4, 8, 16, 32, 64, 128, 256, 1280, 2048, 4096)


# Of a communicator from call to call, and of all else in a process that has grown meanwhile.
_KEPT_BYTES = (64 + 24) << 20


def _draw_tags(rng: Random, count: int) -> list[int]:
    tags: list[int] = []
    while len(tags) < count:
        tag = rng.choice([*_TAGS, 256 * rng.randrange(1, 60) + rng.choice([0, 0, 1, 2, 3]),
                          rng.randrange(1 << 20)])  # fmt: skip
        if tag not in tags:
            tags.append(tag)
    return tags


def _payload(seed: int, rank: int, num_bytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def messages(case: Case, here: Place) -> str:
    """Messages of the engine, with tags and sizes of any kind, and ours: all arrive as sent."""
    rng, own_rng = case.rng, case.rng_of(here.rank)
    following, previous = ((here.rank + step) % here.world_size for step in (1, -1))
    ways = rng.choice([through_the_group, through_the_group, nullcontext])
    seed, tags = rng.getrandbits(20), _draw_tags(rng, rng.randint(1, 4))
    sizes = [rng.choice(_SIZES) for _ in tags]
    calls = [Call(rng.choice(OPS), rng.getrandbits(31)) for _ in range(rng.randint(1, 4))]
    is_new, collects = rng.random() < 0.7, rng.random() < 0.3
    received = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    sent = [_payload(seed + i, here.rank, size) for i, size in enumerate(sizes)]
    works = []
    # Before which call a message is posted is each rank's own affair, and nobody waits for it.
    receive_at = [own_rng.randint(0, len(calls)) for _ in tags]
    send_at = [own_rng.randint(0, len(calls)) for _ in tags]

    def post(number: int) -> None:
        for i, tag in enumerate(tags):
            if receive_at[i] == number:
                works.append(dist.irecv(received[i], group_src=previous, group=here.group, tag=tag))
            if send_at[i] == number:
                works.append(dist.isend(sent[i], group_dst=following, group=here.group, tag=tag))

    how = f"tags {tags}, bytes {sizes}, {[call.op for call in calls]}"
    with ways():
        there = here
        if is_new or ways is through_the_group:
            there = replace(here, comm=Communicator(here.group, AMPLE))
        for number, call in enumerate(calls):
            post(number)
            if collects:
                total = torch.ones(3)
                dist.all_reduce(total, group=here.group)
                assert total.tolist() == [here.world_size] * 3, "the engine's own sum is wrong"
            try:
                call.make(there, AMPLE).result()
            except AssertionError as error:
                raise AssertionError(f"{call.op} beside {how}: {error}") from error
        post(len(calls))
    for work in works:
        work.wait(timedelta(seconds=AMPLE))
    for i, found in enumerate(received):
        expected = _payload(seed + i, previous, sizes[i])
        assert torch.equal(found, expected), f"message {i} of {how}: {found[:8].tolist()}"
    here.probe()
    return model.bits(*[_payload(seed, 0, 8)])


def _anonymous_bytes() -> int:
    """What this process has of memory that is no file, its allocator's reserves aside."""
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def memory(case: Case, here: Place) -> str:
    """After a large call a communicator keeps no more than it says, whatever was large in it."""
    rng = case.rng
    ways = rng.choice([through_the_group, nullcontext, nullcontext])
    op, size = rng.choice(OPS), rng.choice([16, 24, 32])  # MiB
    large = Call(op, 1, seqlen_q=512 * size, head_dim=128)  # of 4 heads in float32
    if op == "all_reduce":
        large = Call(op, 1, batch=2048 * size, head_dim=128)
    elif op == "all_gather":
        large = Call(op, 1, batch=2048 * size // here.world_size, head_dim=128)
    elif op == "all_merge_states":
        large = Call(op, 1, seqlen_q=1024 * size, head_dim=128)
    with ways():
        there = replace(here, comm=Communicator(here.group, AMPLE))
        small = [Call(rng.choice(OPS), rng.getrandbits(31)) for _ in range(2)]
        for call in small:
            call.make(there, AMPLE).result()
        before = _anonymous_bytes()
        large.make(there, AMPLE).result()
        for call in small:
            call.make(there, AMPLE).result()
        kept = _anonymous_bytes() - before
    assert kept <= _KEPT_BYTES, f"{op} of {size} MiB leaves {kept >> 20} MiB"
    here.probe()
    return "bounded"


KINDS: dict[str, tuple[float, Callable[[Case, Place], str]]] = {
    "messages": (3, messages),
    "memory": (0.5, memory),
}
