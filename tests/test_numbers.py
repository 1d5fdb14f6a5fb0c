# SPDX-License-Identifier: BSD-3-Clause
"""Numbers of Python, numpy and torch in every argument of the public functions: each means what
Python's number means, or is refused by a sentence with function, argument and value.
"""

import re
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from distributed import on_ranks
from faults import AMPLE
from helpers import make_problem
from tree_attention import (
    BlockCyclic,
    Communicator,
    Contiguous,
    ContiguousThenCyclic,
    all_merge_states,
    append_kv,
    lean_decode,
    lean_schedule,
    merge_states,
    patterns,
    positions,
    ring_decode,
    ring_pass_q_decode,
    tree_decode,
)
from tree_attention._numbers import as_boolean, as_integer, as_real
from tree_attention.exchange import ExchangeOptions, Topology
from tree_attention.options import fields_of_options, with_numbers
from tree_attention.planning.arithmetic import Work

SLOTS = torch.arange(40)[None]
TABLE = torch.arange(4).int()[None]
LENGTHS = torch.tensor([[33]])
PAGES = torch.tensor([[[[0, 1], [1, 3]]]]).int()
TILES = torch.tensor([3, 4]).int()
torch.manual_seed(0)  # the same on every rank
PROBLEM = make_problem(seqlen_k=64)
QKV = PROBLEM.q, PROBLEM.k, PROBLEM.v
WORLD = Communicator()
STATE = torch.ones(1, 2, 1, 4), torch.zeros(1, 2, 1)

# Of each argument that is an integer, a call with it. The value is from 1 to 3.
INTEGERS: dict[str, Callable[[Any], Any]] = {
    "lean_decode: num_workers": lambda n: lean_decode(*QKV, num_workers=n),
    "lean_decode: key_layout": lambda n: lean_decode(*QKV, key_layout=(n, n, n)),
    "tree_decode: num_workers": lambda n: tree_decode(*QKV, num_workers=n, group=WORLD),
    "tree_decode: deterministic": lambda n: tree_decode(*QKV, deterministic=n, group=WORLD),
    "ring_decode: num_workers": lambda n: ring_decode(*QKV, num_workers=n, group=WORLD),
    "ring_pass_q_decode: num_workers": lambda n: ring_pass_q_decode(
        *QKV, num_workers=n, group=WORLD
    ),
    "lean_schedule: num_workers": lambda n: lean_schedule(TILES, n),
    "all_gather: dim": lambda n: WORLD.all_gather(torch.ones(2, 2, 2, 2), [2], n),
    "all_gather: counts": lambda n: WORLD.all_gather(torch.ones(1, int(n)), [n]),
    "alibi_slopes: num_heads_q": lambda n: positions.alibi_slopes(n),
    "t5_ranges: max_distance": lambda n: positions.t5_ranges(
        SLOTS, num_buckets=2, max_distance=n + 1
    ),
    "window: size": lambda n: patterns.window(SLOTS, n),
    "block: size": lambda n: patterns.block(SLOTS, n),
    "first: count": lambda n: patterns.first(SLOTS, n),
    "global_tokens: ranges": lambda n: patterns.global_tokens(SLOTS, [(0, n)]),
    "dilated: count": lambda n: patterns.dilated(SLOTS, n, dilation=2),
    "dilated: dilation": lambda n: patterns.dilated(SLOTS, 2, dilation=n),
    "dilated: block": lambda n: patterns.dilated(SLOTS, 2, dilation=2, block=n),
    "random_blocks: count": lambda n: patterns.random_blocks(SLOTS, n, block=2, seed=1),
    "random_blocks: block": lambda n: patterns.random_blocks(SLOTS, 2, block=n, seed=1),
    "random_blocks: seed": lambda n: patterns.random_blocks(SLOTS, 2, block=2, seed=n),
    "page_lists: page_size": lambda n: patterns.page_lists(PAGES, LENGTHS, TABLE, n),
    "local: rank": lambda n: patterns.local(PAGES, BlockCyclic(4, 1), n),
    "BlockCyclic: world_size": lambda n: BlockCyclic(n, 2),
    "BlockCyclic: block": lambda n: BlockCyclic(2, n),
    "BlockCyclic: rank": lambda n: BlockCyclic(4, 100).key_layout(n),
    "BlockCyclic: begin": lambda n: BlockCyclic(2, 1).local_slots(0, n, 9),
    "BlockCyclic: end": lambda n: BlockCyclic(2, 1).local_slots(0, 0, n),
    "Contiguous: bounds": lambda n: Contiguous((0, n, 5)),
    "Contiguous: rank": lambda n: Contiguous((0, 1, 2, 3, 4)).count(n, 9),
    "ContiguousThenCyclic: block": lambda n: ContiguousThenCyclic((0, 5), n),
    "Work: context": lambda n: Work(n),
    "Work: sequences": lambda n: Work(9, n),
}
REALS: dict[str, Callable[[Any], Any]] = {
    "lean_decode: softmax_scale": lambda x: lean_decode(*QKV, softmax_scale=x),
    "lean_decode: softcap": lambda x: lean_decode(*QKV, softcap=x),
    "tree_decode: softmax_scale": lambda x: tree_decode(*QKV, softmax_scale=x, group=WORLD),
    "tree_decode: softcap": lambda x: tree_decode(*QKV, softcap=x, group=WORLD),
    "tree_decode: timeout": lambda x: tree_decode(*QKV, timeout=x, group=WORLD),
    "ring_decode: softcap": lambda x: ring_decode(*QKV, softcap=x, group=WORLD),
    "ring_decode: timeout": lambda x: ring_decode(*QKV, timeout=x, group=WORLD),
    "ring_pass_q_decode: softcap": lambda x: ring_pass_q_decode(*QKV, softcap=x, group=WORLD),
    "decode_with_range_bias: softcap": lambda x: positions.decode_with_range_bias(
        *QKV, torch.tensor([[[[0, 9]]]] * 2).int(), torch.zeros(8, 1), softcap=x
    ),
    "Communicator: timeout": lambda x: Communicator(timeout=x).timeout,
    "all_merge_states: timeout": lambda x: all_merge_states(*STATE, WORLD, timeout=x),
    "all_reduce: timeout": lambda x: WORLD.all_reduce(STATE[0], timeout=x),
    "all_gather: timeout": lambda x: WORLD.all_gather(STATE[0], [4], timeout=x),
}
OF_OTHERS = [np.int64, np.int32, np.uint8, np.array, torch.tensor, lambda n: torch.tensor(n).int()]
NO_INTEGERS = [
    True, np.True_, torch.tensor(True), 2.0, np.float64(2), np.float32(2), torch.tensor(2.0),
    "2", b"2", Fraction(2), Decimal(2), None, [2], np.array([2]), torch.tensor([2]), 2j,
    torch.tensor(2, device="meta"),
]  # fmt: skip
NO_REALS = [
    True, np.True_, torch.tensor(True), "0.5", b"1", Decimal("0.5"), [0.5], np.array([0.5]),
    torch.tensor([0.5]), 1j, torch.tensor(1j), np.complex64(1), torch.tensor(0.5, device="meta"),
    torch.tensor(0.5, requires_grad=True), 10**400,
]  # fmt: skip


def equal(a: Any, b: Any) -> bool:
    """Equal to the last bit and of the same types, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(equal, a, b))
    if hasattr(a, "__dataclass_fields__"):
        return repr(a) == repr(b) and equal(list(vars(a).values()), list(vars(b).values()))
    return bool(a == b)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_of_other_libraries(name: str) -> None:
    call = INTEGERS[name]
    for value in (1, 2, 3):
        if (name == "tree_decode: deterministic") and value == 3:
            continue
        expected = call(value)
        for kind in OF_OTHERS:
            assert equal(call(kind(value)), expected), (kind, value)


@pytest.mark.parametrize("name", INTEGERS)
def test_what_is_no_integer(name: str) -> None:
    op, argument = name.split(": ")
    for value in NO_INTEGERS:
        if name == "all_gather: counts":
            if value is None or isinstance(value, list | str | bytes):
                continue  # which the test itself cannot take the size of
            if not isinstance(value, bool | float) and not isinstance(value, np.generic):
                continue
        if name == "t5_ranges: max_distance" and not isinstance(value, float):
            continue  # of which the test makes one more
        with pytest.raises((TypeError, ValueError)) as caught:
            INTEGERS[name](value)
        if name in ("local: rank", "tree_decode: deterministic") and value is None:
            continue
        said = str(caught.value)
        wanted = rf"^(\w+): {argument} must be .*(integer|pairs)"
        assert re.match(wanted, said, re.DOTALL), (value, said)
        assert said.startswith(op) or op == "local", said


@pytest.mark.parametrize("name", REALS)
def test_numbers_of_other_libraries(name: str) -> None:
    call = REALS[name]
    for value in (0.5, 0.1, 3.0):
        for kind in (np.float64, np.float32, np.float16, np.array, Fraction, torch.tensor,
                     lambda x: torch.tensor(x).half(), lambda x: torch.tensor(x).bfloat16(),
                     lambda x: torch.tensor(x).double()):  # fmt: skip
            given = kind(value)
            assert equal(call(given), call(float(given))), (given, value)
    for given in (2, np.int64(2), np.uint8(2), torch.tensor(2)):
        assert equal(call(given), call(2.0)), given


@pytest.mark.parametrize("name", REALS)
def test_what_is_no_number(name: str) -> None:
    op, argument = name.split(": ")
    for value in NO_REALS:
        with pytest.raises(TypeError) as caught:
            REALS[name](value)
        said = str(caught.value)
        wanted = rf"(lean_decode|{op}): {argument} must be a number"
        assert re.match(wanted, said), (value, said)


def test_numbers_are_kept_as_pythons_own() -> None:
    """A tensor that was kept could change, and ranks compare what an option looks like."""
    held = torch.tensor(0.5)
    given = {"softmax_scale": held, "softcap": np.float32(2), "num_workers": np.int8(3)}
    options = with_numbers("op", {**given, "key_layout": torch.tensor([0, 2, 4])})
    held.fill_(9.0)
    right: Any = {"softmax_scale": 0.5, "softcap": 2.0, "num_workers": 3}
    assert options == {**right, "key_layout": [0, 2, 4]}
    values = [*options.values(), *options["key_layout"]]
    assert {type(x) for x in values} == {float, int, list}
    assert fields_of_options(options)[:2] == (("softmax_scale", 0.5), ("softcap", 2.0))
    assert with_numbers("op", right) is right
    timeout = torch.tensor(7.0)
    comm = Communicator(timeout=timeout)  # type: ignore[arg-type]
    timeout.fill_(0.0)
    assert comm.timeout == 7.0 and type(comm.timeout) is float
    assert Communicator(timeout=timedelta(seconds=2)).timeout == 2.0


def test_small_integers_do_not_overflow() -> None:
    """uint8's own arithmetic ends at 255."""
    layout = BlockCyclic(np.uint8(200), np.uint8(200))
    assert layout.key_layout(np.uint8(199)) == (39_800, 200, 40_000)
    assert layout.owner(np.uint8(255)) == 1 and type(layout.block) is int
    assert torch.equal(patterns.window(SLOTS * 10, np.int8(127)), patterns.window(SLOTS * 10, 127))
    assert Work(np.int32(1 << 30)).context * 8 == 1 << 33


SLOTS_OF_LAYOUTS: list[Callable[[Any], Any]] = [
    lambda n: BlockCyclic(2, 1).count(0, n),
    lambda n: BlockCyclic(2, 1).owner(n),
    lambda n: BlockCyclic(2, 100).global_slots(1, n),
    lambda n: ContiguousThenCyclic((0, 2, 5)).local_slots_of(1, n),
]


@pytest.mark.parametrize("number", range(len(SLOTS_OF_LAYOUTS)))
def test_slots(number: int) -> None:
    """Those of tensors come back as tensors."""
    call = SLOTS_OF_LAYOUTS[number]
    for value in (1, 2, 3):
        for kind in (np.int64, np.uint8, np.array):
            assert equal(call(kind(value)), call(value))
        assert equal(call(torch.tensor(value).int()), torch.tensor(call(value)))
    wrongs = True, np.True_, torch.tensor(True), 2.0, torch.tensor(2.0), "2", Fraction(2), None
    for wrong in wrongs:
        with pytest.raises(TypeError, match=r"^\w+: \w+ must be (an )?integer"):
            call(wrong)


def test_truth_values() -> None:
    dtype = torch.float32
    for value in (True, np.True_, torch.tensor(True)):
        found = ExchangeOptions.of("op", {"head_sharded": value}, dtype)
        assert found.head_sharded is True
    for wrong in (1, "yes", None, np.int64(1), torch.tensor([True])):
        with pytest.raises(TypeError, match=r"^op: head_sharded must be True or False, got"):
            ExchangeOptions.of("op", {"head_sharded": wrong}, dtype)
    rows = torch.ones(1, 1, 1, 8)
    arguments = rows, rows, rows.clone(), rows.clone(), torch.zeros(1, 1).long()
    append_kv(*arguments, paged=np.False_)
    with pytest.raises(TypeError, match=r"^append_kv: paged must be True or False, got 0"):
        append_kv(*arguments, paged=0)  # type: ignore[arg-type]


def test_nodes_of_other_libraries() -> None:
    names = torch.tensor([3, 3, 1]), [np.int64(3), 3, 1], ["a", "a", "b"]
    assert {Topology.of(x).nodes for x in names} == {(0, 0, 1)}


def test_the_converters() -> None:
    class Three:
        def __index__(self) -> int:
            return 3

    assert as_integer(Three()) == 3 and as_integer(2**70) == 2**70
    assert as_real(np.longdouble(0.5)) == 0.5 and as_real(10**400) is None
    assert as_boolean(1) is None and as_boolean(np.False_) is False


@on_ranks(2)
def test_ranks_may_give_numbers_of_different_libraries(rank: int, world_size: int) -> None:
    """The same number is the same option; a different one is an error that shows it."""
    comm = Communicator(timeout=AMPLE)
    part = PROBLEM.q, PROBLEM.k[:, :, rank::2], PROBLEM.v[:, :, rank::2]
    mine = [0.25, torch.tensor(0.25)][rank]
    o, _ = tree_decode(*part, softmax_scale=mine, softcap=[np.float16(4), 4][rank], group=comm)
    expected, _ = lean_decode(*QKV, softmax_scale=0.25, softcap=4.0)
    torch.testing.assert_close(o, expected)
    counts = [[np.int64(1), 2], torch.tensor([1, 2])][rank]
    assert comm.all_gather(torch.ones(1, rank + 1), counts).shape == (1, 3)


@pytest.mark.parametrize("number", [2**63, -(2**63), 10**400, 10**5000], ids=int.bit_length)
def test_integers_that_no_tensor_holds(number: int) -> None:
    """Python itself refuses to write the last one."""
    for call, error in (
        (lambda: lean_decode(*QKV, num_workers=number), "lean_decode: num_workers must be .*, got"),
        (lambda: lean_schedule(TILES, number), "lean_schedule: num_workers must be .*, got"),
        (
            lambda: lean_decode(*QKV, key_layout=(number, 1, 1)),
            "_decode: key_layout must be .* got",
        ),
        (lambda: tree_decode(*QKV, deterministic=-number), "tree_decode: deterministic must be"),
        (lambda: positions.alibi_slopes(number), "alibi_slopes: num_heads_q must be .*, got"),
        (
            lambda: WORLD.all_gather(torch.ones(2), (number,)),
            "all_gather: counts must be|counts.0.",
        ),
    ):
        if "deterministic" in error and number < 0:
            continue
        with pytest.raises(ValueError, match=error) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [torch.tensor(2), np.array(2), np.array(2.0), torch.ones(3, 1)])
def test_lists_without_an_axis_of_numbers(value: Any) -> None:
    with pytest.raises(TypeError, match=r"lean_decode: key_layout must be three integers .*, got"):
        lean_decode(*QKV, key_layout=value)
    with pytest.raises(
        ValueError, match=r"all_gather: counts must be 1 integers .*, got"
    ) as caught:
        WORLD.all_gather(torch.ones(2), value)
    assert "\n" not in str(caught.value)


def test_a_dtype_is_one_of_torch() -> None:
    parts = QKV[0][None], torch.zeros(1, *QKV[0].shape[:-1])
    for op, call in (
        ("lean_decode", lambda: lean_decode(*QKV, out_dtype="float32")),  # type: ignore[arg-type]
        ("merge_states", lambda: merge_states(*parts, out_dtype="float32")),  # type: ignore[arg-type]
    ):
        message = rf"^{op}: out_dtype must be a torch\.dtype or None, got .float32.$"
        with pytest.raises(TypeError, match=message):
            call()
