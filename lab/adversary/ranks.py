# SPDX-License-Identifier: BSD-3-Clause
"""What ranks do together: the same call, and calls with which one of them is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from helpers import Problem
from tree_attention import (
    Communicator,
    ContiguousThenCyclic,
    all_merge_states,
    strategies,
    tree_decode,
)

from . import changes, engines, mistakes, model, queries, scalars
from .cases import DTYPES, SURROUNDINGS, Case, draw_layout, draw_problem, shard, surroundings
from .ops import call_decoder, check_merged, decode_arguments, draw_states
from .outcome import AMPLE, Outcome, attempt
from .places import Place, place

PAYLOADS = (torch.float32, torch.float32, torch.bfloat16)


def world_size(case: Case) -> int:
    size = case.first.choice([1, 2, 2, 3])
    return 2 if case.kind in KINDS_OF_SEVERAL and size == 1 else size


def play(case: Case, rank: int) -> str:
    size = world_size(case)
    kinds = KINDS | KINDS_OF_SEVERAL if size > 1 else KINDS
    return case.draw(kinds)(case, place(size, rank))


def _tree_options(rng: Random) -> dict[str, Any]:
    names = [name for name in strategies() if name != "one_shot"]  # which needs GPUs
    return {
        "strategy": rng.choice(["auto", *names]),
        "payload_dtype": rng.choice(PAYLOADS),
        "head_sharded": rng.random() < 0.2,
        "out_dtype": rng.choice([None, *DTYPES]),
    }


def _decode(case: Case, here: Place) -> str:
    rng, own_rng = case.rng, case.rng_of(here.rank)
    op = rng.choice(["tree_decode", "tree_decode", "ring_decode", "ring_pass_q_decode"])
    problem = draw_problem(rng, whole=True)
    layout = draw_layout(rng, here.world_size, problem.k.shape[2])
    if isinstance(layout, ContiguousThenCyclic) and "alibi_slopes" in problem.options:
        layout = layout.cyclic
    local = shard(problem, layout, here.rank, own_rng)
    # Workers are a rank's own, and which calls before this one left the group in what state.
    local.options["num_workers"] = own_rng.choice([0, 1, 3])
    more: dict[str, Any] = {}
    if op == "tree_decode":
        more = _tree_options(rng)
    group = rng.choice([here.comm, here.comm, here.group, "new", None])
    with surroundings(rng.choice(SURROUNDINGS)):
        if group == "new":
            group = Communicator(here.group, AMPLE)
        outcome = attempt(call_decoder, op, decode_arguments(local), group=group, **more)
    if _is_asked_too_much(outcome):
        return str(outcome.error)
    o, lse = outcome.result()
    expected = model.attention(problem)
    sharded = more.get("head_sharded", False) and here.world_size > 1
    if sharded:
        parts = [x.tensor_split(here.world_size, dim=1)[here.rank] for x in expected]
        expected = parts[0], parts[1]
    out_dtype = more.get("out_dtype") or problem.q.dtype
    payload = more.get("payload_dtype", torch.float32)
    model.check_attention((o, lse), expected, problem, out_dtype, payload)
    return "each has its heads" if sharded else model.bits(o, lse)


def _is_asked_too_much(outcome: Outcome) -> bool:
    """Some strategies cannot do what some options ask for, and say so before they send."""
    return isinstance(outcome.error, ValueError) and "with payload_dtype" in str(outcome.error)


def _sums(case: Case, here: Place) -> str:
    rng = case.rng
    torch.manual_seed(rng.getrandbits(31))
    shape = rng.choice([(), (0,), (1,), (5, 7), (3, 30_000)])
    parts = torch.randn(here.world_size, *shape).to(rng.choice(DTYPES)).unbind()
    payload = rng.choice([None, *PAYLOADS])
    x = parts[here.rank]
    if len(shape) == 2 and rng.random() < 0.5:
        x = x.mT.contiguous().mT
    with surroundings(rng.choice(SURROUNDINGS)):
        found = attempt(here.comm.all_reduce, x, payload_dtype=payload).result()
    default = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    expected = x if here.world_size == 1 else model.all_reduce(parts, payload or default)
    assert torch.equal(found, expected), f"{x.dtype} {payload}: {found} for {expected}"
    return model.bits(found)


def _gathers(case: Case, here: Place) -> str:
    rng = case.rng
    torch.manual_seed(rng.getrandbits(31))
    counts = [rng.choice([0, 1, 3, rng.choice([3, 30_000])]) for _ in range(here.world_size)]
    dim = rng.choice([-1, 0, 1])
    shape = [2, 3]
    shape[dim] = sum(counts)
    dtype = rng.choice([*DTYPES, torch.int64, torch.bool])
    parts = (torch.randn(shape) * 9).to(dtype).split(counts, dim)
    x = parts[here.rank]
    if rng.random() < 0.5:
        x = x.mT.contiguous().mT
    with surroundings(rng.choice(SURROUNDINGS)):
        found = attempt(here.comm.all_gather, x, counts, dim).result()
    assert torch.equal(found, torch.cat(parts, dim)), f"{dtype} {counts} in dim {dim}"
    return model.bits(found)


def _states(case: Case, here: Place) -> str:
    """By the function and by the method."""
    rng = case.rng
    o, lse = draw_states(rng, here.world_size)
    o = o.to(rng.choice(DTYPES))
    options = _tree_options(rng) | {"head_sharded": False}
    own: tuple[Tensor, Tensor] = (o[here.rank], lse[here.rank])
    with surroundings(rng.choice(SURROUNDINGS)):
        if rng.random() < 0.4:
            outcome = attempt(here.comm.all_merge_states, *own, **options)
        else:
            outcome = attempt(all_merge_states, *own, group=here.comm, **options)
    if _is_asked_too_much(outcome):
        return str(outcome.error)
    found = outcome.result()
    dtypes = (own[0].dtype, options["payload_dtype"], found[0].dtype)
    assert found[0].dtype == (options["out_dtype"] or own[0].dtype)
    check_merged(found, (o, lse), *dtypes)
    return model.bits(*found)


def _compiled(case: Case, here: Place) -> str:
    """In one graph, without a break: the same bits as without a compiler."""
    rng = case.rng
    torch.manual_seed(rng.getrandbits(31))
    batch, length = rng.choice([1, 2]), rng.choice([5, 20])
    problem = Problem(torch.randn(batch, 4, 1, 8), *torch.randn(2, batch, 2, length, 8))
    local = problem.shard(draw_layout(rng, here.world_size, length), here.rank)
    options = _tree_options(rng) | {"payload_dtype": torch.float32, "head_sharded": False}
    options |= {"group": rng.choice([here.comm, None])}
    options["timeout"] = rng.choice([None, AMPLE])  # a graph holds no timedelta

    def decode(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        o, lse = tree_decode(q * 2.0, k, v, **options)
        return o, lse, here.comm.all_reduce(lse + 1.0)

    torch.compiler.reset()
    backend = rng.choice(["eager", "aot_eager"])
    compiled = torch.compile(decode, backend=backend, fullgraph=True)
    with torch.no_grad():
        found = attempt(compiled, local.q, local.k, local.v).result()
        expected = attempt(decode, local.q, local.k, local.v).result()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    doubled = replace(problem, q=problem.q * 2.0)
    model.check_attention(
        found[:2], model.attention(doubled), doubled, options["out_dtype"] or torch.float32
    )
    return model.bits(*found)


KINDS: dict[str, tuple[float, Callable[[Case, Place], str]]] = {
    "decode": (12, _decode),
    "sums": (3, _sums),
    "gathers": (2, _gathers),
    "states": (4, _states),
    "wrong_decode": (6, partial(mistakes.wrong, mistakes.DECODERS)),
    "wrong_reduction": (3, partial(mistakes.wrong, mistakes.REDUCTIONS)),
    "timeout": (4, mistakes.wrong_timeout),
    "fork": (1, mistakes.fork),
    "compiled": (0.4, _compiled),
    "scalars": (3, scalars.play),
}
KINDS_OF_SEVERAL: dict[str, tuple[float, Callable[[Case, Place], str]]] = {
    "differ": (6, mistakes.differ),
    "one_is_wrong": (1, mistakes.one_is_wrong),
    "garbage": (2, mistakes.garbage),
    **changes.KINDS,
    **queries.KINDS,
    **engines.KINDS,
}
