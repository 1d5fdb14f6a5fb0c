# SPDX-License-Identifier: BSD-3-Clause
"""merge_states: the algebra that threads, CTAs and ranks share."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from helpers import INF, NAN, assert_same_bits
from tree_attention import merge_states, reference

OP = "merge_states"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def states(n, shape=(3, 5), head_dim=16, *, empty=0.0, spread=3.0, dtype=torch.float32):
    """`n` random partial states; a fraction `empty` of them is empty, with NaN for `o`."""
    o, lse = torch.randn(n, *shape, head_dim).to(dtype), torch.randn(n, *shape) * spread
    lse[torch.rand(lse.shape) < empty] = -INF
    o[lse == -INF] = NAN
    return o, lse


def check(o_parts, lse_parts, out_dtype=None):
    """Against float64: each of the tree's levels may round a weight and a sum."""
    o, lse = merge_states(o_parts, lse_parts, out_dtype=out_dtype)
    assert o.dtype == (out_dtype or o_parts.dtype) and lse.dtype == torch.float32
    o_true, lse_true = reference.merge_states(o_parts.cpu(), lse_parts.cpu())
    levels = math.ceil(math.log2(len(lse_parts)))
    eps = torch.finfo(torch.float32).eps
    largest = o_parts.cpu().double().nan_to_num(0).abs().amax(0)
    rounding = torch.finfo(o.dtype).eps * o_true.abs() / 2
    assert ((o.cpu() - o_true).abs() <= 4 * levels * eps * largest + rounding).all()
    empty = lse_true == -INF
    assert torch.equal(lse.cpu() == -INF, empty)
    assert (o[empty.to(o.device)] == 0).all()
    error = (lse.cpu() - lse_true)[~empty].abs()
    assert (error <= 2 * levels * eps * lse_true[~empty].abs().clamp(min=1) + eps).all()
    return o, lse


@by_dtype
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 13, 16, 33, 64, 100])
def test_merge_equals_reference(n, dtype, device):
    o_parts, lse_parts = states(n, empty=0.3, dtype=dtype)
    assert n < 3 or ((lse_parts == -INF).any() and (lse_parts > -INF).any())
    check(o_parts.to(device), lse_parts.to(device))


@by_dtype
@pytest.mark.parametrize("out_dtype", DTYPES, ids=lambda dtype: f"to {str(dtype)[6:]}")
def test_out_dtype_is_rounded_once(dtype, out_dtype, device):
    o_parts, lse_parts = (x.to(device) for x in states(5, dtype=dtype))
    o, lse = check(o_parts, lse_parts, out_dtype)
    in_float32 = merge_states(o_parts, lse_parts, out_dtype=torch.float32)
    assert_same_bits((o, lse), (in_float32[0].to(out_dtype), in_float32[1]))


@by_dtype
def test_out_gets_the_bits_of_new_tensors(dtype, device):
    o_parts, lse_parts = (x.to(device) for x in states(6, (3, 4), 16, empty=0.4))
    expected = merge_states(o_parts, lse_parts, out_dtype=dtype)
    out = torch.full_like(expected[0], NAN), torch.full_like(expected[1], NAN)
    assert merge_states(o_parts, lse_parts, out=out) is out
    assert_same_bits(out, expected)
    with pytest.raises(ValueError, match="merge_states: o must not share memory with o_parts"):
        merge_states(o_parts, lse_parts, out=(o_parts[0], out[1]))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (2, 3, 4), (0,), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [1, 3, 64, 130])
def test_any_number_of_axes(shape, head_dim, device):
    o_parts, lse_parts = (x.to(device) for x in states(3, shape, head_dim))
    o, lse = check(o_parts, lse_parts)
    assert o.shape == (*shape, head_dim) and lse.shape == shape


def test_strided_parts_give_the_same_bits(device):
    o_parts, lse_parts = (x.to(device) for x in states(5, (3, 4), 16, empty=0.2))
    expected = merge_states(o_parts, lse_parts)
    # A receive buffer of one packed message [rows * head_dim | rows] from each rank.
    buffer = torch.cat([o_parts.flatten(1), lse_parts.flatten(1)], 1)
    packed = buffer[:, : 12 * 16].view(5, 3, 4, 16), buffer[:, 12 * 16 :].view(5, 3, 4)
    assert packed[0].data_ptr() == buffer.data_ptr() and packed[0].stride(0) == 12 * 17
    assert_same_bits(merge_states(*packed), expected)
    transposed = o_parts.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    lse_transposed = lse_parts.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert_same_bits(merge_states(transposed, lse_transposed), expected)
    repeated = merge_states(o_parts[:1].expand(4, -1, -1, -1), lse_parts[:1].expand(4, -1, -1))
    four = merge_states(o_parts[:1].repeat(4, 1, 1, 1), lse_parts[:1].repeat(4, 1, 1))
    assert_same_bits(repeated, four)


@pytest.mark.parametrize("n", range(1, 34))
def test_aligned_groups_first_gives_the_same_bits(n, device):
    """A flat gather, a butterfly and a hierarchy with 2^k ranks in a node agree in every bit."""
    o_parts, lse_parts = (x.to(device) for x in states(n, empty=0.2))
    flat = merge_states(o_parts, lse_parts)
    for size in (2, 4, 8, 16):
        nodes = [
            merge_states(o_parts[i : i + size], lse_parts[i : i + size]) for i in range(0, n, size)
        ]
        assert_same_bits(merge_states(*map(torch.stack, zip(*nodes, strict=True))), flat)
    if n == 33:  # groups of three are not subtrees: the order does matter for the bits
        thirds = [merge_states(o_parts[i : i + 3], lse_parts[i : i + 3]) for i in range(0, n, 3)]
        o, _ = merge_states(*map(torch.stack, zip(*thirds, strict=True)))
        assert not torch.equal(o, flat[0])
        assert_close(o, flat[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", range(1, 18))
def test_bits_equal_the_pairwise_loop(n, device):
    """merge of two, applied over doubling steps, is the whole definition."""
    o_parts, lse_parts = (x.to(device) for x in states(n, empty=0.2))
    parts, step = [(o_parts[i], lse_parts[i]) for i in range(n)], 1
    if n == 1:
        parts[0] = merge_states(o_parts, lse_parts)
    while step < n:
        for i in range(0, n - step, 2 * step):
            pair = zip(parts[i], parts[i + step], strict=True)
            parts[i] = merge_states(*map(torch.stack, pair))
        step *= 2
    assert_same_bits(merge_states(o_parts, lse_parts), parts[0])


def test_empty_part_changes_no_bit(device):
    """Signed zeros, subnormals and NaN payloads included: it is left out, not multiplied by 0."""
    o = torch.tensor([[-0.0, 0.0, 1e-45, -1.0], [3e38, 1e-38, -0.0, 7.0]], device=device)
    lse = torch.tensor([-0.0, 1e30], device=device)
    empty = torch.full_like(o, NAN), torch.full_like(lse, -INF)
    for count in (1, 2, 3, 4):
        for place in range(count + 1):
            parts = [empty] * count
            parts.insert(place, (o, lse))
            assert_same_bits(merge_states(*map(torch.stack, zip(*parts, strict=True))), (o, lse))


def test_all_empty_is_empty(device):
    for n in (1, 2, 3, 8):
        o_parts = torch.full((n, 4, 8), NAN, device=device)
        o, lse = merge_states(o_parts, torch.full((n, 4), -INF, device=device))
        assert (o == 0).all() and not o.signbit().any() and (lse == -INF).all()


def test_nan_stays_in_its_row(device):
    o_parts, lse_parts = states(5, (6,), 8)
    clean = merge_states(o_parts, lse_parts)
    lse_parts[2, 0] = NAN
    lse_parts[:, 1] = -INF
    lse_parts[4, 1] = NAN
    o_parts[3, 2, 5] = NAN  # of a part that is not empty: one element
    o, lse = (x.cpu() for x in merge_states(o_parts.to(device), lse_parts.to(device)))
    assert lse.isnan().tolist() == [True, True, False, False, False, False]
    assert o[0].isnan().all()
    assert o[2].isnan().tolist() == [i == 5 for i in range(8)]
    if device.type == "cpu":
        assert_same_bits((o[3:], lse[3:]), (clean[0][3:], clean[1][3:]))


def test_plus_infinity_gives_nan(device):
    """No sum of exponentials is infinite: a producer's fault does not pass for a result."""
    o_parts, lse_parts = states(3, (2,), 4)
    lse_parts[1, 0] = INF
    o, lse = (x.cpu() for x in merge_states(o_parts.to(device), lse_parts.to(device)))
    assert o[0].isnan().all() and lse[0].isnan()
    assert o[1].isfinite().all() and lse[1].isfinite()


@pytest.mark.parametrize("size", [0.0, 1e4, -1e4, 1e30, -1e30])
def test_weights_sum_to_one_at_any_lse(size, device):
    lse_parts = torch.tensor([size] * 4, device=device)
    o_parts = torch.full((4, 3), 2.0, device=device)
    o, lse = merge_states(o_parts, lse_parts)
    assert (o == 2).all()
    assert_close(lse.item(), size + math.log(4), rtol=1e-7, atol=1e-7)


def test_distant_lse_takes_the_larger_part(device):
    o_parts = torch.tensor([[1.0, -5.0], [3.0, 7.0]], device=device)
    for lse in ([0.0, 2e4], [-1e30, 1e30], [-3e38, 3e38]):
        for flip in (False, True):
            parts = o_parts, torch.tensor(lse, device=device)
            merged = merge_states(*(x.flip(0) if flip else x for x in parts))
            assert_same_bits(merged, (o_parts[1], parts[1][1]))


n_parts = st.integers(1, 40)
seeds = st.integers(0, 2**31)
emptiness = st.sampled_from([0.0, 0.3, 0.9])


@given(seeds, n_parts, emptiness, st.sampled_from([0.0, 1.0, 30.0, 1e4]))
def test_any_parts_equal_reference(seed, n, empty, spread):
    torch.manual_seed(seed)
    check(*states(n, empty=empty, spread=spread))


@given(seeds, n_parts, emptiness)
def test_order_matters_only_for_rounding(seed, n, empty):
    torch.manual_seed(seed)
    o_parts, lse_parts = states(n, empty=empty)
    order = torch.randperm(n)
    permuted = merge_states(o_parts[order], lse_parts[order])
    assert_close(permuted, merge_states(o_parts, lse_parts), rtol=1e-5, atol=1e-5)


@given(seeds, st.integers(2, 40), emptiness)
def test_lse_and_o_lie_within_their_bounds(seed, n, empty):
    torch.manual_seed(seed)
    o_parts, lse_parts = states(n, empty=empty)
    o, lse = merge_states(o_parts, lse_parts)
    largest = lse_parts.amax(0)
    assert (lse >= largest).all() and (lse <= largest + math.log(n) + 1e-5).all()
    present = (lse_parts > -INF)[..., None]
    low = torch.where(present, o_parts, INF).amin(0)
    high = torch.where(present, o_parts, -INF).amax(0)
    some = (lse > -INF)[..., None]
    assert ((o >= low - 1e-5) & (o <= high + 1e-5) | ~some).all()


@given(seeds)
def test_a_part_counted_twice_shows_in_lse(seed):
    """The merge is not idempotent: o stays and lse grows by log 2."""
    torch.manual_seed(seed)
    o_parts, lse_parts = states(1)
    o, lse = merge_states(o_parts.repeat(2, 1, 1, 1), lse_parts.repeat(2, 1, 1))
    assert_same_bits((o,), (o_parts[0],))
    assert_close(lse, lse_parts[0] + math.log(2), rtol=1e-6, atol=1e-6)


@given(seeds)
def test_the_whole_and_one_part_determine_the_rest(seed):
    torch.manual_seed(seed)
    o_parts, lse_parts = states(2)
    o, lse = merge_states(o_parts, lse_parts)
    rest_lse = lse + torch.log(-torch.expm1((lse_parts[0] - lse).clamp(max=-1e-6)))
    known = (lse_parts[1] - lse_parts[0]) > -3  # else cancellation leaves nothing of the rest
    weight = torch.exp(lse_parts[0] - lse)[..., None]
    rest_o = (o - weight * o_parts[0]) / (1 - weight)
    assert_close(rest_lse[known], lse_parts[1][known], rtol=1e-4, atol=1e-4)
    assert_close(rest_o[known], o_parts[1][known], rtol=1e-3, atol=1e-3)
