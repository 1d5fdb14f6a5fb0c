# SPDX-License-Identifier: BSD-3-Clause
"""Outputs that lie on inputs, on each other or on themselves: refused, or right all the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from helpers import make_problem
from tree_attention import append_kv, lean_decode, merge_states, reference

from . import model
from .outcome import attempt

_ALIGNMENT = 16


class Arena:
    """One piece of memory in which tensors are views, wherever a case wants them."""

    def __init__(self, *, is_dense: bool) -> None:
        self._is_dense = is_dense
        self.memory = torch.zeros(1 << 18, dtype=torch.uint8)
        self._end = 0

    def place(self, x: Tensor, rng: Random, at: int | None = None, fold: bool = False) -> Tensor:
        """A copy of `x` with gaps between rows, behind all others or at a byte.

        `fold`: its rows lie on each other.
        """
        *outer, last = x.shape
        gap = 0 if self._is_dense else rng.choice([0, 0, 4, 16, last])
        strides, step = [1], max(1, last // 2) if fold else last + gap
        for size in reversed(outer):
            strides.insert(0, step)
            step *= size
        if x.dim() == 4 and not self._is_dense and rng.random() < 0.3:  # tokens before heads
            _, heads, tokens, _ = x.shape
            strides[1:3] = [strides[2], strides[2] * heads]
            strides[0] = strides[2] * tokens
        begin = self._end if at is None else at
        begin -= begin % _ALIGNMENT
        view = self.memory.view(x.dtype).as_strided(x.shape, strides, begin // x.itemsize)
        view.copy_(x)
        self._end = max(self._end, begin + x.itemsize * (step + last) + _ALIGNMENT)
        return view


def _bytes(x: Tensor) -> tuple[int, int]:
    begin = x.storage_offset() * x.itemsize
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (reach + 1) * x.itemsize


def _laid_out(
    rng: Random, inputs: dict[str, Tensor], outputs: dict[str, Tensor], *, is_dense: bool = False
) -> tuple[Arena, dict[str, Tensor], str]:
    """All of them as views of one memory, of which an output overlaps something, or nothing."""
    arena = Arena(is_dense=is_dense)
    output = rng.choice(list(outputs))
    other = rng.choice(["nothing", output, *inputs, *(name for name in outputs if name != output)])
    views = {
        name: arena.place(x, rng)
        for name, x in (inputs | outputs).items()
        if name != output or other == "nothing"
    }
    if other == output:
        views[output] = arena.place(outputs[output], rng, fold=True)
    elif other != "nothing":
        begin, end = _bytes(views[other])
        kept = arena.memory.clone()
        views[output] = arena.place(outputs[output], rng, at=rng.randrange(begin, end))
        if other in inputs:  # which are what they were: outputs need no content
            arena.memory.copy_(kept)
    return arena, views, f"{output} on {other}"


def _check(
    how: str, arena: Arena, names: tuple[str, ...], call: Callable[[], Any],
    check: Callable[[], None],
) -> str:  # fmt: skip
    before = arena.memory.clone()
    outcome = attempt(call)
    try:
        if outcome.error is None:
            check()
            return f"{how}: right"
        assert not how.endswith("nothing"), f"a right call was refused: {outcome.error}"
        outcome.refusal(names, (ValueError,))
        assert torch.equal(arena.memory, before), "it was refused, and something was written"
    except AssertionError as error:
        raise AssertionError(f"{names[0]}, {how}: {error}") from error
    return f"{how}: refused"


def decode(rng: Random) -> str:
    torch.manual_seed(rng.getrandbits(31))
    problem = make_problem(
        batch=rng.choice([1, 2]), seqlen_q=rng.choice([1, 3]), seqlen_k=rng.choice([5, 40]),
        head_dim=16, head_dim_v=rng.choice([8, 16]), ranges=rng.choice(["causal", "random"]),
        page_size=rng.choice([0, 16]), alibi=rng.choice([0.0, 0.5]),
    )  # fmt: skip
    tensors = {name: x for name, x in problem.options.items() if isinstance(x, Tensor)}
    numbers = {name: x for name, x in problem.options.items() if not isinstance(x, Tensor)}
    inputs = {"q": problem.q, "k": problem.k, "v": problem.v, **tensors}
    if problem.key_ranges is not None:
        inputs["key_ranges"] = problem.key_ranges
    o = torch.zeros(*problem.q.shape[:3], problem.v.shape[3], dtype=problem.q.dtype)
    outputs = {"o": o, "lse": torch.zeros(problem.q.shape[:3])}
    arena, views, how = _laid_out(rng, inputs, outputs)
    expected = model.attention(problem)  # of the inputs as they were

    def call() -> Any:
        given = {name: views[name] for name in tensors}
        return lean_decode(
            views["q"], views["k"], views["v"], views.get("key_ranges"), **given, **numbers,
            out=(views["o"], views["lse"]),
        )  # fmt: skip

    def check() -> None:
        found = views["o"], views["lse"]
        model.check_attention(found, expected, problem, problem.q.dtype)

    return _check(how, arena, ("lean_decode", "out"), call, check)


def merge(rng: Random) -> str:
    torch.manual_seed(rng.getrandbits(31))
    parts, shape = rng.choice([1, 2, 5]), (rng.choice([1, 2]), 3, rng.choice([1, 2]))
    inputs = {"o_parts": torch.randn(parts, *shape, 8), "lse_parts": torch.randn(parts, *shape)}
    outputs = {"o": torch.zeros(*shape, 8), "lse": torch.zeros(shape)}
    true_o, true_lse = reference.merge_states(*inputs.values())
    arena, views, how = _laid_out(rng, inputs, outputs, is_dense=True)  # all it takes

    def call() -> Any:
        out = views["o"], views["lse"]
        return merge_states(views["o_parts"], views["lse_parts"], out=out)

    def check() -> None:
        for name, true in (("o", true_o), ("lse", true_lse)):
            error = (views[name].double() - true).abs().max().item()
            assert error < 1e-5, f"{name} is off by {error:.3g}"

    return _check(how, arena, ("merge_states", "out"), call, check)


def append(rng: Random) -> str:
    torch.manual_seed(rng.getrandbits(31))
    batch, heads, tokens, slots = rng.choice([1, 2]), rng.choice([1, 2]), 3, 10
    widths = 8, rng.choice([4, 8])
    dtype = rng.choice([torch.float32, torch.bfloat16])
    kept = rng.choice([dtype, dtype, torch.int8, torch.float8_e4m3fn])
    k, v = (torch.randn(batch, heads, tokens, width).to(dtype) for width in widths)
    mapping = torch.stack([torch.randperm(slots)[:tokens] for _ in range(batch)])
    outputs = {
        name: torch.randint(0, 9, (batch, heads, slots, width)).to(kept)
        for name, width in zip(("k_cache", "v_cache"), widths, strict=True)
    }
    scales = ("k_scale", "v_scale") if kept != dtype else ()
    outputs |= {name: torch.rand(batch, heads, slots) for name in scales}
    arena, views, how = _laid_out(rng, {"k": k, "v": v, "slot_mapping": mapping}, outputs)
    expected = {name: views[name].clone(memory_format=torch.contiguous_format) for name in outputs}

    def call_on(caches: dict[str, Tensor], k: Tensor, v: Tensor, mapping: Tensor) -> None:
        given = {name: caches[name] for name in scales}
        append_kv(k, v, caches["k_cache"], caches["v_cache"], mapping, **given)

    call_on(expected, k, v, mapping)

    def call() -> None:
        call_on(views, views["k"], views["v"], views["slot_mapping"])

    def check() -> None:
        for name, x in expected.items():
            as_bytes = [y.contiguous().view(torch.uint8) for y in (views[name], x)]
            wrong = (as_bytes[0] != as_bytes[1]).sum().item()
            assert wrong == 0, f"{name} is wrong in {wrong} of {math.prod(as_bytes[0].shape)} bytes"

    return _check(how, arena, ("append_kv",), call, check)


def play(rng: Random) -> str:
    return rng.choice([decode, merge, append])(rng)
