# SPDX-License-Identifier: BSD-3-Clause
"""The layouts of the cache against slots that are dealt one after the other."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from random import Random
from typing import Any

import torch
from torch import Tensor

from tree_attention import BlockCyclic, Contiguous, ContiguousThenCyclic

from . import model
from .cases import SURROUNDINGS, Case, draw_layout, surroundings
from .outcome import attempt

_NAMES = ("BlockCyclic", "Contiguous", "ContiguousThenCyclic")
_NO_INTEGERS: tuple[Any, ...] = (0.5, 2.0, "1", None, [1], 1j, Fraction(1, 2), torch.tensor(1.5),
                                 torch.rand(3), torch.nan)  # fmt: skip


def world_size(case: Case) -> int:
    return 1


def play(case: Case, rank: int) -> str:
    return case.draw(KINDS)(case.rng)


def _right(rng: Random) -> str:
    length = rng.choice([0, 1, 5, rng.randrange(1, 300)])
    world_size = rng.choice([1, 2, 3, 8])
    layout = draw_layout(rng, world_size, length)
    owners = model.owners(layout, length)
    rank = rng.randrange(world_size)
    held = [slot for slot, owner in enumerate(owners) if owner == rank]
    begin, end = sorted((rng.randint(0, length), rng.randint(0, length)))
    kind = rng.choice(["int", "int32", "int64", "uint8", "scalar"])
    with surroundings(rng.choice(SURROUNDINGS)):
        slots = layout.local_slots(rank, begin, end)
        local_range = layout.local_range(rank, begin, end)
        if kind == "int":
            counts: Any = [layout.count(rank, n) for n in range(length + 1)]
            found: Any = [layout.owner(slot) for slot in range(length)]
            globals_: Any = [layout.global_slots(rank, j) for j in range(len(held))]
        else:
            dtype = {"int32": torch.int32, "uint8": torch.uint8}.get(kind, torch.int64)
            length_of_dtype = min(length, torch.iinfo(dtype).max)
            owners, held = owners[:length_of_dtype], [s for s in held if s < length_of_dtype]
            if kind == "scalar":
                counts, found, globals_ = (
                    [int(f(torch.tensor(i, device="cpu"))) for i in range(n)]
                    for f, n in (
                        (lambda n: layout.count(rank, n), length_of_dtype + 1),
                        (layout.owner, length_of_dtype),
                        (lambda j: layout.global_slots(rank, j), len(held)),
                    )
                )
            else:
                counts, found, globals_ = (
                    _listed(f(torch.arange(n, dtype=torch.int64, device="cpu").to(dtype)))
                    for f, n in (
                        (lambda n: layout.count(rank, n), length_of_dtype + 1),
                        (layout.owner, length_of_dtype),
                        (lambda j: layout.global_slots(rank, j), len(held)),
                    )
                )
    length = len(owners)
    where = f"{layout} rank {rank} by {kind}"
    assert found == owners, f"owner of {where}: {found}"
    assert globals_ == held, f"global_slots of {where}: {globals_}"
    expected = [sum(owner == rank for owner in owners[:n]) for n in range(length + 1)]
    assert counts == expected, f"count of {where}: {counts}"
    in_range = [slot for slot in model.owners(layout, end)[begin:end] if slot == rank]
    assert slots.device.type == "cpu" and slots.dtype == torch.int64, slots
    assert len(slots) == len(in_range) == max(0, local_range[1] - local_range[0]), where
    return str((counts, globals_))


def _listed(x: Tensor) -> list[int]:
    assert x.dtype == torch.int64, x.dtype
    return x.tolist()


def _wrong_call(rng: Random) -> str:
    length, world_size = 40, rng.choice([1, 3])
    layout = draw_layout(rng, world_size, length)
    bad = rng.choice(_NO_INTEGERS)
    bad_rank = rng.choice([-1, world_size, 2**70, 0.5, "0", None, 0.0, [0]])
    calls: dict[str, Any] = {
        "count": lambda: layout.count(0, bad),
        "count of a rank": lambda: layout.count(bad_rank, 5),
        "owner": lambda: layout.owner(bad),
        "owner below 0": lambda: layout.owner(rng.choice([-1, -(2**70)])),
        "global_slots": lambda: layout.global_slots(0, bad),
        "global_slots of a rank": lambda: layout.global_slots(bad_rank, 0),
        "local_slots": lambda: layout.local_slots(0, 0, bad),
        "local_slots of a rank": lambda: layout.local_slots(bad_rank, 0, 5),
        "local_range": lambda: layout.local_range(0, bad, 7),
        "local_range of a rank": lambda: layout.local_range(bad_rank, 0, 5),
        "key_layout of a rank": lambda: layout.key_layout(bad_rank),
    }
    name = rng.choice(list(calls))
    outcome = attempt(calls[name])
    try:
        return outcome.refusal(_NAMES, (ValueError, TypeError))
    except AssertionError as error:
        what = bad_rank if name.endswith("rank") else bad
        raise AssertionError(f"{name} of {layout}, {what!r}: {error}") from error


def _wrong_layout(rng: Random) -> str:
    bad = rng.choice([0, -1, 0.5, 2.0, "2", None, [2], torch.tensor(1.5)])
    bounds = rng.choice([(), (0,), (1, 2), (0, 3, 2), (0, 1.5), (0, None), "01", 3, None, (0, -1)])
    shares = rng.choice(
        [(), (1,), (1, 2, 3), (0, 0), (-1, 2), (1, 1025), (1.0, 2), (True, 1), "auto", 3, {1: 2}]
    )
    makers: list[Any] = [
        lambda: BlockCyclic(bad),
        lambda: BlockCyclic(2, bad),
        lambda: BlockCyclic(2, 3, shares),
        lambda: Contiguous(bounds),
        lambda: ContiguousThenCyclic(bounds),
        lambda: ContiguousThenCyclic((0, 5), bad),
    ]
    outcome = attempt(rng.choice(makers))
    return outcome.refusal(_NAMES, (ValueError, TypeError))


KINDS: dict[str, tuple[float, Callable[[Random], str]]] = {
    "right": (2, _right),
    "call": (1, _wrong_call),
    "layout": (1, _wrong_layout),
}
