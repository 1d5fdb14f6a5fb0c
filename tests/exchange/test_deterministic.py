# SPDX-License-Identifier: BSD-3-Clause
"""tree_decode(deterministic=n): the same bits for every world size, thread count and batch."""

import os
from contextlib import nullcontext

import pytest
import torch

from distributed import on_ranks, run_ranks
from faults import AMPLE, SLACK, TIMEOUT, failure
from helpers import Problem, assert_same_bits, make_problem
from tiers import by_world, tiers_of
from tree_attention import (
    BlockCyclic,
    Contiguous,
    ContiguousThenCyclic,
    ShardLayout,
    lean_decode,
    tree_decode,
)
from tree_attention.deterministic import check_layout
from tree_attention.exchange import Communicator, ExchangeError

SIZE = 32
CASES = {
    "bf16 causal": {"dtype": torch.bfloat16, "seqlen_q": 3, "ranges": "causal"},
    "fp32 ragged": {"batch": 3, "ranges": "ragged", "group_size": 3},
    "window, alibi": {"seqlen_q": 2, "ranges": "window", "alibi": 1 / 64},
    "several ranges": {"ranges": "several", "seqlen_q": 2},
    "int8": {"dtype": torch.bfloat16, "kv_dtype": torch.int8},
    "many rows": {"dtype": torch.bfloat16, "seqlen_q": 40, "ranges": "causal"},
}


def make_case(case: str) -> Problem:
    torch.manual_seed(2)
    problem = make_problem(seqlen_k=500, **{"batch": 2, **CASES[case]})
    problem.options.pop("key_layout", None)
    return problem


def decode(problem: Problem, layout, rank: int, **options):
    shard = problem.shard(layout, rank)
    shard.options["key_layout"] = layout.key_layout(rank)
    result = tree_decode(
        shard.q, shard.k, shard.v, shard.key_ranges, deterministic=SIZE, **shard.options, **options
    )
    problem.check(*result)
    return result


def decode_shards(rank: int, world_size: int, case: str, threads: int):
    torch.set_num_threads(threads)
    problem = make_case(case)
    cyclic = decode(problem, BlockCyclic(world_size, 64), rank)
    shares = range(world_size)[::-1] if world_size > 1 else None  # the last rank has no keys
    assert_same_bits(decode(problem, BlockCyclic(world_size, SIZE, shares), rank), cyclic)
    cuts = [round(500 / SIZE * i / world_size) * SIZE for i in range(world_size)]
    assert_same_bits(decode(problem, Contiguous((*cuts, 500)), rank), cyclic)
    return cyclic


@pytest.mark.parametrize("case", tiers_of(CASES, quick=["fp32 ragged", "int8"]))
def test_same_bits_for_every_world_and_thread_count(case: str) -> None:
    expected = decode(make_case(case), BlockCyclic(1, 64), 0)
    for world_size, threads in ((1, 3), (2, 2), (3, 1)):
        for result in run_ranks(decode_shards, world_size, case, threads):
            assert_same_bits(result, expected)


@by_world([4], [5, 6, 7])
def test_same_bits_for_other_worlds(world_size: int) -> None:
    for case in CASES if world_size == 7 else ["bf16 causal"]:
        expected = decode(make_case(case), BlockCyclic(1, 64), 0)
        for result in run_ranks(decode_shards, world_size, case, 1):
            assert_same_bits(result, expected)


@pytest.mark.parametrize("case", CASES)
def test_same_bits_beside_other_sequences(case: str) -> None:
    whole = make_case(case)
    o, lse = tree_decode(
        whole.q, whole.k, whole.v, whole.key_ranges, deterministic=SIZE, **whole.options
    )
    one = slice(1, 2)
    options = {
        name: x[one] if name in ("query_positions", "k_scale", "v_scale") else x
        for name, x in whole.options.items()
    }
    ranges = None if whole.key_ranges is None else whole.key_ranges[one]
    alone = tree_decode(
        whole.q[one], whole.k[one], whole.v[one], ranges, deterministic=SIZE, **options
    )
    assert_same_bits(alone, (o[one], lse[one]))


def test_otherwise_bits_depend_on_the_batch_and_the_world() -> None:
    """What the option is for."""
    torch.manual_seed(1)
    problem = make_problem(batch=4, seqlen_k=3000, head_dim=128)
    whole = lean_decode(problem.q, problem.k, problem.v, num_workers=7)
    alone = lean_decode(problem.q[1:2], problem.k[1:2], problem.v[1:2], num_workers=7)
    assert not torch.equal(alone[0], whole[0][1:2])
    fixed = lean_decode(problem.q, problem.k, problem.v, num_workers=-1)
    one = lean_decode(problem.q[1:2], problem.k[1:2], problem.v[1:2], num_workers=-1)
    assert_same_bits(one, tuple(x[1:2] for x in fixed))
    problem.check(*fixed)


def test_empty_shards_and_no_keys() -> None:
    problem = make_problem(seqlen_k=0)
    o, lse = tree_decode(problem.q, problem.k, problem.v, deterministic=SIZE)
    assert (o == 0).all() and lse.isneginf().all()


@on_ranks(3)
def test_empty_shards_need_no_cut(rank: int, world_size: int) -> None:
    problem = make_case("bf16 causal")
    expected = decode(problem, BlockCyclic(world_size, SIZE), rank)
    assert_same_bits(decode(problem, Contiguous((0, 0, 500, 500)), rank), expected)


@pytest.mark.parametrize(
    "layout, is_cut",
    [
        (BlockCyclic(2, 64), True),
        (BlockCyclic(2, 48), False),
        (BlockCyclic(3, 64, (0, 3, 1)), True),
        (BlockCyclic(3, 48, (0, 3, 1)), False),
        (BlockCyclic(2, 48, (1, 0)), True),
        (BlockCyclic(1, 48), True),
        (Contiguous((0, 64, 500)), True),
        (Contiguous((0, 48, 500)), False),
        (Contiguous((0, 500, 500)), True),
        (ContiguousThenCyclic((0, 64, 128), 64), False),
    ],
)
def test_layouts_are_cut_between_blocks(layout: ShardLayout, is_cut: bool) -> None:
    refused = pytest.raises(ValueError, match=r"TreeCache: .* at multiples of 32 slots, got \w+\(")
    with nullcontext() if is_cut else refused:
        check_layout(layout, SIZE)


def test_pages() -> None:
    problem = make_problem(seqlen_k=200, page_size=16)
    plain = make_problem(seqlen_k=200)
    assert plain.k.shape[2] == 200
    result = tree_decode(
        problem.q, problem.k, problem.v, problem.key_ranges, deterministic=SIZE, **problem.options
    )
    problem.check(*result)


def test_an_invalid_page_is_named_by_its_sequence() -> None:
    problem = make_problem(batch=2, seqlen_k=200, page_size=16)
    problem.options["page_table"][1, 9] = -1
    with pytest.raises(ValueError, match=r"got -1 for page 9 of sequence 1$"):
        tree_decode(problem.q, problem.k, problem.v, deterministic=SIZE, **problem.options)


@on_ranks(2)
def test_ranks_that_say_the_same_keys_are_refused(rank: int, world_size: int) -> None:
    problem = make_problem(seqlen_k=64)
    with pytest.raises(
        ValueError, match=r"no two ranks may hold keys of one block, got the blocks"
    ):
        tree_decode(problem.q, problem.k, problem.v, deterministic=SIZE)


@on_ranks(2)
def test_ranks_compare_once_while_the_cache_grows(rank: int, world_size: int) -> None:
    comm, layout = Communicator(), BlockCyclic(world_size, SIZE)
    whole = make_problem(seqlen_k=200)
    epochs = set()
    for length in (31, 32, 33, 100, 160, 200):
        problem = Problem(whole.q, whole.k[:, :, :length], whole.v[:, :, :length])
        decode(problem, layout, rank, group=comm)
        epochs.add(comm._session._agreement._epoch)
    assert len(epochs) == 1, "only the first call compares signatures through the store"


DISAGREEMENTS = {
    "deterministic": ({"deterministic": 32}, {"deterministic": 64}),
    "softmax_scale": ({"softmax_scale": 0.5}, {}),
    "softcap": ({}, {"softcap": 3.0}),
    "out_dtype": ({"out_dtype": torch.float16}, {}),
}


@on_ranks(2, fresh=True)
def test_ranks_that_disagree_are_refused(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    problem = make_problem(seqlen_k=64)
    for field, options in DISAGREEMENTS.items():
        shared = {"deterministic": SIZE, "key_layout": (64 * rank, 1, 1)}
        with pytest.raises(ExchangeError, match=f"{field}.* rank 1"):
            tree_decode(problem.q, problem.k, problem.v, **{**shared, **options[rank]})


def lose_rank_1(rank: int, world_size: int) -> float:
    torch.manual_seed(0)
    problem = make_problem(seqlen_k=64)
    comm = Communicator(timeout=TIMEOUT)
    options = {"deterministic": SIZE, "key_layout": (64 * rank, 1, 1), "group": comm}
    tree_decode(problem.q, problem.k, problem.v, timeout=AMPLE, **options)
    if rank == 1:
        os._exit(1)
    seconds, _ = failure(tree_decode, problem.q, problem.k, problem.v, **options)
    return seconds


def test_survivors_of_a_lost_rank_raise_in_time() -> None:
    for seconds in run_ranks(lose_rank_1, 3, lost={1})[::2]:
        assert seconds < TIMEOUT + SLACK


def test_blocks_longer_than_any_cache() -> None:
    problem = make_problem(seqlen_k=40, ranges="causal", seqlen_q=2)
    for size in (2**31, 2**40):
        problem.check(
            *tree_decode(problem.q, problem.k, problem.v, problem.key_ranges, deterministic=size)
        )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"key_layout": (0, 0, 0)}, r"key_layout must be \(first, block, stride\)"),
        ({"key_layout": (0, 1)}, r"key_layout must be \(first, block, stride\)"),
        ({"page_table": torch.tensor(3, dtype=torch.int32)}, "page_table must have shape"),
    ],
)  # fmt: skip
def test_what_lean_decode_refuses(options: dict, message: str) -> None:
    problem = make_problem(seqlen_k=100)
    with pytest.raises(ValueError, match=f"lean_decode: {message}"):
        tree_decode(
            problem.q, problem.k, problem.v, deterministic=SIZE, group=Communicator(), **options
        )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"deterministic": -1}, "must be an integer from 0 to 4611686018427387904, got -1"),
        ({"deterministic": True}, "must be an integer from 0 to .*, got True"),
        ({"deterministic": None}, "must be an integer from 0 to .*, got None"),
        ({"deterministic": 2**63}, "must be an integer from 0 to .*, got 922337203685"),
        ({"strategy": "butterfly"}, "with deterministic=32 strategy must be auto, got butterfly"),
        ({"payload_dtype": torch.bfloat16}, "payload_dtype must be torch.float32, got torch.bfl"),
        ({"head_sharded": True}, "head_sharded must be False, got True"),
        ({"key_layout": (0, 48, 96)}, r"cut at multiples of 32 global slots, got \(0, 48, 96\)"),
        ({"key_layout": (16, 1, 1)}, r"cut at multiples of 32 global slots, got \(16, 1, 1\)"),
    ],
)  # fmt: skip
def test_errors(options: dict, message: str) -> None:
    problem = make_problem(seqlen_k=100)
    with pytest.raises((TypeError, ValueError), match=f"tree_decode: .*{message}"):
        tree_decode(
            problem.q,
            problem.k,
            problem.v,
            **{"deterministic": SIZE, **options},
            group=Communicator(),
        )
