# SPDX-License-Identifier: BSD-3-Clause
"""The cache manager: what sequences read through their tables is what they wrote."""

import pytest
import torch
from torch.testing import assert_close

from lab.papers.survey.paging import Manager, OutOfBlocks, Pool
from lab.papers.survey.waste import KINDS, RESERVATIONS, paged_memory, reserved_memory
from tree_attention import lean_decode
from tree_attention.reference.accuracy import check_against_float64

HEADS, BLOCK, D = 2, 4, 8


def manager(num_blocks=16, host=16):
    pools = [Pool(n, HEADS, BLOCK, D) for n in (num_blocks, host)]
    for pool in pools:  # what nobody has written must not be read
        pool.k.fill_(torch.nan)
        pool.v.fill_(torch.nan)
    return Manager(*pools)


def rows(tokens):
    """Keys and values that depend on all tokens up to theirs, as those of a model do."""
    parts = []
    for end in range(1, len(tokens) + 1):
        seed = hash(tuple(tokens[:end])) % 2**31
        parts.append(torch.randn(2, HEADS, D, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(parts, dim=2)


def start(cache, prompt):
    sequence, known = cache.start(prompt)
    cache.write(sequence, known, *rows(prompt)[:, :, known:])
    return sequence, known


def append(cache, sequence, token):
    cache.append(sequence, token)
    last = len(sequence.tokens) - 1
    cache.write(sequence, last, *rows(sequence.tokens)[:, :, last:])


def check(cache, *sequences):
    """Attention of a query over each table is attention over the rows themselves."""
    q = torch.randn(len(sequences), HEADS, 1, D, generator=torch.Generator().manual_seed(0))
    lengths = [len(sequence.tokens) for sequence in sequences]
    ranges = torch.tensor([[[0, length]] for length in lengths], dtype=torch.int32)
    o, lse = lean_decode(
        q, cache.device.k, cache.device.v, ranges, page_table=cache.page_table(sequences)
    )
    for b, sequence in enumerate(sequences):
        k, v = rows(sequence.tokens)[:, None]
        one = slice(b, b + 1)
        assert check_against_float64(q[one], k, v, None, o[one], lse[one]).right


def test_sequences_in_blocks_of_one_pool():
    cache = manager()
    sequences = [start(cache, list(range(10, 10 + n)))[0] for n in (1, 4, 7)]
    for token in range(9):
        for sequence in sequences:
            append(cache, sequence, token)
    check(cache, *sequences)
    used = [index for sequence in sequences for index in sequence.table]
    assert [len(sequence.table) for sequence in sequences] == [3, 4, 4]
    cache.free(sequences[0])
    assert len(cache.device.free) == 16 - len(set(used)) + 3 - len(
        set(sequences[1].table) & set(used[:3])
    )


def test_a_known_prefix_is_not_computed_again():
    cache = manager()
    first, known = start(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert known == 0
    second, known = start(cache, [1, 2, 3, 4, 5, 6, 7, 8, 10, 11])
    assert known == 8 and second.table[:2] == first.table[:2]
    other, known = start(cache, [2, 2, 3, 4, 5, 6, 7, 8, 9])
    assert known == 0, "the same tokens behind other ones have other keys"
    same, known = start(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert known == 4, "the last token's output is wanted, so it is computed"
    check(cache, first, second, other, same)
    for sequence in (first, second, other, same):
        cache.free(sequence)
    assert len(cache.device.free) == 16 and not cache.device.of_tokens
    assert start(cache, [1, 2, 3, 4, 5])[1] == 0, "freed blocks are not found"


def test_a_fork_copies_the_block_that_it_writes():
    cache = manager()
    parent, _ = start(cache, [1, 2, 3, 4, 5, 6])
    child = cache.fork(parent)
    assert child.table == parent.table and len(cache.device.free) == 14
    append(cache, child, 8)
    append(cache, parent, 9)
    assert child.table[0] == parent.table[0] and child.table[1] != parent.table[1]
    assert len(cache.device.free) == 13, "the parent holds its last block alone now"
    check(cache, parent, child)


def test_swapped_sequences_come_back():
    cache = manager(num_blocks=4)
    first, _ = start(cache, [1, 2, 3, 4, 5, 6])
    second, _ = start(cache, [1, 2, 3, 4, 7, 8, 9, 10])
    assert first.table[0] == second.table[0]
    append(cache, second, 11)
    with pytest.raises(OutOfBlocks, match="2 blocks are asked for, and 0 are free"):
        cache.start([9, 9, 9, 9, 9])
    assert len(cache.device.free) == 0
    cache.swap(second)
    assert len(cache.device.free) == 2, "the shared block stays for the other one"
    third, _ = start(cache, [9, 9, 9, 9, 9])
    check(cache, first, third)
    with pytest.raises(OutOfBlocks):
        cache.swap(second)
    cache.free(third)
    cache.free(first)
    cache.swap(second)
    append(cache, second, 12)
    check(cache, second)
    assert len(cache.host.free) == 16


SIZES = {"slots": 16_384, "largest": 2048, "steps": 2000, "seed": 0}


@pytest.mark.parametrize("name", [*RESERVATIONS, "blocks of 16"])
def test_every_slot_is_of_one_kind(name):
    if name in RESERVATIONS:
        shares = reserved_memory(RESERVATIONS[name], **SIZES)
    else:
        shares = paged_memory(16, **SIZES)
    assert list(shares) == list(KINDS) and all(x >= 0 for x in shares.values())
    assert_close(sum(shares.values()), 1.0, rtol=1e-12, atol=0)
    if name == "the final length, known ahead":
        assert shares["internal"] == 0 and shares["reserved"] > 0
    if name == "the largest length":
        assert shares["external"] == 0, "equal reservations leave no gaps"
        assert shares["internal"] > 0.4
    if name == "blocks of 16":
        assert shares["used"] > 0.9 and shares["reserved"] + shares["internal"] < 0.05


def test_blocks_waste_less_than_any_reservation():
    used = [reserved_memory(reserve, **SIZES)["used"] for reserve in RESERVATIONS.values()]
    assert used == sorted(used)
    assert paged_memory(16, **SIZES)["used"] > used[-1] + 0.1
    assert paged_memory(256, **SIZES)["used"] < paged_memory(16, **SIZES)["used"]
