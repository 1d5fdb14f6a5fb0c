# SPDX-License-Identifier: BSD-3-Clause
"""Shares for machines that differ, by arithmetic."""

import random
from dataclasses import replace
from itertools import product

import pytest

from tiers import tiers
from tree_attention.exchange import MeasuredHost
from tree_attention.planning.arithmetic import (
    FORMS,
    PROMPTS,
    SPLIT,
    SPLIT_BY_HEADS,
    WHOLE,
    Split,
    Work,
)
from tree_attention.planning.machines import LINKS, MACHINES, Hosts, Machine
from tree_attention.planning.measuring import as_machine
from tree_attention.planning.models import NAMED
from tree_attention.planning.unequal import Group, by_speed
from tree_attention.shares import EQUAL, ModelShares

BOTH = ModelShares((3, 1), (3, 1))
MODEL = NAMED["llama-3.1-8b"]


def machine(gigabytes: float, memory: float = 512e9, tflops: float = 1000.0) -> Machine:
    """A machine that reads so many GB/s."""
    return Machine(f"host of {gigabytes}", gigabytes * 1e9, tflops * 1e12, memory, "10gbe")


def group(
    *gigabytes, context=32, model=MODEL, form=SPLIT, size=1, memory=512e9, link="10gbe"
) -> Group:
    machines = tuple(machine(x, memory) for x in gigabytes)
    return Group(model, form, machines, LINKS[link], Work(context << 10), size)


@pytest.mark.parametrize(
    ("hosts", "context", "name", "weights", "alone", "even", "shares", "unequal", "left_out"),
    [
        ((60, 20), 32, "llama-3.1-8b", "bf16", 322, 538, ((3, 1), (15, 1)), 277, ()),
        ((60, 20), 128, "llama-3.1-8b", "bf16", 536, 860, ((3, 1), (4, 1)), 439, ()),
        ((60, 6), 32, "llama-3.1-8b", "bf16", 322, 1758, ((10, 1), (1, 0)), 487, (1,)),
        ((60, 6), 128, "llama-3.1-8b", "int4", 364, 1869, ((10, 1), (13, 1)), 354, ()),
        ((300, 60), 32, "llama-3.1-8b", "bf16", 64, 190, ((5, 1), (1, 0)), 80, (1,)),
        ((300, 300, 60), 32, "llama-3.1-8b", "bf16", 64, 141, ((5, 5, 1), (1, 1, 0)), 63, (2,)),
        ((60, 20), 32, "llama-3.1-70b", "bf16", 2496, 3863, ((3, 1), (7, 1)), 1958, ()),
        ((60, 60), 32, "llama-3.1-8b", "bf16", 322, 190, (None, None), 190, ()),
        ((60, 58), 32, "llama-3.1-8b", "bf16", 322, 196, (None, None), 196, ()),  # within 5 %
        ((20, 60), 32, "llama-3.1-8b", "bf16", 965, 538, ((1, 3), (1, 15)), 277, ()),
    ],
)
def test_shares_of_hosts(
    hosts, context, name, weights, alone, even, shares, unequal, left_out
) -> None:
    """By hand: the slowest rank's (copies + share * cache) / rate, and the slowest rank's share *
    rest / rate, and the exchanges of 10 GbE."""
    model = NAMED[name]
    model = replace(model, weights=model.weights.quantised(weights))
    found = group(*hosts, context=context, model=model)
    one = found.without(range(1, len(hosts)))
    assert round(1e3 * one.seconds) == alone and one.best == EQUAL
    assert round(1e3 * found.token_seconds(EQUAL)) == even
    assert found.best[:2] == shares and round(1e3 * found.seconds) == unequal
    assert found.unhelpful == left_out


def test_the_fastest_alone_may_be_faster_though_all_others_together_gain() -> None:
    """Two take longer than three, and than all four."""
    found = group(280, 300, 270, 290, link="1gbe")
    alone, two, three = (found.without(x).seconds for x in ((0, 2, 3), (0, 2), (2,)))
    assert alone < found.seconds < two and three < two
    assert found.unhelpful == (0, 2, 3)
    assert "rank 3 (host of 290) read 280, 270, 290 GB/s and rank 1 300: a tok" in found.advice
    # Of hosts that are alike, the last are left out.
    assert group(300, 300, link="1gbe").unhelpful == (1,)


def test_equal_hosts_stay_together_where_little_would_be_gained() -> None:
    """The others' memory and their part of the prompt are worth more than 1 % of a token."""
    machines = (MACHINES["cpu"],) * 8
    found = Group(NAMED["llama-3.2-1b"], PROMPTS, machines, LINKS["10gbe"], Work(32768))
    alone = found.without(range(1, 8)).seconds
    assert 0.95 * found.seconds < alone < found.seconds
    assert found.unhelpful == ()


def test_time_without_each_rank() -> None:
    found = group(60, 20, 20)
    each = [found.without([rank]).seconds for rank in range(3)]
    assert found.seconds_without == each and each[0] > each[1]
    groups = group(60, 60, 20, 60, size=2).seconds_without
    assert groups[0] == groups[1] > groups[2] == groups[3]
    tight = replace(found, machines=(*found.machines[:2], machine(20, 1e9)))
    assert group(60, 20, memory=12e9).seconds_without == [float("inf")] * 2
    assert tight.seconds_without[2] < float("inf")


def of_measured(*measured: tuple[float, float, float]) -> Group:
    """Hosts that read so many GB/s of keys and of weights and take so many ms more a layer."""
    found = [
        MeasuredHost(f"host {i}", keys * 1e9, weights * 1e9, 1e15, 512e9, 1e-3 * layer)
        for i, (keys, weights, layer) in enumerate(measured)
    ]
    machines = tuple(map(as_machine, found))
    return Group(MODEL, SPLIT, machines, LINKS["10gbe"], Work(32 << 10))


def test_a_token_takes_what_its_layers_take() -> None:
    fast = of_measured((60, 60, 0), (60, 60, 0))
    [one, other] = of_measured((60, 60, 0), (60, 30, 2)).each_token(BOTH)
    [_, without] = fast.each_token(BOTH)
    split = fast.split(BOTH, 1)
    # The input embedding is not read; its slice is as large as that of the head.
    weights = split.weights_bytes - MODEL.weights.embedding * 2 / 4
    assert other.local - without.local == pytest.approx(32 * 2e-3 + weights / 60e9)
    assert without.local == pytest.approx((weights + split.cache_bytes) / 60e9)
    assert one == fast.each_token(BOTH)[0] and other.exchange == without.exchange


def test_a_host_that_is_slow_in_small_operations_is_left_out() -> None:
    """It reads as fast as the other; a quarter or an eighth of the work would wait for it."""
    assert of_measured((60, 60, 0.1), (60, 60, 0.1)).unhelpful == ()
    some, many = (of_measured((60, 60, 0.1), (60, 60, layer)) for layer in (4, 12))
    assert some.unhelpful == () and some.best.weights is not None
    assert some.best.weights[0] > some.best.weights[1]
    assert many.unhelpful == (1,) and "host 1" in many.advice


def test_operations_that_come_with_measured_keys_are_not_counted_twice() -> None:
    slow = MeasuredHost("slow products", 60e9, 60e9, 1e9, 512e9, 0.0)
    work, hosts = Work(1 << 20), Hosts(as_machine(slow), LINKS["10gbe"])
    found = Split(MODEL, SPLIT, 1, work)
    head = MODEL.weights.total - MODEL.weights.embedding
    assert found.token_seconds(hosts).local == pytest.approx(2 * head / 1e9, rel=1e-3)
    more_heads = replace(MODEL, attention=(replace(MODEL.attention[0], heads=128),))
    more = 2 * 2 * (128 - 32) * 128 * 32 * (1 << 20) / 1e9
    seconds = replace(found, model=more_heads).token_seconds(hosts).local
    assert seconds == pytest.approx(2 * head / 1e9 + more, rel=1e-3)


def test_whole_weights_make_a_slow_host_unhelpful() -> None:
    found = group(60, 20, form=WHOLE)
    assert found.token_seconds(EQUAL) > found.seconds > found.without([1]).seconds
    assert found.unhelpful == (1,)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (group(60, 60), ""),
        (
            group(60, 6),
            "rank 1 (host of 6) reads 6 GB/s and rank 0 60: a token takes about 487 ms "
            "(15.6 ms in exchanges) with it and 322 ms without; start without it, or keep it for "
            "512 GB of memory",
        ),
        (
            group(60, 6, 6, form=WHOLE),
            "rank 1 (host of 6), rank 2 (host of 6) read 6, 6 GB/s and rank 0 60: a token takes "
            "about 2,507 ms (5.65 ms in exchanges) with them and 322 ms without, as every rank "
            "reads all 16.1 GB of weights for each token; start without them, or keep them for "
            "1,024 GB of memory",
        ),
        (
            group(60, 20, form=WHOLE),
            "rank 1 (host of 20) reads 20 GB/s and rank 0 60: a token takes about 756 ms (5.22 ms "
            "in exchanges) with it and 322 ms without, as every rank reads all 16.1 GB of weights "
            "for each token; split the weights with from_pretrained, or start without it",
        ),
        (
            Group(MODEL, SPLIT, (machine(60), machine(20, 1e9)), LINKS["10gbe"], Work(32 << 10)),
            "rank 1 (host of 20) reads 20 GB/s and rank 0 60: the model does not fit into memory "
            "with it, and a token takes about 322 ms without; start without it, or keep it for 1 GB"
            " of memory",
        ),
    ],
)
def test_advice_on_slow_machines(found, says) -> None:
    """Also where a machine has no memory for what every rank has a copy of."""
    assert found.advice == says.partition(";")[0]
    assert not says or found.what_to_do == says.partition("; ")[2]


def test_a_tensor_group_has_equal_shares() -> None:
    found = group(60, 60, 20, 60, size=2)
    assert found.best.weights == (3, 3, 1, 1)  # as slow as its slower rank
    assert found.best.cache is not None and len(found.best.cache) == 2
    assert group(60, 20, size=2).best == EQUAL  # of one tensor group
    assert group(60, 60, 6, 6, size=2).unhelpful == (2, 3)


def test_memory_limits_shares() -> None:
    # 15 GB of weights and 4 GB of keys; the slow host has room, and the fast one for half.
    machines = machine(60, 12e9), machine(20, 64e9)
    found = Group(MODEL, SPLIT, machines, LINKS["10gbe"], Work(32 << 10))
    fast, slow = (found.split(found.best, rank).held_bytes for rank in range(2))
    assert 0.9 * 12e9 > fast > 0.85 * 0.9 * 12e9 and fast + slow > 19e9
    even = replace(found, machines=(machine(60, 12e9), machine(60, 64e9)))
    assert even.best.weights is None and even.best.cache is not None
    assert even.best.cache[0] < even.best.cache[1]


@pytest.mark.parametrize("seed", tiers([0], range(1, 6)))
def test_no_pair_of_small_shares_is_much_faster(seed: int) -> None:
    """Hosts of random speed, arithmetic and memory, of which many have too little for an even
    part."""
    rng, is_limited = random.Random(seed), 0
    counts = [(a, b) for a, b in product(range(7), repeat=2) if 0 < a + b <= 6]
    for _ in range(8):
        model = NAMED[rng.choice(["llama-3.1-8b", "qwen3-30b-a3b", "glm-4.7-flash"])]
        rates = [10 ** rng.uniform(0.7, 2.3) for _ in range(2)]
        rooms = [model.weights.num_bytes * rng.uniform(0.4, 1.6) for _ in range(2)]
        machines = tuple(
            machine(rate, room, rate * 10 ** rng.uniform(-2.5, -0.5))
            for rate, room in zip(rates, rooms, strict=True)
        )
        work = Work(rng.choice([8, 32, 128]) << 10)
        found = Group(model, SPLIT, machines, LINKS["10gbe"], work)
        pairs = [ModelShares(weights, cache) for weights, cache in product(counts, repeat=2)]
        times = [found.token_seconds(shares) for shares in pairs if found.fits(shares)]
        if times:  # then it raises nothing
            assert found.fits(found.best)
            assert found.seconds <= 1.1 * min(times), (machines, found.best)
            is_limited += len(times) < len(pairs)
    assert is_limited


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ((1e9, 1e9), r"rank 0 \(host of 60\) needs 1,\d{3},\d{3},\d{3} bytes whatever its share"),
        ((64e9, 1e9), r"rank 1 \(host of 20\) needs .* whatever .* 90% of its memory are 900,"),
        ((9e9, 9e9), r"rank \d \(.*\) needs [\d,]+ bytes with the shares that need least of all"),
    ],
)
def test_too_little_memory_names_rank_and_bytes(memory, says) -> None:
    machines = machine(60, memory[0]), machine(20, memory[1])
    found = Group(MODEL, SPLIT, machines, LINKS["10gbe"], Work(32 << 10))
    with pytest.raises(ValueError, match="the model fits under no shares: " + says):
        found.best  # noqa: B018
    one = found.without([1])
    if memory[0] < 10e9:
        with pytest.raises(ValueError, match="fits under no shares: rank 0"):
            one.best  # noqa: B018


@pytest.mark.parametrize(("form", "p"), list(product(FORMS, (2, 3, 4, 8))))
def test_equal_shares_are_the_arithmetic_of_equal_machines(form, p) -> None:
    even = Split(MODEL, form, p, Work(40_000))
    hosts = Hosts(machine(60, tflops=1.0), LINKS["10gbe"])
    for rank in range(p):
        of_cache = (3,) * (p // even.tensor_parallel_size)
        same = replace(even, shares=ModelShares((3,) * p, of_cache, of_cache), rank=rank)
        for value in ("weights_bytes", "cache_bytes", "token_bytes"):
            assert getattr(same, value) == pytest.approx(getattr(even, value))
        for seconds in ("token_seconds", "prefill_seconds"):
            a, b = (getattr(x, seconds)(hosts) for x in (same, even))
            assert (a.local, a.exchange) == pytest.approx((b.local, b.exchange))


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_ranks_add_up(form) -> None:
    """What is split is there once, whatever the shares are, and a rank without any has copies."""
    split = Split(MODEL, form, 4, Work(40_000), size=2 if form == SPLIT_BY_HEADS else None)
    size = split.tensor_parallel_size
    given = (3, 3, 0, 0) if size > 1 else (3, 2, 0, 1)
    shares = ModelShares.of("test", given, 4, size)
    ranks = [replace(split, shares=shares, rank=rank) for rank in range(4)]
    assert ranks[2].cache_bytes == 0
    total = sum(rank.cache_bytes for rank in ranks)
    assert total == pytest.approx(sum(4 * [split.cache_bytes]))
    total = sum(rank.weights_bytes for rank in ranks)
    assert total == pytest.approx(4 * split.weights_bytes)
    assert (ranks[0].weights_bytes > ranks[2].weights_bytes) == split.has_split_weights


def test_work_by_speed() -> None:
    assert by_speed([3e12, 1e12]) == (3, 1)
    assert by_speed([1e12, 1.04e12]) is None
    assert by_speed([5e12]) is None
    assert by_speed([1e13, 1e11]) == (1, 0)
