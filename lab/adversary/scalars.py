# SPDX-License-Identifier: BSD-3-Clause
"""Numbers of numpy and torch where Python's are taken: the same result, or a refusal."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers import make_problem
from tree_attention import (
    BlockCyclic,
    Communicator,
    Contiguous,
    ContiguousThenCyclic,
    ShardLayout,
    all_merge_states,
    lean_decode,
    lean_schedule,
    patterns,
    positions,
    ring_decode,
    ring_pass_q_decode,
    tree_decode,
)

from . import model
from .cases import Case
from .outcome import OF_ARGUMENTS, attempt
from .places import Place

Use = Callable[[], Any]  # the result, as something that compares


@dataclass(frozen=True)
class Argument:
    """Something made with a number, and what is then found with it.

    The second step comes after the number, if it can be written to, has become another one.
    """

    names: tuple[str, ...]  # one of which a refusal says
    numbers: Sequence[Any]
    make: Callable[[Any, Place], Use]

    @property
    def is_integer(self) -> bool:
        return all(isinstance(number, int) for number in self.numbers)


def _at_once(call: Callable[[Any, Place], Any]) -> Callable[[Any, Place], Use]:
    def make(number: Any, here: Place) -> Use:
        found = call(number, here)
        found = [found] if isinstance(found, Tensor) else found
        return lambda: model.bits(*found)

    return make


def _decoder(
    function: Callable[..., Any], name: str, of: Callable[[Any], Any] = lambda x: x
) -> Any:
    def call(number: Any, here: Place) -> Any:
        torch.manual_seed(5)
        q, k, v = torch.randn(2, 4, 1, 8), *torch.randn(2, 2, 2, 12, 8)
        more: dict[str, Any] = {name: of(number)}
        if function is not lean_decode:
            more["group"] = here.comm
        if name == "deterministic":  # whose blocks each are one rank's
            more["key_layout"] = (64 * here.rank, 64, 64 * here.world_size)
        if name == "key_layout":
            more |= {"alibi_slopes": torch.full((4,), 0.5),
                     "query_positions": torch.full((2, 1), 40)}  # fmt: skip
        return function(q, k, v, **more)

    return _at_once(call)


def _layout(make: Callable[[Any], ShardLayout]) -> Callable[[Any, Place], Use]:
    def made(number: Any, here: Place) -> Use:
        layout = make(number)

        def use() -> Any:
            ranks = range(layout.world_size)
            key_layouts = []
            if isinstance(layout, BlockCyclic | Contiguous):
                key_layouts = [layout.key_layout(rank) for rank in ranks]
            return (
                repr(layout), hash(layout), layout.world_size, key_layouts,
                [layout.count(rank, 100) for rank in ranks if isinstance(layout, BlockCyclic)],
                layout.owner(0),
            )  # fmt: skip

        return use

    return made


def _of_layout(call: Callable[[ShardLayout, Any], Any]) -> Callable[[Any, Place], Use]:
    def make(number: Any, here: Place) -> Use:
        # Blocks so large that numbers of 8 bits overflow in what is made of them.
        found = call(BlockCyclic(3, 50), number)
        found = found.tolist() if isinstance(found, Tensor) else found
        return lambda: found

    return make


def _reduced(number: Any, here: Place) -> Any:
    return here.comm.all_reduce(torch.full((3,), 0.5), timeout=number)


def _merged(number: Any, here: Place) -> Any:
    return all_merge_states(
        torch.ones(1, 2, 1, 8), torch.zeros(1, 2, 1), group=here.comm, timeout=number
    )


def _gathered(number: Any, here: Place) -> Any:
    return here.comm.all_gather(torch.ones(3, int(number)), [number] * here.world_size, 1)


def _along(number: Any, here: Place) -> Any:
    return here.comm.all_gather(torch.ones(2, 2, 2), [2] * here.world_size, number)


def _communicator(number: Any, here: Place) -> Use:
    comm = Communicator(here.group, number)
    return lambda: (comm.timeout, model.bits(comm.all_reduce(torch.ones(2))))


def _problem(number: Any, here: Place) -> Any:
    torch.manual_seed(5)
    problem = make_problem(seqlen_q=2, seqlen_k=70, head_dim=8)
    return lean_decode(problem.q, problem.k, problem.v, problem.key_ranges, num_workers=number)


_SLOTS = torch.tensor([[3, 40, 41]])
ARGUMENTS = {
    "lean_schedule": Argument(("lean_schedule",), (1, 2, 7), _at_once(
        lambda n, here: lean_schedule(torch.tensor([1, 3, 2]).int(), n))),
    "num_workers": Argument(("num_workers",), (0, 1, 3), _at_once(_problem)),
    "key_layout": Argument(("key_layout",), (1, 4, 16), _decoder(
        lean_decode, "key_layout", lambda n: (n, n, 2 * n))),
    "deterministic": Argument(("deterministic",), (0, 16, 64), _decoder(
        tree_decode, "deterministic")),
    "softmax_scale": Argument(("softmax_scale", "lean_decode"), (0.5, 2, 0.1), _decoder(
        lean_decode, "softmax_scale")),
    "softmax_scale of a tree": Argument(("softmax_scale", "tree_decode"), (0.5, 2, 0.1), _decoder(
        tree_decode, "softmax_scale")),
    "softcap": Argument(("softcap", "ring_decode"), (0.0, 3.0, 0.7), _decoder(
        ring_decode, "softcap")),
    "softcap of queries": Argument(("softcap", "ring_pass_q_decode"), (0.0, 3, 0.7), _decoder(
        ring_pass_q_decode, "softcap")),
    "timeout": Argument(("timeout",), (20.0, 20, 20.1), _at_once(_reduced)),
    "timeout of a merge": Argument(("timeout",), (20.0, 20, 20.1), _at_once(_merged)),
    "timeout of a tree": Argument(("timeout",), (20.0, 20), _decoder(tree_decode, "timeout")),
    "timeout of Communicator": Argument(("timeout",), (20.0, 20, 20.1), _communicator),
    "counts": Argument(("counts",), (0, 1, 3), _at_once(_gathered)),
    "dim": Argument(("dim",), (0, 1, -1), _at_once(_along)),
    "alibi_slopes": Argument(("alibi_slopes",), (1, 8, 12), _at_once(
        lambda n, here: positions.alibi_slopes(n))),
    "num_buckets": Argument(("num_buckets", "t5_ranges"), (8, 32), _at_once(
        lambda n, here: positions.t5_ranges(_SLOTS, num_buckets=n))),
    "max_distance": Argument(("max_distance", "t5_ranges"), (64, 100), _at_once(
        lambda n, here: positions.t5_ranges(_SLOTS, max_distance=n))),
    "window": Argument(("window", "size"), (1, 8, 100), _at_once(
        lambda n, here: patterns.window(_SLOTS, n))),
    "block": Argument(("block", "size"), (1, 8, 100), _at_once(
        lambda n, here: patterns.block(_SLOTS, n))),
    "first": Argument(("first", "count"), (1, 8, 100), _at_once(
        lambda n, here: patterns.first(_SLOTS, n))),
    "global_tokens": Argument(("global_tokens", "ranges"), (1, 8, 100), _at_once(
        lambda n, here: patterns.global_tokens(_SLOTS, [(0, n)]))),
    "dilated": Argument(("dilated", "count", "dilation"), (1, 2, 100), _at_once(
        lambda n, here: patterns.dilated(_SLOTS, 3, dilation=n))),
    "random_blocks": Argument(("random_blocks", "count", "block", "seed"), (1, 2, 100), _at_once(
        lambda n, here: patterns.random_blocks(_SLOTS, 2, block=n, seed=n))),
    "BlockCyclic": Argument(("BlockCyclic", "world_size"), (1, 3, 100), _layout(
        lambda n: BlockCyclic(n, 8))),
    "a block": Argument(("BlockCyclic", "block"), (1, 3, 100), _layout(
        lambda n: BlockCyclic(3, n))),
    "Contiguous": Argument(("Contiguous", "bounds"), (1, 3, 100), _layout(
        lambda n: Contiguous((0, n)))),
    "ContiguousThenCyclic": Argument(("ContiguousThenCyclic", "bounds", "block"), (1, 3, 100),
        _layout(lambda n: ContiguousThenCyclic((0, n), n))),
    "count": Argument(("BlockCyclic", "count"), (0, 7, 100), _of_layout(
        lambda layout, n: int(layout.count(1, n)))),
    "owner": Argument(("BlockCyclic", "owner"), (0, 7, 100), _of_layout(
        lambda layout, n: int(layout.owner(n)))),
    "global_slots": Argument(("BlockCyclic", "global_slots"), (0, 7, 100), _of_layout(
        lambda layout, n: int(layout.global_slots(2, n)))),
    "local_slots": Argument(("BlockCyclic", "local_slots"), (0, 7, 120), _of_layout(
        lambda layout, n: layout.local_slots(1, 0, n))),
    "local_range": Argument(("BlockCyclic", "local_range"), (0, 7, 120), _of_layout(
        lambda layout, n: tuple(map(int, layout.local_range(1, n, 300))))),
    "a rank": Argument(("BlockCyclic", "rank"), (0, 1, 2), _of_layout(
        lambda layout, n: (int(layout.count(n, 400)), layout.key_layout(n)))),
}  # fmt: skip

_INTEGERS: dict[str, Callable[[int], Any]] = {
    "np.int64": np.int64,
    "np.int32": np.int32,
    "np.int8": np.int8,
    "np.uint64": lambda n: np.uint64(n) if n >= 0 else np.int64(n),
    "np.array": np.array,
    "torch.tensor": torch.tensor,
    "torch.int8": lambda n: torch.tensor(n, dtype=torch.int8),
    "torch.uint8": lambda n: torch.tensor(n, dtype=torch.uint8 if n >= 0 else torch.int16),
}
_FLOATS: dict[str, Callable[[float], Any]] = {
    "np.float64": np.float64,
    "np.float32": np.float32,
    "np.float16": np.float16,
    "np.array of floats": lambda x: np.array(float(x)),
    "torch.float32": lambda x: torch.tensor(float(x)),
    "torch.float64": lambda x: torch.tensor(float(x), dtype=torch.float64),
    "torch.bfloat16": lambda x: torch.tensor(float(x), dtype=torch.bfloat16),
}


def _value(number: Any, is_integer: bool) -> Any:
    """What Python takes the number for, to which its operator gives an answer before `int` does."""
    return operator.index(number) if is_integer else float(number)


def _spoil(number: Any) -> None:
    """It becomes another one, as a loop's counter does, where it can."""
    if isinstance(number, Tensor):
        number += 1
    elif isinstance(number, np.ndarray):
        number[...] = 1 + number


def play_of(arguments: dict[str, Argument], rng: Random, here: Place) -> str:
    name = rng.choice(list(arguments))
    argument = arguments[name]
    plain = rng.choice(argument.numbers)
    kinds = _INTEGERS if isinstance(plain, int) else _FLOATS
    if isinstance(plain, int) and rng.random() < 0.2:
        kinds = _FLOATS
    kind = rng.choice(list(kinds))
    number = kinds[kind](plain)
    try:
        is_exact = kinds is _INTEGERS or not argument.is_integer
        expected_of = _value(number, kinds is _INTEGERS) if is_exact else plain
        expected = attempt(argument.make(expected_of, here)).result()
        outcome = attempt(argument.make, number, here)
        if outcome.error is not None:
            outcome.refusal(argument.names, OF_ARGUMENTS)
            here.probe()
            return "refused"
        _spoil(number)
        found = attempt(outcome.value).result()
        assert found == expected, f"{found} where {expected_of!r} gives {expected}"[:400]
    except AssertionError as error:
        raise AssertionError(f"{name} = {kind}({plain}): {error}") from error
    return "the same"


def play(case: Case, here: Place) -> str:
    return play_of(ARGUMENTS, case.rng, here)
