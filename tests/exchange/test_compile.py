# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile(fullgraph=True) over ranks: the exchange is an operator of the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import COMPILING, on_ranks, run_ranks
from helpers import make_problem
from tiers import by_world, tiers
from tree_attention import Communicator, ExchangeError, all_merge_states, tree_decode

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "every option": {"alibi": 0.1, "softcap": 5.0, "softmax_scale": 0.2, "seqlen_q": 2},
}


def assert_same(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for x, y in zip(results, expected, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


def decode(rank: int, world_size: int, backend: str, case: str) -> None:
    torch.manual_seed(0)
    problem = make_problem(num_heads_kv=3, group_size=2, seqlen_k=30, **CASES[case])
    slots = slice(rank * 30 // world_size, (rank + 1) * 30 // world_size)
    own = problem.q, problem.k[:, :, slots], problem.v[:, :, slots]
    options = dict(problem.options)
    if "alibi_slopes" in options:
        options["key_layout"] = (slots.start, 1, 1)
    comm = Communicator(timeout=COMPILING)
    group = dist.new_group()

    def twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        first = tree_decode(q, k, v, timeout=COMPILING, **options)
        q = q + first[0][..., : q.shape[3]]
        second = tree_decode(
            q, k, v, group=comm, head_sharded=True, out_dtype=torch.bfloat16, **options
        )
        third = tree_decode(
            q, k, v, group=group, strategy="two_phase", timeout=COMPILING, **options
        )
        return *first, *second, *third

    compiled = torch.compile(twice, fullgraph=True, backend=backend)
    for _ in range(2):
        assert_same(compiled(*own), twice(*own))


@pytest.mark.parametrize("case", tiers(["plain"], ["every option"]))
@by_world([2], [1, 3])
def test_tree_decode(world_size: int, case: str) -> None:
    run_ranks(decode, world_size, "aot_eager", case, timeout=COMPILING)


@pytest.mark.deep
def test_tree_decode_by_inductor() -> None:
    run_ranks(decode, 2, "inductor", "plain", timeout=COMPILING)


@by_world([2], [1, 3])
@on_ranks(timeout=COMPILING)
def test_all_merge_states_and_all_reduce(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=COMPILING)

    def both(o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        merged = all_merge_states(o, lse, comm, payload_dtype=torch.bfloat16)
        own_heads = all_merge_states(o, lse, head_sharded=True, timeout=COMPILING)
        counts = [4, *(0 for _ in range(comm.world_size - 1))]
        most_heads = all_merge_states(o, lse, comm, head_sharded=True, head_counts=counts)
        return (
            *merged,
            *own_heads,
            *most_heads,
            comm.all_reduce(o),
            comm.all_reduce(lse, timeout=COMPILING),
        )

    torch.manual_seed(rank)
    states = torch.randn(4, 1, 8, 2).permute(3, 0, 1, 2), torch.randn(2, 4, 1)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_same(compiled(*states), both(*states))


@pytest.mark.deep
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks(timeout=COMPILING)
def test_gradients_are_refused_in_a_graph(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=COMPILING)
    q, k = torch.ones(1, 2, 1, 8, requires_grad=True), torch.ones(1, 1, 4, 8)
    lse = torch.zeros(1, 2, 1)
    for op, call in {
        "tree_decode": lambda: tree_decode(q, k, k, group=comm),
        "all_merge_states": lambda: all_merge_states(q, lse, comm),
        "all_reduce": lambda: comm.all_reduce(q),
        "all_gather": lambda: comm.all_gather(q, [8] * world_size),
    }.items():
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match=f"{op}: .* must not require a gradient"):
            compiled()
        with torch.no_grad():
            compiled()


@on_ranks(2, timeout=COMPILING)
def test_error_in_a_graph(rank: int, world_size: int) -> None:
    """What ranks call differently is an error of the graph, which may run again."""
    comm = Communicator(timeout=COMPILING)
    q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 4, 8)

    def scaled(q: Tensor, scale: float) -> Tensor:
        return tree_decode(q, k, k, group=comm, softmax_scale=scale)[0]

    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    with pytest.raises(ExchangeError, match=r"softmax_scale is 1.0 on rank 1, 0.0 on rank 0"):
        compiled(q, float(rank))
    assert comm.failed is None
    assert torch.equal(compiled(q, 2.0), scaled(q, 2.0))


# Ranks of uneven heads: each has outputs of its own shape.
@by_world([1], [3])
@on_ranks(timeout=COMPILING)
def test_schemas_and_fakes(rank: int, world_size: int) -> None:
    ops = torch.ops.tree_attention
    torch.manual_seed(0)
    o, lse = torch.randn(1, 4, 1, 8), torch.randn(1, 4, 1)
    q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 5, 8)
    exchange = {
        "strategy": "auto",
        "payload_dtype": torch.float32,
        "head_sharded": True,
        "timeout": COMPILING,
        "out_dtype": torch.bfloat16,
    }
    tests = ("test_schema", "test_faketensor")
    for op, arguments, options in (
        (
            ops.tree_decode,
            (q, k, k, None),
            {**exchange, "deterministic": 0, "explain": False},
        ),
        (ops.all_merge_states, (o, lse, None), exchange),
        (ops.all_reduce, (None, o), {"payload_dtype": None, "timeout": COMPILING}),
        (ops.all_gather, (None, o, [4] * world_size, 1), {"timeout": COMPILING}),
    ):
        torch.library.opcheck(op.default, arguments, options, test_utils=tests)
