# SPDX-License-Identifier: BSD-3-Clause
"""The keys that an index chooses, against the definition in float64.

Integers of few bits have scores without rounding, many of which are equal: the choice is then
compared exactly. Other numbers have the bound of the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from instruction_sets import QUICK, supported, use
from tiers import tiers
from tree_attention import index_topk, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = torch.nan, torch.inf


@pytest.fixture(params=tiers(QUICK, [name for name in supported() if name not in QUICK]))
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with use(request.param):
        yield request.param


def integers(*shape: int, seed: int = 0, most: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ranges(batch: int, seqlen_q: int, seqlen_k: int, seed: int = 0) -> Tensor:
    """Some empty, some beyond the keys."""
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.randint(-4, seqlen_k + 5, (batch, seqlen_q, 2), generator=generator)
    bounds[0, 0] = torch.tensor([-3, seqlen_k + 3])
    return bounds.int()


Problem = tuple[Tensor, Tensor, Tensor | None, Tensor | None, dict[str, Any]]
# batch, num_heads, seqlen_q, seqlen_k, head_dim, and options
PROBLEMS: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    "one token": ((1, 64, 1, 400, 128), {"topk": 50}),
    "16 heads": ((2, 16, 2, 150, 64), {"topk": 20}),
    "4 heads": ((1, 4, 3, 130, 128), {"topk": 10}),
    "odd": ((3, 37, 2, 101, 33), {"topk": 7}),
    "many heads": ((1, 130, 1, 70, 20), {"topk": 3}),
    "9 heads of 1 column": ((1, 9, 2, 40, 1), {"topk": 5}),
    "many tokens": ((2, 5, 40, 90, 16), {"topk": 12}),
    "one key": ((1, 3, 2, 1, 8), {"topk": 2}),
    "no keys": ((2, 3, 1, 0, 8), {"topk": 2}),
    "more than there are": ((1, 2, 2, 30, 8), {"topk": 100}),
    "scale": ((1, 10, 2, 60, 8), {"topk": 9, "scale": -0.5}),
    "blocks": ((2, 4, 3, 200, 16), {"topk": 6, "block": 8}),
    "local blocks": ((1, 4, 20, 100, 16), {"topk": 4, "block": 7, "local_blocks": 2}),
    "more local blocks": ((1, 12, 3, 50, 16), {"topk": 2, "block": 4, "local_blocks": 5}),
}


def problem(name: str, dtype: torch.dtype, weighted: bool, values: Callable[..., Tensor]) -> Any:
    """NaN wherever nothing may be read."""
    (batch, num_heads, seqlen_q, seqlen_k, head_dim), options = PROBLEMS[name]
    q = values(batch, seqlen_q, num_heads, head_dim, seed=1).to(dtype).transpose(1, 2)
    k = torch.full((batch, 1, seqlen_k + 3, head_dim + 2), NAN, dtype=dtype)[:, :, 1:-2, :-2]
    key_ranges = ranges(batch, seqlen_q, seqlen_k)
    drawn = values(batch, 1, seqlen_k, head_dim, seed=2).to(dtype)
    if values is integers:  # equal keys tie
        drawn = drawn[:, :, torch.arange(seqlen_k) % 13]
    for b in range(batch):
        for begin, end in key_ranges[b].clamp(min=0):
            k[b, :, begin:end] = drawn[b, :, begin:end]
    weights = values(num_heads, batch, seqlen_q, seed=3).transpose(0, 1) if weighted else None
    slots = torch.arange(seqlen_k) * 2 + torch.arange(seqlen_k) // 3
    options = options | {"key_slots": slots.int()}
    if "local_blocks" in options:
        generator = torch.Generator().manual_seed(5)
        positions = torch.randint(0, 2 * seqlen_k, (batch, seqlen_q), generator=generator)
        options["query_positions"] = positions
    return (q, k, weights, key_ranges), options


@pytest.mark.parametrize("weighted", tiers([True], [False]))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_choices_are_exact_where_scores_are(
    name: str, dtype: torch.dtype, weighted: bool, instruction_set: str
) -> None:
    arguments, options = problem(name, dtype, weighted, integers)
    expected, slots = reference.index_topk(*arguments, **options)
    if expected.isfinite().sum() > 20:
        assert (expected.diff() == 0).any(), "nothing ties"
    for num_workers in (-1, 0, 5):
        found = index_topk(*arguments, **options, num_workers=num_workers)
        assert found[0].dtype == torch.float32 and found[1].dtype == torch.int32
        assert torch.equal(found[0].double(), expected), num_workers
        assert torch.equal(found[1], slots), num_workers
    assert torch.equal(found[0].signbit(), found[0] < 0), "-0 is 0"


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_how_heads_are_cut(dtype: torch.dtype, instruction_set: str) -> None:
    """As many workers as leave each one a few of the 64 heads."""
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, n, m, 64, generator=generator).to(dtype) for n, m in ((64, 1), (1, 700)))
    found = [index_topk(q, k, topk=350, num_workers=n) for n in (1, 16, 17, 64)]
    for scores, slots in found[1:]:
        assert torch.equal(scores, found[0][0]) and torch.equal(slots, found[0][1])


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", tiers(["16 heads", "4 heads", "blocks"], ["one token", "odd"]))
def test_error_of_scores(
    name: str, dtype: torch.dtype, weighted: bool, instruction_set: str
) -> None:
    (q, k, weights, key_ranges), options = problem(name, dtype, weighted, normal)
    options |= {"topk": k.shape[2], "scale": 0.3}
    scores, slots = index_topk(q, k, weights, key_ranges, **options)
    expected, slots_expected = reference.index_topk(q, k, weights, key_ranges, **options)
    size = reference.index_topk(
        q.abs(), k.abs(), None if weights is None else weights.abs(), key_ranges, **options
    )
    bound = (q.shape[3] + q.shape[1] + 8) * 2.0**-24

    def by_slot(choice: tuple[Tensor, Tensor]) -> Tensor:
        order = choice[1].sort(stable=True).indices
        return choice[0].double().gather(-1, order)

    assert torch.equal(slots.sort().values, slots_expected.sort().values)
    found, true, sizes = map(by_slot, ((scores, slots), (expected, slots_expected), size))
    is_there = true.isfinite()
    assert is_there.any() and torch.equal(is_there, found.isfinite())
    assert ((found - true).abs() <= bound * sizes)[is_there].all()
    assert (scores.diff().nan_to_num(0) <= 0).all()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("num_heads, head_dim", [(3, 96), (7, 128), (16, 96), (64, 96)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_score_depend_on_query_weights_and_key_alone(
    dtype: torch.dtype, num_heads: int, head_dim: int, weighted: bool, instruction_set: str
) -> None:
    seqlen_k = 205
    q = normal(2, num_heads, 3, head_dim, seed=1).to(dtype)
    k = normal(2, 1, seqlen_k, head_dim, seed=2).to(dtype)
    weights = normal(2, num_heads, 3, seed=3) if weighted else None

    def scores_of(b: int, t: int, begin: int, end: int, **options: Any) -> Tensor:
        """In the order of keys."""
        w = None if weights is None else weights[b, None, :, t, None]
        scores, slots = index_topk(
            q[b, None, :, t, None], k[b, None, :, begin:end], w, topk=end - begin, **options
        )
        return scores.gather(-1, slots.sort().indices)[0, :, 0]

    scores, slots = index_topk(q, k, weights, topk=seqlen_k)
    whole = scores.gather(-1, slots.sort().indices)
    for b, t in ((0, 0), (1, 2)):
        for begin, end in ((0, seqlen_k), (7, 8), (3, 100), (64, 133), (204, 205)):
            found = scores_of(b, t, begin, end, num_workers=3)
            assert torch.equal(found, whole[b, :, t, begin:end]), (begin, end)
    # In pages, in another order.
    pages = k[:, :, :204].unflatten(2, (17, 12)).flatten(0, 2)[:, None]
    table = torch.stack([torch.randperm(17), 17 + torch.randperm(17)]).int()
    scores, slots = index_topk(q, pages, weights, topk=204, page_table=table)
    in_pages = scores.gather(-1, slots.sort().indices)
    for b in range(2):
        rows = ((table[b, :, None] - 17 * b) * 12 + torch.arange(12)).flatten()
        assert torch.equal(in_pages[b], whole[b][..., rows])


def test_pages_are_counted_along_the_table(instruction_set: str) -> None:
    pages = torch.full((9, 1, 4, 8), NAN)
    table = torch.tensor([[3, 1, 7, 99], [0, 8, 99, -1]], dtype=torch.int32)
    key_ranges = torch.tensor([[[1, 11]], [[0, 8]]], dtype=torch.int32)
    pages[[3, 1, 7, 0, 8]] = integers(5, 1, 4, 8)
    pages[3, 0, 0] = pages[7, 0, 3] = NAN  # outside of the ranges
    q, weights = integers(2, 5, 1, 8, seed=1), integers(2, 5, 1, seed=2)
    scores, slots = index_topk(q, pages, weights, key_ranges, topk=20, page_table=table)
    expected = reference.index_topk(
        q, pages, weights, key_ranges, topk=20, page_table=table.clamp(0, 8)
    )
    assert torch.equal(scores.double(), expected[0]) and torch.equal(slots, expected[1])
    assert (slots[0] >= 0).sum() == 10 and not scores.isnan().any()


@pytest.mark.parametrize("num_heads", [2, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite(
    dtype: torch.dtype, num_heads: int, instruction_set: str
) -> None:
    """NaN comes first and stays with its key; a visible key of -inf is a key."""
    q = torch.ones(1, num_heads, 1, 34, dtype=dtype)
    k = torch.zeros(1, 1, 80, 34, dtype=dtype)
    k[0, 0, 30, 5], k[0, 0, 70, 33], k[0, 0, 9, 0], k[0, 0, 8, 0] = NAN, NAN, INF, -INF
    weights = torch.full((1, num_heads, 1), 0.5)
    scores, slots = index_topk(q, k, weights, topk=5)
    assert slots.flatten().tolist() == [30, 70, 9, 0, 1]
    assert scores[0, 0, 0, :2].isnan().all() and scores.flatten().tolist()[2:] == [INF, 0, 0]
    scores, slots = index_topk(q, k, -weights, topk=81)
    assert slots.flatten().tolist()[-2:] == [9, -1]
    assert scores.flatten().tolist()[-2:] == [-INF, -INF]
    scores, slots = index_topk(q, k, topk=80)
    assert slots.flatten().tolist()[-1] == 8 and scores.flatten().tolist()[-1] == -INF
    # Of a block NaN is the largest.
    scores, slots = index_topk(q, k, weights, topk=3, block=10)
    assert slots.flatten().tolist() == [3, 7, 0] and scores[0, 0, 0, :2].isnan().all()


def test_negative_zero_is_zero(instruction_set: str) -> None:
    for num_heads in (1, 20):
        q, k = torch.ones(1, num_heads, 1, 8), -torch.ones(1, 1, 70, 8)
        k[0, 0, 3] = k[0, 0, 40] = 0
        scores, slots = index_topk(q, k, -torch.ones(1, num_heads, 1), topk=4)
        assert slots.flatten().tolist() == [0, 1, 2, 3] and not scores.signbit().any()
        scores, slots = index_topk(q, k, topk=2, scale=-0.0)
        assert slots[0, 0, 0].tolist() == [0, 1] and not scores.signbit().any()


@pytest.mark.parametrize("order", ["rising", "falling", "equal", "nan"])
@pytest.mark.parametrize("topk", tiers([1, 300], [7, 64, 1000]))
def test_choices_of_many_keys_in_any_order(order: str, topk: int) -> None:
    """The choice drops what is not among the first topk again and again."""
    k = torch.arange(3000.0)
    k = {"rising": k, "falling": -k, "equal": k * 0, "nan": k * NAN}[order]
    q, k = torch.ones(1, 1, 1, 1), k.view(1, 1, -1, 1).clone()
    _, slots = index_topk(q, k, topk=topk, num_workers=-1)
    expected = torch.arange(topk)
    expected = 2999 - expected if order == "rising" else expected
    assert torch.equal(slots.flatten().long(), expected)


def test_local_blocks_that_cannot_all_be_chosen() -> None:
    """Of blocks with the same score those behind the first topk are not even formed."""
    q, k, positions = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 9, 4), torch.tensor([[2**31 - 1]])
    k[0, 0, 4] = NAN  # of a local block, whose score is +inf whatever its keys
    scores, slots = index_topk(
        q, k, topk=5, block=2, local_blocks=2**31 - 1, query_positions=positions
    )
    assert slots.flatten().tolist() == [0, 1, 2, 3, 4] and (scores == INF).all()


def test_heads_that_are_done_in_turn_choose_the_same() -> None:
    """Many heads that choose for themselves are done in turn, with the same result."""
    q, k = integers(1, 40, 2, 4), integers(1, 1, 500, 4, seed=1)
    scores, slots = index_topk(q, k, topk=200_000)
    expected = reference.index_topk(q[:, 37:], k, topk=500)
    assert torch.equal(scores[:, 37:, :, :500].double(), expected[0])
    assert torch.equal(slots[:, 37:, :, :500], expected[1])
    assert (slots[..., 500:] == -1).all() and (scores[..., 500:] == -INF).all()
