# SPDX-License-Identifier: BSD-3-Clause
"""What ranks do together: the same call, and calls with which one of them is wrong."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from helpers import Problem
from tree_attention import (
    Communicator,
    ContiguousThenCyclic,
    ExchangeError,
    all_merge_states,
    strategies,
    tree_decode,
)

from . import model, spoils
from .cases import DTYPES, SURROUNDINGS, Case, draw_layout, draw_problem, shard, surroundings
from .ops import call_decoder, check_merged, decode_arguments, is_right
from .outcome import AMPLE, SHORT, Outcome, attempt

PAYLOADS = (torch.float32, torch.float32, torch.bfloat16)
# A rank whose error all know of does not wait for its deadline.
_AT_ONCE = 5.0


@dataclass
class Place:
    """Where a rank stands: one group for many cases, until a case ends it."""

    rank: int
    world_size: int
    group: dist.ProcessGroup
    comm: Communicator

    def probe(self) -> None:
        """The next right call works."""
        assert self.comm.failed is None, f"the communicator is dead: {self.comm.failed}"
        torch.manual_seed(0)
        q, k, v = torch.randn(1, 2, 1, 8), *torch.randn(2, 1, 2, 6, 8)
        problem = Problem(q, k, v)
        own = slice(self.rank, None, self.world_size)
        found = attempt(tree_decode, q, k[:, :, own], v[:, :, own], group=self.comm).result()
        model.check_attention(found, model.attention(problem), problem, torch.float32)


_places: dict[int, Place] = {}


def place(world_size: int, rank: int) -> Place:
    known = _places.get(world_size)
    if known is None:
        group = dist.new_group(range(world_size))
        known = _places[world_size] = Place(rank, world_size, group, Communicator(group, AMPLE))
    return known


def leave(world_size: int) -> None:
    """Of a group that a case has ended, as it was meant to."""
    dist.destroy_process_group(_places.pop(world_size).group)


def world_size(case: Case) -> int:
    return case.first.choice([1, 2, 2, 3])


def play(case: Case, rank: int) -> str:
    size = world_size(case)
    kinds: dict[Callable[[Case, Place], str], int] = {
        _decode: 12, _sums: 3, _states: 4, _wrong: 8, _wrong_timeout: 4,
    }  # fmt: skip
    if size > 1:
        kinds |= {_differ: 6, _one_is_wrong: 1, _garbage: 2}
    kinds |= {_fork: 1, _compiled: 1}
    kind = case.rng.choices(list(kinds), list(kinds.values()))[0]
    return kind(case, place(size, rank))


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
        more = _tree_options(rng) | {"overlap": rng.choice([1, 1, 2, 3])}
    group = rng.choice([here.comm, here.comm, here.group, None])
    with surroundings(rng.choice(SURROUNDINGS)):
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


def _states(case: Case, here: Place) -> str:
    """Both doors: a state of the caller's, and one written into the send buffer."""
    from .ops import draw_states

    rng = case.rng
    o, lse = draw_states(rng, here.world_size)
    o = o.to(rng.choice(DTYPES))
    options = _tree_options(rng) | {"head_sharded": False}
    own: tuple[Tensor, Tensor] = (o[here.rank], lse[here.rank])
    with surroundings(rng.choice(SURROUNDINGS)):
        if rng.random() < 0.4:
            buffers = here.comm.send_state(tuple(own[0].shape), "cpu", options["payload_dtype"])
            for buffer, x in zip(buffers, own, strict=True):
                buffer.copy_(x)
            own = buffers
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


def _draw_call(rng: Random, here: Place) -> tuple[str, spoils.Arguments, list[spoils.Spoil]]:
    """An operator, arguments that are right, and how they may be made wrong."""
    op = rng.choice(["tree_decode", "ring_decode", "ring_pass_q_decode", "all_merge_states",
                     "all_reduce"])  # fmt: skip
    if op == "all_reduce":
        return op, {"x": torch.ones(2, 3)}, spoils.SUMS
    if op == "all_merge_states":
        arguments = {"o": torch.ones(1, 2, 1, 8), "lse": torch.zeros(1, 2, 1)}
        return op, arguments, spoils.STATES + spoils.TREE
    problem = draw_problem(rng)
    table = spoils.DECODE + (spoils.TREE + spoils.OVERLAP if op == "tree_decode" else [])
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


def _wrong(case: Case, here: Place) -> str:
    """All ranks are wrong in the same way: each says so, and nothing was sent."""
    rng = case.rng
    op, arguments, table = _draw_call(rng, here)
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
    except AssertionError as error:
        raise AssertionError(f"{op}, {spoil}: {error}") from error
    assert outcome.seconds < _AT_ONCE, f"{op}, {spoil}: {outcome.seconds} s until {text}"
    here.probe()
    return type(outcome.error).__name__


def _wrong_timeout(case: Case, here: Place) -> str:
    rng = case.rng
    op, arguments, _ = _draw_call(rng, here)
    spoil = rng.choice(spoils.TIMEOUTS + spoils.ODD_TIMEOUTS)
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
    if outcome.error is not None or not may_be_right:
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
    "overlap": ("tree_decode", {"overlap": 2}),
    "seqlen_q": ("tree_decode", {"q": torch.ones(2, 2, 3, 8)}),
    "a query more in a ring": ("ring_pass_q_decode", {"q": torch.ones(2, 2, 3, 8)}),
    "heads of q": ("tree_decode", {"q": torch.ones(2, 4, 1, 8)}),
    "heads of v": ("ring_decode", {"k": torch.ones(2, 1, 4, 8), "v": torch.ones(2, 1, 4, 8)}),
    "head_dim of v": ("tree_decode", {"v": torch.ones(2, 2, 4, 5)}),
    "call": ("ring_decode", {}),
}


def _differ(case: Case, here: Place) -> str:
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


def _one_is_wrong(case: Case, here: Place) -> str:
    """It says so, and the others have an error by their deadline."""
    rng = case.rng
    op, arguments, table = _draw_call(rng, here)
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

    def get(self, key: str) -> bytes:
        is_victims = key.endswith(f"/{self._victim}")
        return self._garbage if is_victims else self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


def _garbage(case: Case, here: Place) -> str:
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


def _compiled(case: Case, here: Place) -> str:
    """In one graph, without a break: the same bits as without a compiler."""
    rng = case.rng
    torch.manual_seed(rng.getrandbits(31))
    batch, length = rng.choice([1, 2]), rng.choice([5, 20])
    problem = Problem(torch.randn(batch, 4, 1, 8), *torch.randn(2, batch, 2, length, 8))
    local = problem.shard(draw_layout(rng, here.world_size, length), here.rank)
    options = _tree_options(rng) | {"payload_dtype": torch.float32, "head_sharded": False}

    def decode(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tree_decode(q * 2.0, k, v, **options)

    torch.compiler.reset()
    backend = rng.choice(["eager", "aot_eager"])
    compiled = torch.compile(decode, backend=backend, fullgraph=True)
    with torch.no_grad():
        found = attempt(compiled, local.q, local.k, local.v).result()
        expected = attempt(decode, local.q, local.k, local.v).result()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    doubled = replace(problem, q=problem.q * 2.0)
    model.check_attention(
        found, model.attention(doubled), doubled, options["out_dtype"] or torch.float32
    )
    return model.bits(*found)


def _fork(case: Case, here: Place) -> str:
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
    return "parents go on"


def _child(here: Place, send: int, of_its_own: bool) -> None:
    """Never returns."""
    try:
        here.comm.timeout = SHORT
        comm = Communicator(here.group, SHORT) if of_its_own else here.comm
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
    deadline = time.monotonic() + SHORT + 10.0
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
