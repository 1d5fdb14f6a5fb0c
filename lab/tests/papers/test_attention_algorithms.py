# SPDX-License-Identifier: BSD-3-Clause
"""Every published algorithm for exact attention equals attention to 1e-12, on the same inputs."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lab.papers.algorithms.flash import (
    SlowMemory,
    chunked_attention,
    flash_attention_2,
    flash_decoding,
    normalise,
    rescale,
    tile_state,
)
from lab.papers.algorithms.lean import (
    AsPrintedRoundedUp,
    CorrectedLast,
    lean_attention,
    lean_attention_basic,
)
from lab.papers.slow_memory import (
    flash_attention,
    flash_block_sizes,
    flash_traffic,
    standard_attention,
)
from tree_attention.reference import attention, merge

EXACT = {"rtol": 1e-12, "atol": 1e-12}

# What each algorithm gets: q, k, v, the rows and keys of a block, and a number of workers.
ALGORITHMS: dict[str, Callable] = {
    "standard": lambda q, k, v, rows, keys, workers: standard_attention(q, k, v),
    "Rabe-Staats": lambda q, k, v, rows, keys, workers: chunked_attention(
        q, k, v, query_chunk=rows, key_chunk=keys
    ),
    "FlashAttention": lambda q, k, v, rows, keys, workers: flash_attention(
        q, k, v, fast_memory=4 * q.shape[-1] * keys
    ),
    "FlashAttention-2": lambda q, k, v, rows, keys, workers: flash_attention_2(
        q, k, v, block_q=rows, block_k=keys
    ),
    "FlashDecoding": lambda q, k, v, rows, keys, workers: flash_decoding(
        q, k, v, num_splits=workers, block_q=rows, block_k=keys
    ),
    "LeanAttention, Algorithm 2": lambda q, k, v, rows, keys, workers: lean_attention_basic(
        q, k, v, tile_m=rows, tile_n=keys
    ),
    "LeanAttention, Algorithm 4": lambda q, k, v, rows, keys, workers: lean_attention(
        q, k, v, tile_m=rows, tile_n=keys, ctas=workers
    ),
    "LeanAttention, Algorithm 4 with its last CTA corrected": (
        lambda q, k, v, rows, keys, workers: lean_attention(
            q, k, v, tile_m=rows, tile_n=keys, ctas=workers, schedule=CorrectedLast
        )
    ),
}
EACH = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS.keys())


def inputs(seed=0, batch=2, heads=3, seqlen_q=5, seqlen_k=23, head_dim=6, head_dim_v=4):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, heads, n, d, dtype=torch.float64, generator=generator)
        for n, d in ((seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v))
    )


SIZES = {
    "seed": st.integers(0, 2**31),
    "batch": st.integers(1, 2),
    "heads": st.integers(1, 4),
    "seqlen_q": st.integers(1, 9),
    "seqlen_k": st.integers(0, 40),
    "head_dim": st.integers(1, 9),
    "head_dim_v": st.integers(1, 5),
}


@EACH
@given(st.fixed_dictionaries(SIZES), st.integers(1, 10), st.integers(1, 45), st.integers(1, 30))
def test_algorithm_equals_attention(algorithm, sizes, rows, keys, workers):
    """Blocks of any size, also larger than the input, and any number of workers."""
    q, k, v = inputs(**sizes)
    assert_close(algorithm(q, k, v, rows, keys, workers), attention(q, k, v), **EXACT)


@EACH
@settings(max_examples=10)
@given(st.integers(0, 2**31), st.floats(-1e4, 1e4))
def test_scores_plus_a_constant_leave_o_and_shift_lse(algorithm, seed, constant):
    q, k, v = inputs(seed)
    q, k = (torch.cat([x, torch.ones_like(x[..., :1])], -1) for x in (q, k))
    o, lse = algorithm(q, k, v, 2, 4, 7)
    k[..., -1] += constant * q.shape[-1] ** 0.5
    shifted = algorithm(q, k, v, 2, 4, 7)
    assert_close(shifted, (o, lse + constant), rtol=1e-11, atol=1e-11)  # of scores near 1e4


@EACH
@settings(max_examples=10)
@given(st.integers(0, 2**31))
def test_keys_in_any_order_give_the_same(algorithm, seed):
    q, k, v = inputs(seed)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(seed))
    permuted = algorithm(q, k[:, :, order], v[:, :, order], 2, 4, 7)
    assert_close(permuted, algorithm(q, k, v, 2, 4, 7), **EXACT)


@EACH
def test_scores_that_overflow_exp_stay_finite_in_every_algorithm(algorithm):
    q, k, v = inputs()
    q = q * 1e4
    assert (q @ k.mT).exp().isinf().any()
    assert_close(algorithm(q, k, v, 2, 4, 7), attention(q, k, v), **EXACT)


@EACH
def test_no_keys_give_zero_and_minus_infinity(algorithm):
    q, k, v = inputs(seqlen_k=0)
    o, lse = algorithm(q, k, v, 2, 4, 7)
    assert (o == 0).all() and (lse == -torch.inf).all()


@given(st.integers(0, 2**31), st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_rescaling_is_associative_and_equals_the_merge(seed, sizes):
    """LeanAttention section IV-A; a part without keys is the identity."""
    q, k, v = inputs(seed, seqlen_k=sum(sizes))
    parts = [
        tile_state(q, k_part, v_part, 0.7)
        for k_part, v_part in zip(k.split(sizes, 2), v.split(sizes, 2), strict=True)
    ]
    left = rescale(rescale(*parts[:2]), parts[2])
    right = rescale(parts[0], rescale(*parts[1:]))
    assert_close(normalise(left), normalise(right), **EXACT)
    merged = merge(merge(normalise(parts[0]), normalise(parts[1])), normalise(parts[2]))
    assert_close(normalise(left), merged, **EXACT)


def test_lean_attention_on_as_many_workers_as_outputs_is_flash_attention_2():
    """LeanAttention section IV-C: head by head the operations, and so the bits, are the same."""
    q, k, v = (x[0] for x in inputs(seqlen_k=24))
    o, lse = lean_attention(q, k, v, tile_m=2, tile_n=4, ctas=3 * 3)
    for head in range(3):
        of_head = flash_attention_2(q[head], k[head], v[head], block_q=2, block_k=4)
        assert torch.equal(o[head], of_head[0]) and torch.equal(lse[head], of_head[1])


@pytest.mark.parametrize("splits", [1, 2, 3, 6])
def test_lean_attention_on_a_multiple_of_workers_has_the_parts_of_flash_decoding(splits):
    q, k, v = inputs(seqlen_k=24)
    sizes = {"tile_m": 5, "tile_n": 4, "ctas": 2 * 3 * splits}
    lean = lean_attention(q, k, v, **sizes)
    split = flash_decoding(q, k, v, num_splits=splits, block_q=5, block_k=4)
    assert_close(lean, split, rtol=1e-15, atol=1e-15)


def test_algorithm_4_as_printed_is_wrong_and_hangs():
    """LeanAttention's Figure 1, 2 heads of 5 LeanTiles over 5 SMs, loses parts. With 6 heads of 3
    LeanTiles over 4 SMs the host of head 3 waits for a fifth SM."""
    q, k, v = inputs(batch=1, heads=2, seqlen_q=1, seqlen_k=20)
    o, lse = attention(q, k, v)
    sizes = {"tile_m": 1, "tile_n": 4, "ctas": 5, "schedule": AsPrintedRoundedUp}
    o_printed, lse_printed = lean_attention(q, k, v, **sizes)
    assert ((o_printed - o).abs().amax(-1) > 1e-3).all(), "both heads lose parts"
    assert (lse_printed < lse - 1e-3).all()

    q, k, v = inputs(batch=2, heads=3, seqlen_q=1, seqlen_k=12)
    message = (
        "lean_attention: schedule must be one whose CTAs all end, got AsPrintedRoundedUp, in which "
        "CTA 1 waits forever"
    )
    with pytest.raises(RuntimeError, match=message):
        lean_attention(q, k, v, **{**sizes, "ctas": 4})


# Slow-memory traffic.

SHAPES = {  # seqlen, head_dim, fast memory: head_dim <= M <= seqlen * head_dim
    "small": (64, 8, 128),
    "smallest fast memory": (96, 16, 16),
    "largest fast memory": (64, 16, 64 * 16),
    "long": (512, 8, 256),
    "wide": (96, 64, 2048),
    "uneven": (100, 12, 500),
    "fast memory of four rows": (128, 32, 128),
}


@pytest.mark.parametrize("seqlen, head_dim, fast_memory", SHAPES.values(), ids=SHAPES.keys())
def test_counted_traffic_of_flash_attention(seqlen, head_dim, fast_memory):
    """Theta(N^2 d^2 / M): the count is the formula's, and between 3 and 18 times N^2 d^2 / M: the
    factor is 12 for large sizes, up to 4 / d more for l and m, and up to four times less where
    one block of keys is all of them."""
    assert head_dim <= fast_memory <= seqlen * head_dim
    q, k, v = inputs(0, 1, 1, seqlen, seqlen, head_dim, head_dim)
    memory = SlowMemory()
    assert_close(
        flash_attention(q, k, v, fast_memory=fast_memory, memory=memory)[0],
        attention(q, k, v)[0],
        **EXACT,
    )
    assert memory.traffic == flash_traffic(seqlen, head_dim, fast_memory)
    assert 3 < memory.traffic / (seqlen**2 * head_dim**2 / fast_memory) < 18

    standard = SlowMemory()
    standard_attention(q, k, v, memory=standard)
    assert standard.traffic == 4 * seqlen**2 + 4 * seqlen * head_dim


def test_blocks_of_flash_attention_fit_into_its_fast_memory():
    """K_j, V_j, Q_i and O_i take at most M elements up to the rounding of line 1."""
    for head_dim in (8, 64, 128):
        for fast_memory in range(4 * head_dim, 64 * head_dim, 4 * head_dim):
            rows, keys = flash_block_sizes(fast_memory, head_dim)
            assert 2 * (rows + keys) * head_dim <= fast_memory
            assert rows * keys <= fast_memory / 4, "the scores of one pair of blocks"


def test_decoding_reads_each_key_once_and_splits_add_their_parts():
    q, k, v = inputs(0, 1, 1, 1, 64, 8, 8)
    whole, split = SlowMemory(), SlowMemory()
    flash_attention_2(q, k, v, block_q=1, block_k=4, memory=whole)
    assert whole.loaded == 8 + 2 * 64 * 8 and whole.stored == 8 + 1
    flash_decoding(q, k, v, num_splits=4, block_q=1, block_k=4, memory=split)
    parts = 4 * (8 + 1)
    assert split.loaded == 4 * 8 + 2 * 64 * 8 + parts and split.stored == parts + 8 + 1
