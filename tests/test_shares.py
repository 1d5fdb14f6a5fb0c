# SPDX-License-Identifier: BSD-3-Clause
"""Parts in proportion to shares, and the shares that callers give."""

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tree_attention.shares import ModelShares, parts
from tree_attention.weights.mesh import Mesh

shares_of_ranks = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any).map(tuple)


def dealt(granules: int, shares: tuple[int, ...]) -> list[int]:
    """Whole granules of each quota, and the others one by one to the largest remainder left."""
    quotas = [Fraction(granules * share, sum(shares)) for share in shares]
    sizes = [int(quota) for quota in quotas]
    while sum(sizes) < granules:
        left = [quota - size for quota, size in zip(quotas, sizes, strict=True)]
        sizes[left.index(max(left))] += 1
    return sizes


@given(st.integers(0, 3000), shares_of_ranks, st.sampled_from([1, 16, 64]))
def test_parts_follow_each_other_by_largest_remainders(size, shares, granule):
    found = parts(size, len(shares), shares, granule)
    assert found[0][0] == 0 and found[-1][1] == size
    assert [begin for begin, _ in found[1:]] == [end for _, end in found[:-1]]
    expected = dealt(size // granule, shares)
    last = max(rank for rank, share in enumerate(shares) if share)
    for rank, (begin, end) in enumerate(found):
        assert end - begin == granule * expected[rank] + (size % granule) * (rank == last)
        assert shares[rank] > 0 or begin == end
        assert begin % granule == 0 or begin == size


@given(st.integers(0, 3000), st.integers(1, 9))
def test_equal_parts_are_those_of_torch_and_of_slices_without_shares(size, count):
    heads = [len(x) for x in torch.arange(size).tensor_split(count)]
    assert [end - begin for begin, end in parts(size, count)] == heads
    each, more = divmod(size // 16, count)
    bounds = [16 * (i * each + min(i, more)) for i in range(count)] + [size]
    assert parts(size, count, granule=16) == list(pairwise(bounds))
    assert parts(size, count, (1,) * count, 16) == parts(size, count, granule=16)


def test_slices_of_long_axes_begin_where_numbers_of_4_bits_are_packed():
    mesh = Mesh(None, 1)
    mesh.world_size, mesh.shares = 3, ModelShares((5, 3, 1))
    for size, granule in ((14336, 64), (128256, 64), (4096, 64), (2048, 16), (14352, 16)):
        found = mesh.slices(size)
        assert all(begin % granule == 0 for begin, _ in found)
        assert all(
            abs(end - begin - size * share / 9) < granule + size % granule
            for (begin, end), share in zip(found, (5, 3, 1), strict=True)
        )
    mesh.shares = ModelShares()
    assert mesh.slices(4096) == [(0, 1376), (1376, 2736), (2736, 4096)]  # by 16, as ever


def test_a_list_is_for_all_and_a_mapping_for_each():
    assert ModelShares.of("op", None, 3) == ModelShares.of("op", [2, 2, 2], 3) == (None,) * 3
    assert ModelShares.of("op", [6, 2], 2) == ((3, 1),) * 3
    assert ModelShares.of("op", {"cache": [3, 1]}, 2) == (None, (3, 1), None)
    given = {"weights": torch.tensor([1, 0]), "cache": [2, 4], "prompt": None}
    assert ModelShares.of("op", given, 2) == ((1, 0), (1, 2), None)
    # Ranks of a context group share keys, and those of a tensor group heads.
    assert ModelShares.of("op", [3, 3, 1, 1], 4, 2) == ((3, 3, 1, 1), (3, 1), (3, 1))
    assert ModelShares.of("op", [3, 3], 2, 2) == (None,) * 3


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            [1, 2, 3],
            ValueError,
            "op: shares must be an integer from 0 to 1,024 for each of 4 ranks",
        ),
        ([1, 1, 1, 1025], ValueError, r"not all 0, got \[1, 1, 1, 1025\]"),
        ("fair", TypeError, "op: shares must be 'auto', or an integer for each of 4 ranks, got 'f"),
        (b"3111", TypeError, "op: shares must be an integer from 0 to"),
        ({"cache": [0] * 4}, ValueError, r"op: shares\['cache'\] must be .* not all 0, got \[0, 0"),
        ({"cache": [1.5] * 4}, TypeError, r"op: shares\['cache'\] must be an integer"),
        ({"keys": [1] * 4}, ValueError, "shares must be of weights, cache, prompt, got 'keys'"),
        ({3: 1}, ValueError, "shares must be of weights, cache, prompt, got 3"),
        (
            [3, 1, 3, 1],
            ValueError,
            r"op: shares must be equal for the 2 consecutive ranks of each tensor group, got",
        ),
    ],
)
def test_errors(given, error, message):
    with pytest.raises(error, match=message):
        ModelShares.of("op", given, 4, 2)
