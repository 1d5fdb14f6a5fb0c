# SPDX-License-Identifier: BSD-3-Clause
"""Queries of one rank that are not the others': by a token, a row, a value, or rounding alone."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from helpers import make_strided
from tree_attention import Communicator, ExchangeError, reference

from .cases import DTYPES, Case
from .ops import call_decoder
from .outcome import AMPLE, Outcome, attempt
from .places import Place

# Up to 8 MiB in float32: digests of large prompts are where shortcuts are tempting.
_SHAPES = (
    (1, 2, 1, 8), (64, 8, 1, 64), (1, 1, 1, 256), (3, 4, 7, 24), (1, 8, 40, 64), (1, 8, 600, 64),
    (2, 2, 3000, 16), (1, 32, 512, 128), (1, 1, 9000, 128), (5, 3, 333, 80),
)  # fmt: skip
_OPS = ("tree_decode", "tree_decode", "ring_decode", "ring_pass_q_decode")
_RANKS = re.compile(r"(?:queries|query_positions) of ranks? ([\d, and]+)")
_AT_ONCE = 10.0  # seconds: all know of the error, so that nobody waits for a deadline
# Relative to each value, and thousands of times less than the least that tokens differ by.
_NOISE = 3e-7


@dataclass
class Prompt:
    """A decoder with the same queries on all ranks, and what one of them changes in its own."""

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]

    @staticmethod
    def draw(rng: Random, here: Place, *dtypes: torch.dtype) -> Prompt:
        torch.manual_seed(rng.getrandbits(31))
        batch, heads, seqlen, head_dim = shape = rng.choice(_SHAPES)
        q = make_strided(torch.randn(shape).to(rng.choice(dtypes)), rng.choice(["BHSD", "BSHD"]))
        heads_kv = heads if heads % 2 else heads // 2
        k, v = torch.randn(2, batch, heads_kv, 5 * here.world_size, head_dim).to(q.dtype)
        options: dict[str, Any] = {}
        if rng.random() < 0.4:
            options["alibi_slopes"] = torch.full((heads,), 0.25)
            options["query_positions"] = torch.arange(seqlen).expand(batch, -1).contiguous()
            options["key_layout"] = (here.rank * 5, 5, 5 * here.world_size)
        return Prompt(rng.choice(_OPS), q, k, v, options)

    def call(self, here: Place) -> Outcome:
        own = slice(5 * here.rank, 5 * here.rank + 5)
        tensors = {"q": self.q, "k": self.k[:, :, own], "v": self.v[:, :, own], "key_ranges": None}
        return attempt(call_decoder, self.op, tensors | self.options, group=here.comm)

    def with_another(self, what: str, rng: Random) -> Prompt:
        """A copy in which one token, one row of a head, one value or one position is another."""
        q, options = self.q.clone(), dict(self.options)
        b, h, i, d = (rng.randrange(size) for size in q.shape)
        if what == "position":
            positions = options["query_positions"].clone()
            positions[b, i] += rng.choice([-1, 1, 2**40])
            options["query_positions"] = positions
        elif what == "token":
            q[b, :, i] = torch.randn_like(q[b, :, i])
        elif what == "row":
            q[b, h, i] = torch.randn_like(q[b, h, i])
        else:
            q[b, h, i, d] += rng.choice([-1.0, 0.5, 3.0]) * float(self.q.abs().max())
        return replace(self, q=q, options=options)

    def with_noise(self, seed: int) -> Prompt:
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(-1, 2, self.q.shape, generator=generator)
        return replace(self, q=self.q * (1.0 + _NOISE * signs))

    def check(self, found: tuple[Tensor, Tensor]) -> None:
        """Within what noise moves: another token moves a result by half of its size."""
        options = dict(self.options)
        if options:
            options["key_layout"] = (0, 1, 1)
        expected = reference.attention(self.q, self.k, self.v, None, **options)
        for name, x, true in zip(("o", "lse"), found, expected, strict=True):
            error = (x.double() - true).abs().max().item()
            assert error < 1e-2, f"{name} is off by {error:.3g} in rounding noise"


def draw_what(rng: Random, prompt: Prompt) -> str:
    kinds = ["token", "row", "value", *(["position"] * 2 if prompt.options else [])]
    return rng.choice(kinds)


def refusal(outcome: Outcome, victim: int) -> str:
    """On every rank, at once, and naming the rank whose queries are not rank 0's."""
    text = outcome.refusal(("queries", "query_positions"), (ExchangeError,))
    named = {int(number) for found in _RANKS.findall(text) for number in re.findall(r"\d+", found)}
    # Where rank 0 is the one, all others have queries that are not rank 0's.
    assert victim in named or (victim == 0 and named), f"rank {victim} is not named: {text[:300]}"
    assert outcome.seconds < _AT_ONCE, f"{outcome.seconds} s until {text}"
    return type(outcome.error).__name__


def another_token(case: Case, here: Place) -> str:
    """Anywhere in a prompt of any size: every rank names the rank, and the next call works."""
    rng = case.rng
    prompt = Prompt.draw(rng, here, *DTYPES)
    what, victim = draw_what(rng, prompt), rng.randrange(here.world_size)
    if rng.random() < 0.5:
        prompt.call(here).result()  # what follows is a call in steady state
    other = prompt.with_another(what, rng) if here.rank == victim else prompt
    try:
        said = refusal(other.call(here), victim)
    except AssertionError as error:
        raise AssertionError(
            f"another {what} in {prompt.op}, q {tuple(prompt.q.shape)} {prompt.q.dtype}: {error}"
        ) from error
    prompt.call(here).result()
    here.probe()
    return said


@contextmanager
def warned() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def _of_rounding(caught: list[warnings.WarningMessage]) -> list[str]:
    ours = [w for w in caught if issubclass(w.category, RuntimeWarning)]
    return [str(w.message) for w in ours if "rounding" in str(w.message)]


def noise(case: Case, here: Place) -> str:
    """Rounding of several kinds of processors: a warning, once, and the right result. Another token
    beside it is an error, wherever it is."""
    rng = case.rng
    # Its own, as it compares no queries afterwards.
    there = replace(here, comm=Communicator(here.group, AMPLE))
    prompt = Prompt.draw(rng, there, torch.float32)
    noisy = [prompt.with_noise(rng.getrandbits(31)) for _ in range(here.world_size)][here.rank]
    if rng.random() < 0.5:
        prompt.call(there).result()
    with warned() as caught:
        if rng.random() < 0.7:
            what, victim = draw_what(rng, prompt), rng.randrange(here.world_size)
            other = noisy.with_another(what, rng) if here.rank == victim else noisy
            outcome = other.call(there)
            try:
                refusal(outcome, victim)
            except AssertionError as error:
                raise AssertionError(f"noise and another {what} in {prompt.op}: {error}") from error
            assert not _of_rounding(caught), "another token was taken for rounding"
        prompt.check(noisy.call(there).result())
        assert len(_of_rounding(caught)) == 1, f"it says of rounding: {_of_rounding(caught)}"
        prompt.check(noisy.call(there).result())
        assert len(_of_rounding(caught)) == 1, "it warns again and again"
    here.probe()
    return "right"


class _Stop(Exception):
    """What a user's own code raises in a warning, a hook or a handler."""


def _raise(*_: Any, **__: Any) -> None:
    raise _Stop("the caller's code")


def warning(case: Case, here: Place) -> str:
    """One rank turns warnings into errors: it alone raises, after the call, in which all were."""
    rng = case.rng
    there = replace(here, comm=Communicator(here.group, AMPLE))
    prompt = Prompt.draw(rng, there, torch.float32)
    noisy = [prompt.with_noise(rng.getrandbits(31)) for _ in range(here.world_size)][here.rank]
    victim, way = rng.randrange(here.world_size), rng.choice(["-W error", "showwarning"])
    with warned():
        if here.rank != victim:
            prompt.check(noisy.call(there).result())
        elif way == "-W error":
            warnings.simplefilter("error")
            outcome = noisy.call(there)
            assert isinstance(outcome.error, RuntimeWarning), f"{way}: {outcome}"
        else:
            with mock.patch.object(warnings, "showwarning", _raise):
                outcome = noisy.call(there)
            assert isinstance(outcome.error, _Stop), f"{way}: {outcome}"
    there.probe()
    prompt.check(noisy.call(there).result())
    here.probe()
    return "one raises"


KINDS: dict[str, tuple[float, Callable[[Case, Place], str]]] = {
    "another_token": (4, another_token),
    "noise": (1.5, noise),
    "warning": (0.7, warning),
}
