# SPDX-License-Identifier: BSD-3-Clause
"""What all parts draw their cases from: a case's own generator, problems, layouts, surroundings."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any, TypeVar

import torch

from helpers import Problem, make_problem, make_strided, paginate
from tree_attention import BlockCyclic, Contiguous, ContiguousThenCyclic, ShardLayout

T = TypeVar("T")

DRAWN: Counter[str] = Counter()  # by part and kind, in this process

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def made_once(make: Callable[..., T]) -> Callable[..., T]:
    """`functools.cache` by what arguments mean, however they are written, and in the main thread.

    Weights are drawn from torch's generator, and in transformers' default dtype, which all threads
    share: two that make a model at once make two wrong ones. What threads need is made before.
    """
    made: dict[tuple[Any, ...], T] = {}
    signature = inspect.signature(make)

    @functools.wraps(make)
    def get(*args: Any, **options: Any) -> T:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        key = tuple(bound.arguments.values())
        if key not in made:
            is_main = threading.current_thread() is threading.main_thread()
            assert is_main, f"{make.__name__}{key} must be made before threads begin"
            made[key] = make(*key)
        return made[key]

    return get


@dataclass(frozen=True)
class Case:
    """Everything about it follows from these."""

    part: str
    seed: int
    index: int
    kind: str = ""  # one of the part's, or whichever is drawn

    @cached_property
    def rng(self) -> Random:
        """Ranks must draw from it alike, also where a rank does not need what is drawn."""
        return Random(f"{self.part} {self.seed} {self.index}")

    def rng_of(self, rank: int) -> Random:
        """For what ranks need not have in common."""
        return Random(f"rank {rank} of {self.part} {self.seed} {self.index}")

    @property
    def first(self) -> Random:
        """The generator at its beginning, for what is asked before the case is played."""
        return Random(f"first of {self.part} {self.seed} {self.index}")

    def draw(self, kinds: Mapping[str, tuple[float, T]]) -> T:
        """One of some things with weights, or that of the case's kind."""
        drawn = self.rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
        kind = self.kind or drawn
        DRAWN[f"{self.part} {kind}"] += 1
        return kinds[kind][1]

    def __str__(self) -> str:
        kind = f" --kind {self.kind}" if self.kind else ""
        return f"--only {self.part}{kind} --seed {self.seed} --case {self.index}"


def draw_problem(rng: Random, *, whole: bool = False) -> Problem:
    """A right problem: among them such without sequences, queries or keys, and with one key.

    `whole`: it is to be sharded, so local keys have no pages and stand at their own positions.
    """
    torch.manual_seed(rng.getrandbits(31))
    seqlen_k = rng.choice([0, 1, 2, 63, 64, 65, rng.randrange(1, 200)])
    head_dim = rng.choice([1, 3, 8, 24, 64, 80])
    return make_problem(
        batch=rng.choice([0, 1, 1, 2, 3]),
        num_heads_kv=rng.choice([1, 2, 3]),
        group_size=rng.choice([1, 2, 4]),
        seqlen_q=rng.choice([0, 1, 1, 1, 2, 5]),
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=rng.choice([head_dim, head_dim, 1, 16]),
        dtype=rng.choice(DTYPES),
        ranges=rng.choice(["all", "ragged", "left padded", "causal", "window", "random"]),
        layout=rng.choice(["BHSD", "BSHD", "padded", "unaligned"]),
        page_size=rng.choice([0, 1, 16]) if seqlen_k and not whole else 0,
        per_head=rng.random() < 0.5,
        alibi=rng.choice([0.0, 0.0, 0.5]),
        key_layout=(0, 1, 1) if whole else (3, 16, 48),
        score_size=rng.choice([0.0, 1.0, 30.0, 1000.0]),
        softcap=rng.choice([0.0, 0.0, 3.0]),
        softmax_scale=rng.choice([None, None, 0.2, -0.2, 0.0]),
        num_workers=rng.choice([0, 0, 1, 7]),
    )


def draw_shares(rng: Random, world_size: int) -> tuple[int, ...] | None:
    """Shares of ranks, some of which may have none; or equal ones, as None."""
    if rng.random() < 0.5:
        return None
    shares = [rng.choice([0, 1, 1, 2, 3, 7]) for _ in range(world_size)]
    shares[rng.randrange(world_size)] += 1
    return tuple(shares)


def draw_layout(rng: Random, world_size: int, length: int) -> ShardLayout:
    """A layout with room for `length` slots."""
    bounds = [0, *sorted(rng.randint(0, length) for _ in range(world_size - 1)), length]
    return rng.choice(
        [
            BlockCyclic(world_size, rng.choice([1, 3, 16, 64]), draw_shares(rng, world_size)),
            Contiguous(tuple(bounds)),
            ContiguousThenCyclic(tuple(b // 2 for b in bounds), rng.choice([1, 4])),
        ]
    )


def shard(problem: Problem, layout: ShardLayout, rank: int, rng: Random) -> Problem:
    """What `rank` holds, in strides and pages of its own."""
    local = problem.shard(layout, rank)
    count = local.k.shape[2]
    page_size = rng.choice([0, 0, 1, 16])
    if page_size and count:
        if local.key_ranges is None:
            batch, _, seqlen_q, _ = problem.q.shape
            local.key_ranges = torch.tensor([0, count]).int().repeat(batch, seqlen_q, 1)
        # The tail of the last page is no key.
        local.key_ranges = local.key_ranges.clamp(max=count)
        local.k, local.v, table = paginate(local.k, local.v, page_size, per_head=rng.random() < 0.5)
        local.options["page_table"] = table
    strides = rng.choice(["BHSD", "BSHD", "padded", "unaligned"])
    local.k, local.v = make_strided(local.k, strides), make_strided(local.v, strides)
    return local


SURROUNDINGS = ("plain", "meta", "double", "half", "inference", "deterministic", "grad off")


@contextmanager
def surroundings(kind: str) -> Iterator[None]:
    """What a program may have set, and what must not change a result."""
    with ExitStack() as stack:
        if kind == "meta":
            stack.enter_context(torch.device("meta"))
        elif kind in ("double", "half"):
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64 if kind == "double" else torch.float16)
        elif kind == "inference":
            stack.enter_context(torch.inference_mode())
        elif kind == "deterministic":
            stack.callback(torch.use_deterministic_algorithms, False)
            torch.use_deterministic_algorithms(True)
        elif kind == "grad off":
            stack.enter_context(torch.no_grad())
        yield
