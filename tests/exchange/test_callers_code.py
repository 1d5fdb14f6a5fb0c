# SPDX-License-Identifier: BSD-3-Clause
"""What the caller's own code raises, in filters of warnings, streams and values of his own kinds,
is raised to him alone, before a call begins or after it has ended: the others go on."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import on_ranks, run_ranks
from faults import AMPLE, KINDS, call
from tree_attention import ExchangeError, ring_decode, ring_pass_q_decode, tree_decode
from tree_attention.exchange import Communicator

DECODERS = {"tree": tree_decode, "ring": ring_decode, "ring of queries": ring_pass_q_decode}


class Angry(Exception):
    """What no code of the library expects."""


def assert_in_step(comm: Communicator) -> None:
    """The next calls of all ranks are right, the same and another one."""
    assert comm.failed is None
    for _ in range(2):
        assert torch.equal(comm.all_reduce(torch.ones(3)), torch.full((3,), float(comm.world_size)))
    expected = call("all_gather", Communicator(timeout=AMPLE))[0]
    assert torch.equal(call("all_gather", comm)[0], expected)


def raise_in_hook(*args: Any, **options: Any) -> None:
    raise Angry("showwarning")


@pytest.mark.parametrize("how", ["error", "hook"])
@pytest.mark.parametrize("kind", DECODERS)
@on_ranks(3)
def test_warning_of_rounding_that_is_an_error(
    rank: int, world_size: int, kind: str, how: str
) -> None:
    comm = Communicator(timeout=AMPLE)
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 3, 64), torch.randn(1, 2, 6, 64)

    def decode(x: Tensor) -> Tensor:
        return DECODERS[kind](x, k, k, group=comm)[0]

    expected = decode(q)
    rounded = q * (1 + 3e-4 * rank)
    with warnings.catch_warnings(record=rank != 1) as caught:
        warnings.simplefilter("error" if rank == 1 and how == "error" else "always")
        if rank != 1:
            torch.testing.assert_close(decode(rounded), expected, atol=1e-2, rtol=1e-2)
            assert caught is not None and "differ by rounding" in str(caught[0].message)
        elif how == "error":
            with pytest.raises(RuntimeWarning, match="differ by rounding"):
                decode(rounded)
        else:
            hook = mock.patch.object(warnings, "showwarning", raise_in_hook)
            with hook, pytest.raises(Angry):
                decode(rounded)
    torch.testing.assert_close(decode(rounded), expected, atol=1e-2, rtol=1e-2)
    assert_in_step(comm)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_no_call_warns(rank: int, world_size: int, kind: str) -> None:
    """Neither do libraries inside it, from a communicator's first call on."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm = Communicator(timeout=AMPLE)
        for seqlen_q in (1, 3, 1):
            call(kind, comm, seqlen_q)
        comm.all_reduce(torch.ones(3))
        comm.all_gather(torch.ones(2), (2, 2))
        comm.agree((("field", 1),))
    assert_in_step(comm)


@on_ranks(2)
def test_explanation_goes_to_a_closed_stream(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    closed = io.StringIO()
    closed.close()
    expected = call("all_gather", comm)[0]
    with mock.patch.object(sys, "stdout", closed):
        if rank == 0:
            with pytest.raises(ValueError, match="closed file"):
                call("all_gather", comm, explain=True)
        else:
            assert torch.equal(call("all_gather", comm, explain=True)[0], expected)
    assert_in_step(comm)


class Value(float):
    """A number whose text or equality raises."""

    def __new__(cls, how: str) -> Value:
        value = super().__new__(cls, 2.0)
        value.how = how
        return value

    how: str

    def __eq__(self, other: object) -> bool:
        if self.how == "eq":
            raise Angry("eq")
        return float(self) == other

    def __hash__(self) -> int:
        return hash(float(self))

    def __str__(self) -> str:
        if self.how == "str":
            raise Angry("str")
        return "2.0"


@pytest.mark.parametrize("how", ["eq", "str"])
@pytest.mark.parametrize("kind", DECODERS)
@on_ranks(2)
def test_options_of_the_callers_own_kinds(rank: int, world_size: int, kind: str, how: str) -> None:
    """Ranks compare the numbers that they stand for."""
    comm = Communicator(timeout=AMPLE)
    q, k = torch.ones(1, 4, 1, 8), torch.ones(1, 2, 6, 8)
    decode = DECODERS[kind]
    expected = decode(q, k, k, group=comm, softcap=2.0)
    for _ in range(2):
        softcap = Value(how) if rank else 2.0
        found = decode(q, k, k, group=comm, softcap=softcap, softmax_scale=8**-0.5)
        assert torch.equal(found[0], expected[0])
    assert_in_step(comm)


@pytest.mark.parametrize("scale", [torch.tensor(0.50001), torch.tensor(0.5).double() + 2e-6])
@on_ranks(2)
def test_scalars_of_torch_are_compared_whole(rank: int, world_size: int, scale: Tensor) -> None:
    """Their texts have four digits."""
    comm = Communicator(timeout=AMPLE)
    q, k = torch.ones(1, 4, 1, 8), torch.ones(1, 2, 6, 8)
    tree_decode(q, k, k, group=comm, softmax_scale=torch.tensor(0.5))
    with pytest.raises(ExchangeError, match=r"softmax_scale is 0\.5"):
        tree_decode(q, k, k, group=comm, softmax_scale=scale if rank else torch.tensor(0.5))
    tree_decode(q, k, k, group=comm, softmax_scale=0.5 if rank else torch.tensor(0.5))
    assert_in_step(comm)


class Field:
    """A field of a signature whose text raises."""

    def __str__(self) -> str:
        raise Angry("str")


def give_no_text(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    comm.agree((("field", 1),))
    if rank == 1:
        with pytest.raises(Angry):
            comm.agree((("field", Field()),))
        assert comm.failed is None
    with pytest.raises(ExchangeError, match=r"rank 1 abandoned more calls .* than rank 0"):
        comm.agree((("field", 1),))


def test_field_that_has_no_text() -> None:
    """Its rank left out a call, on the way to it, and all learn that from the next one."""
    run_ranks(give_no_text, 2, fresh=True)
