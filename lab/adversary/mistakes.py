# SPDX-License-Identifier: BSD-3-Clause
"""What may go wrong between ranks: arguments of all or of one, the store, a fork."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tree_attention import Communicator, ExchangeError, all_merge_states

from . import spoils
from .cases import SURROUNDINGS, Case, draw_problem, surroundings
from .ops import call_decoder, decode_arguments, is_right
from .outcome import AMPLE, SHORT, Outcome, attempt
from .places import Place, leave

# A rank whose error all know of does not wait for its deadline.
_AT_ONCE = 5.0


DECODERS = ("tree_decode", "ring_decode", "ring_pass_q_decode")
REDUCTIONS = ("all_merge_states", "all_reduce")


def _draw_call(
    rng: Random, ops: Sequence[str] = DECODERS + REDUCTIONS
) -> tuple[str, spoils.Arguments, list[spoils.Spoil]]:
    """An operator, arguments that are right, and how they may be made wrong."""
    op = rng.choice(ops)
    if op == "all_reduce":
        return op, {"x": torch.ones(2, 3)}, spoils.SUMS
    if op == "all_merge_states":
        arguments = {"o": torch.ones(1, 2, 1, 8), "lse": torch.zeros(1, 2, 1)}
        return op, arguments, spoils.STATES + spoils.TREE
    problem = draw_problem(rng)
    table = spoils.DECODE + (spoils.TREE if op == "tree_decode" else [])
    return op, decode_arguments(problem), table


def _call(op: str, arguments: spoils.Arguments, here: Place, **more: Any) -> Outcome:
    options = {"group": here.comm} | arguments | more
    if op == "all_reduce":
        del options["group"]
        return attempt(here.comm.all_reduce, **options)
    if op == "all_merge_states":
        return attempt(all_merge_states, **options)
    timeout = {"timeout": options.pop("timeout")} if "timeout" in options else {}
    return attempt(call_decoder, op, options, **timeout)


def wrong(ops: Sequence[str], case: Case, here: Place) -> str:
    """All ranks are wrong in the same way: each says so, and nothing was sent."""
    rng = case.rng
    op, arguments, table = _draw_call(rng, ops)
    spoil = spoils.draw(rng, table, arguments)
    around = rng.choice(["plain", "plain", *SURROUNDINGS])
    if is_right(spoil, around):
        around = "plain"
    with surroundings(around):
        outcome = _call(op, spoil.apply(arguments), here)
    if op == "all_reduce" and here.world_size == 1 and outcome.error is None:
        return "a world of one returns its own part"
    try:
        text = outcome.refusal((op, "lean_decode", "tree_attention", spoil.argument))
        assert outcome.seconds < _AT_ONCE, f"{outcome.seconds} s until {text}"
        here.probe()
    except AssertionError as error:
        raise AssertionError(f"{op}, {spoil}: {error}") from error
    return type(outcome.error).__name__


def wrong_timeout(case: Case, here: Place) -> str:
    rng = case.rng
    op, arguments, _ = _draw_call(rng)
    spoil = rng.choice(spoils.TIMEOUTS + spoils.ODD_TIMEOUTS + spoils.RIGHT_TIMEOUTS)
    timeout = spoil.value(arguments)
    if rng.random() < 0.3:
        op = "Communicator"
        with_timeout = attempt(Communicator, here.group, timeout)
        if with_timeout.error is None:
            there = replace(here, comm=with_timeout.value)
            with_timeout = _call("all_reduce", {"x": torch.ones(2)}, there)
        outcome = with_timeout
    else:
        outcome = _call(op, arguments | {"timeout": timeout}, here)
    may_be_right = spoil in spoils.ODD_TIMEOUTS or here.world_size == 1
    if spoil in spoils.RIGHT_TIMEOUTS:
        outcome.result()
    elif outcome.error is not None or not may_be_right:
        try:
            outcome.refusal(("timeout",), (ValueError, TypeError))
        except AssertionError as error:
            raise AssertionError(f"{op}, {spoil}: {error}") from error
    here.probe()
    return type(outcome.error).__name__


# What one rank has unlike the others, on the way to a call that each of them could do alone.
_DIFFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "softcap": ("tree_decode", {"softcap": 2.0}),
    "softmax_scale": ("ring_decode", {"softmax_scale": 0.3}),
    "alibi_slopes": ("tree_decode", {"alibi_slopes": torch.tensor([0.5, 0.25])}),
    "alibi_slopes of a ring": ("ring_decode", {"alibi_slopes": torch.tensor([0.5, 0.25])}),
    "no alibi_slopes": ("tree_decode", {"alibi_slopes": None}),
    "out_dtype": ("tree_decode", {"out_dtype": torch.float16}),
    "strategy": ("tree_decode", {"strategy": "three_allreduce"}),
    "payload_dtype": ("tree_decode", {"payload_dtype": torch.bfloat16}),
    "head_sharded": ("tree_decode", {"head_sharded": True}),
    "seqlen_q": ("tree_decode", {"q": torch.ones(2, 2, 3, 8)}),
    "a query more in a ring": ("ring_pass_q_decode", {"q": torch.ones(2, 2, 3, 8)}),
    "heads of q": ("tree_decode", {"q": torch.ones(2, 4, 1, 8)}),
    "heads of v": ("ring_decode", {"k": torch.ones(2, 1, 4, 8), "v": torch.ones(2, 1, 4, 8)}),
    "head_dim of v": ("tree_decode", {"v": torch.ones(2, 2, 4, 5)}),
    "call": ("ring_decode", {}),
}


def differ(case: Case, here: Place) -> str:
    """Every rank says which rank differs in what; nothing was sent, and the next call works."""
    rng = case.rng
    name = rng.choice(list(_DIFFERENCES))
    op, changes = _DIFFERENCES[name]
    victim = rng.randrange(here.world_size)
    k = torch.randn(2, 2, 4, 8)
    arguments: spoils.Arguments = {"q": torch.ones(2, 2, 1, 8), "k": k, "v": k}
    if "alibi" in name:
        positions = torch.full((2, 1), 9)
        slopes = torch.tensor([0.5, 0.5])
        arguments |= {"alibi_slopes": slopes, "query_positions": positions}
    if here.rank == victim:
        arguments |= changes
        if "q" in changes and "alibi" not in name:
            arguments.pop("query_positions", None)
    elif name == "call":
        op = "tree_decode"
    filled = dict.fromkeys(("key_ranges",)) | arguments
    outcome = _call(op, filled, here)
    try:
        text = outcome.refusal(("on rank", "abandoned"), (ExchangeError,))
    except AssertionError as error:
        raise AssertionError(f"{name} differs on rank {victim}: {error}") from error
    assert outcome.seconds < _AT_ONCE, f"{name}: {outcome.seconds} s until {text}"
    here.probe()
    return "ExchangeError"


def one_is_wrong(case: Case, here: Place) -> str:
    """It says so, and the others have an error by their deadline."""
    rng = case.rng
    op, arguments, table = _draw_call(rng)
    here.probe()
    spoil = spoils.draw(rng, table, arguments)
    victim = rng.randrange(here.world_size)
    spoiled = spoil.apply(arguments) if here.rank == victim else arguments
    outcome = _call(op, spoiled, here, timeout=SHORT)
    if here.rank == victim:
        outcome.refusal((op, "lean_decode", "tree_attention", spoil.argument))
    else:
        outcome.refusal(("rank",), (ExchangeError,))
    leave(here.world_size)
    return "all have an error"


_GARBAGE = (
    b"", b"\xff\xfe\x00", b"null", b"3", b"[]", b'"text"', b"{", b"{}", b'{"failed": 3}',
    b'{"note": 1}', b'{"note": "x"}', b'{"note": "[]"}', b"[" * 100_000, b"1" * 5000, b"NaN",
    json.dumps({"failed": ["a"], "note": None}).encode(),
)  # fmt: skip


class GarbageStore:
    """A store in which somebody else has written over what one rank published."""

    def __init__(self, store: dist.Store, victim: int, garbage: bytes) -> None:
        self._store, self._victim, self._garbage = store, victim, garbage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def clone(self) -> GarbageStore:
        return GarbageStore(self._store.clone(), self._victim, self._garbage)

    def get(self, key: str) -> bytes:
        is_victims = key.endswith(f"/{self._victim}")
        return self._garbage if is_victims else self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


def garbage(case: Case, here: Place) -> str:
    """An ExchangeError on every rank, also where only one of them reads garbage."""
    rng = case.rng
    garbage, victim = rng.choice(_GARBAGE), rng.randrange(here.world_size)
    reader = rng.choice([None, *range(here.world_size)])
    original = dist.ProcessGroup.get_group_store
    with (
        mock.patch.object(
            dist.ProcessGroup,
            "get_group_store",
            lambda group: GarbageStore(original(group), victim, garbage),
        )
        if reader in (None, here.rank)
        else mock.MagicMock()
    ):
        comm = Communicator(here.group, SHORT)
    outcome = _call("all_reduce", {"x": torch.ones(2)}, replace(here, comm=comm))
    try:
        outcome.refusal(("rank",), (ExchangeError,))
    except AssertionError as error:
        raise AssertionError(f"{garbage[:40]!r} read by {reader}: {error}") from error
    leave(here.world_size)
    return "ExchangeError"


def fork(case: Case, here: Place) -> str:
    """A child's call ends: refused, or with the right result; its parent goes on."""
    rng = case.rng
    here.probe()
    forks = here.rank == 0 or rng.random() < 0.5
    of_its_own = rng.random() < 0.3
    if forks:
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            _child(here, send, of_its_own)
        os.close(send)
        said = _last_words(child, receive)
        assert said == "fine", f"a forked child: {said}"
    here.probe()
    replace(here, comm=Communicator(here.group, AMPLE)).probe()
    return "parents go on"


def _child(here: Place, send: int, of_its_own: bool) -> None:
    """Never returns."""
    faulthandler.enable()
    try:
        here.comm.timeout = SHORT
        outcome = attempt(Communicator, here.group, SHORT) if of_its_own else Outcome(0.0)
        if outcome.error is None:
            comm = outcome.value or here.comm
            outcome = _call("all_reduce", {"x": torch.ones(2)}, replace(here, comm=comm))
        if outcome.error is not None:
            outcome.refusal(("fork", "forked", "process"), (ExchangeError, RuntimeError))
        else:
            assert here.world_size == 1, "it exchanged with ranks that its parent belongs to"
        said = "fine"
    except BaseException as error:
        said = repr(error)
    os.write(send, said.encode()[:4000])
    os._exit(0)


def _last_words(child: int, receive: int) -> str:
    deadline = time.monotonic() + SHORT + 5.0
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            with os.fdopen(receive, "rb") as words:
                return words.read().decode() or f"ended with status {status}"
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(receive)
    return "it does not end"
