# SPDX-License-Identifier: BSD-3-Clause
"""The local operators, and in a world of one those of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from helpers import Problem
from tree_attention import (
    Communicator,
    all_merge_states,
    lean_decode,
    lean_schedule,
    merge_states,
    reference,
    ring_decode,
    ring_pass_q_decode,
    tree_decode,
)

from . import model, overlaps, spoils
from .cases import DTYPES, SURROUNDINGS, Case, draw_problem, surroundings
from .outcome import OF_ARGUMENTS, attempt, check_error

DECODERS: dict[str, Callable[..., Any]] = {
    "lean_decode": lean_decode,
    "tree_decode": tree_decode,
    "ring_decode": ring_decode,
    "ring_pass_q_decode": ring_pass_q_decode,
}


def world_size(case: Case) -> int:
    return 1


def play(case: Case, rank: int) -> str:
    return case.draw(KINDS)(case.rng)


def decode_arguments(problem: Problem) -> spoils.Arguments:
    tensors = {"q": problem.q, "k": problem.k, "v": problem.v, "key_ranges": problem.key_ranges}
    return (
        dict.fromkeys(("page_table", "alibi_slopes", "query_positions"))
        | tensors
        | (problem.options)
    )


def call_decoder(op: str, arguments: spoils.Arguments, **more: Any) -> Any:
    options = dict(arguments)
    tensors = [options.pop(name) for name in ("q", "k", "v", "key_ranges")]
    return DECODERS[op](*tensors, **options, **more)


def _decode(rng: Random) -> str:
    op = rng.choice(["lean_decode", *DECODERS])
    problem = draw_problem(rng)
    arguments = decode_arguments(problem)
    out_dtype = rng.choice([None, *DTYPES]) if op in ("lean_decode", "tree_decode") else None
    more: dict[str, Any] = {} if out_dtype is None else {"out_dtype": out_dtype}
    around = rng.choice(SURROUNDINGS)
    wrong = rng.random() < 0.5
    into = op == "lean_decode" and rng.random() < 0.3
    spoil = None
    if wrong:
        table = spoils.DECODE + (spoils.OUT_DTYPE if op == "lean_decode" else [])
        if op == "tree_decode":
            table = table + spoils.TREE
        spoil = spoils.draw(rng, table, arguments)
        more, out_dtype = {}, None
    if into:
        shape = (*problem.q.shape[:3], problem.v.shape[3])
        more["out"] = _outputs(shape, out_dtype or problem.q.dtype, rng)
    with surroundings(around):
        if spoil is not None and not is_right(spoil, around):
            outcome = attempt(call_decoder, op, spoil.apply(arguments), **more)
            return f"{spoil}: {outcome.refusal((op, 'lean_decode', spoil.argument), spoil.errors)}"
        arguments = arguments if spoil is None else spoil.apply(arguments)
        found = attempt(call_decoder, op, arguments, **more).result()
    model.check_attention(found, model.attention(problem), problem, out_dtype or problem.q.dtype)
    assert not into or found is more["out"]
    return model.bits(*found)


def is_right(spoil: spoils.Spoil, around: str) -> bool:
    """Whether it spoils nothing there."""
    return spoil.what == "gradient" and around in ("inference", "grad off")


def _outputs(shape: tuple[int, ...], dtype: torch.dtype, rng: Random) -> tuple[Tensor, Tensor]:
    """Views with gaps, full of NaN."""
    gap = rng.choice([0, 3])
    o = torch.full((*shape[:3], shape[3] + gap), torch.nan, dtype=dtype)[..., : shape[3]]
    return o, torch.full((*shape[:2], shape[2] + gap), torch.nan)[..., : shape[2]]


def draw_states(rng: Random, n: int) -> tuple[Tensor, Tensor]:
    """`n` partial states, some rows empty with an `o` that is NaN, some with a huge lse."""
    torch.manual_seed(rng.getrandbits(31))
    batch, heads, queries = rng.choice([0, 1, 2]), rng.choice([1, 2, 5]), rng.choice([1, 1, 3])
    head_dim = rng.choice([1, 3, 64])
    lse = torch.randn(n, batch, heads, queries) * rng.choice([1.0, 10.0, 1e30])
    o = torch.randn(n, batch, heads, queries, head_dim)
    empty = torch.rand(lse.shape) < rng.choice([0.0, 0.5, 1.0])
    lse[empty], o[empty] = -torch.inf, torch.nan
    return o, lse


def check_merged(
    found: tuple[Tensor, Tensor], parts: tuple[Tensor, Tensor], *dtypes: torch.dtype
) -> None:
    """`dtypes`: all that the `o` went through."""
    (o, lse), (true_o, true_lse) = found, reference.merge_states(*parts)
    assert o.shape == true_o.shape and lse.shape == true_lse.shape
    coarse = max(torch.finfo(dtype).eps for dtype in dtypes)
    size = torch.nan_to_num(parts[0].double(), 0.0).abs().amax((0, -1), keepdim=True)[0]
    limit = 8 * coarse * size.expand_as(true_o)
    assert ((o.double() - true_o).abs() <= limit).all(), f"o is off: {o} for {true_o}"
    same = lse.double() == true_lse
    limit = 8 * torch.finfo(torch.float32).eps * true_lse.abs().clamp(min=1)
    assert (same | ((lse.double() - true_lse).abs() <= limit)).all(), f"lse is off: {lse}"


def _merge(rng: Random) -> str:
    op = rng.choice(["merge_states", "all_merge_states"])
    n = rng.choice([1, 2, 3, 5, 8]) if op == "merge_states" else 1
    o, lse = draw_states(rng, n)
    dtype, out_dtype = rng.choice(DTYPES), rng.choice(DTYPES)
    o = o.to(dtype)
    if rng.random() < 0.3:
        o, lse = o.transpose(2, 3).contiguous().transpose(2, 3), lse.mT.contiguous().mT
    arguments = {"o": o, "lse": lse} if op == "merge_states" else {"o": o[0], "lse": lse[0]}

    def call(o: Any, lse: Any, **options: Any) -> Any:
        function = merge_states if op == "merge_states" else all_merge_states
        return function(o, lse, **options)

    wrong = rng.random() < 0.5
    table = spoils.STATES + spoils.OUT_DTYPE
    if op == "all_merge_states":
        table = table + spoils.TREE
    spoil = spoils.draw(rng, table, arguments)
    around = rng.choice(SURROUNDINGS)
    with surroundings(around):
        if wrong and not is_right(spoil, around):
            outcome = attempt(call, **spoil.apply(arguments))
            return f"{spoil}: {outcome.refusal((op, 'merge_states', spoil.argument), spoil.errors)}"
        found = attempt(call, **arguments, out_dtype=out_dtype).result()
    assert found[0].dtype == out_dtype
    check_merged(found, (o, lse), dtype, out_dtype)
    return model.bits(*found)


def _reduce(rng: Random) -> str:
    x = torch.randn(rng.choice([0, 1, 7]), 3).to(rng.choice([*DTYPES, torch.float64]))
    comm = Communicator()
    wrong = rng.random() < 0.5
    spoil = spoils.draw(rng, spoils.SUMS, {"x": x, "payload_dtype": None})
    around = rng.choice(SURROUNDINGS)
    with surroundings(around):
        if not wrong or is_right(spoil, around):
            found = attempt(comm.all_reduce, x).result()
            assert torch.equal(found, x) and found is not x
            return model.bits(found)
        outcome = attempt(comm.all_reduce, **spoil.apply({"x": x}))
    if outcome.error is not None:
        check_error(outcome.error, ("all_reduce", spoil.argument), spoil.errors)
    # A world of one returns its own part, wherever it is; there it is the right result.
    assert outcome.error is not None or spoil.what in ("sparse", "on meta"), f"accepted {spoil}"
    return f"{spoil}: {outcome.error}"


def _schedule(rng: Random) -> str:
    num_tiles = [rng.choice([0, 1, 2, 30]) for _ in range(rng.randrange(6))]
    num_workers = rng.choice([1, 2, 7, 100])
    tiles = torch.tensor(num_tiles, dtype=torch.int32)
    wrong: list[tuple[Any, Any]] = [
        (tiles.long(), 1), (tiles.float(), 1), (tiles, 0), (tiles, -1), (tiles, "1"), (tiles, 1.5),
        (tiles[None], 1), (num_tiles, 1), (None, 1), (tiles - 31, 1) if num_tiles else (tiles, 0),
        (tiles, None), (tiles, 2**70),
    ]  # fmt: skip
    if rng.random() < 0.5:
        outcome = attempt(lean_schedule, *rng.choice(wrong))
        return outcome.refusal(("lean_schedule",), OF_ARGUMENTS)
    with surroundings(rng.choice(SURROUNDINGS)):
        table = attempt(lean_schedule, tiles, num_workers).result().tolist()
    walked = [(output, tile) for _, output, a, b in table for tile in range(a, b)]
    assert walked == [(output, tile) for output, n in enumerate(num_tiles) for tile in range(n)]
    loads = [sum(b - a for w, _, a, b in table if w == worker) for worker in range(num_workers)]
    assert max(loads) - min(loads) <= 1 and [row[0] for row in table] == sorted(
        row[0] for row in table
    )
    return str(table)


def _tensors_elsewhere(rng: Random) -> str:
    """On the meta device there is nothing to compute: shapes and dtypes are the whole result."""
    op = rng.choice(["lean_decode", "tree_decode"])
    problem = draw_problem(rng).to(torch.device("cpu"))
    arguments = {
        name: x.to("meta") if isinstance(x, Tensor) else x
        for name, x in decode_arguments(problem).items()
    }
    o, lse = attempt(call_decoder, op, arguments).result()
    assert o.shape == (*problem.q.shape[:3], problem.v.shape[3]) and o.dtype == problem.q.dtype
    assert lse.shape == problem.q.shape[:3] and {o.device.type, lse.device.type} == {"meta"}
    return "on meta"


KINDS: dict[str, tuple[float, Callable[[Random], str]]] = {
    "decode": (4, _decode),
    "merge": (2, _merge),
    "reduce": (1, _reduce),
    "schedule": (1, _schedule),
    "meta": (1, _tensors_elsewhere),
    "overlap": (2, overlaps.play),
}
