# SPDX-License-Identifier: BSD-3-Clause
"""Every error message of lean_decode: operator, argument, requirement and the value got."""

import pytest
import torch

import refused_calls
from refused_calls import (
    SEQLEN_K,
    alibi,
    decode,
    decode_out,
    float8,
    huge,
    int8,
    int32,
    int64,
    k,
    message_of,
    q,
    scale,
    transposed,
)
from tree_attention import all_merge_states, lean_decode, tree_decode
from tree_attention.ops import check_decode

LIMIT = 2**31
HEADS = "num_heads_q must be a multiple of num_heads_kv, got "
AXES = "the axes are [batch, heads, tokens, head_dim]"
PAGES = "the axes are [num_pages, num_heads_kv, page_size, head_dim]"
RANGES = "[batch, seqlen_q, 2]"
TABLE = (
    "page_table must have shape [batch, pages] or [batch, num_heads_kv, pages] with batch 2 and "
    "num_heads_kv 2, got "
)
LAYOUT = (
    "key_layout must be (first, block, stride) with first >= 0, block >= 1 and stride >= block, "
    "got "
)

DECODE = {
    # q
    "q axes": (
        lambda: decode(q=q(2, 3, 8)),
        "q must have shape [batch, num_heads_q, seqlen_q, head_dim], got [2, 3, 8]",
    ),
    "q dtype": (
        lambda: decode(q=q(dtype=torch.float64)),
        "q must be float32, bfloat16 or float16, got float64",
    ),
    "q head_dim": (
        lambda: decode(q=q(2, 4, 3, 0)),
        "q must have a head_dim of at least 1, got 0",
    ),
    "q strides": (
        lambda: decode(q=transposed(q())),
        "q must have a contiguous last axis, got stride 3",
    ),
    "batch": (lambda: decode(q=huge(LIMIT, 4, 3, 8)), f"batch must be below 2^31, got {LIMIT}"),
    "num_heads_q": (
        lambda: decode(q=huge(2, LIMIT, 3, 8)),
        f"num_heads_q must be below 2^31, got {LIMIT}",
    ),
    "seqlen_q": (
        lambda: decode(q=huge(2, 4, LIMIT, 8)),
        f"seqlen_q must be below 2^31, got {LIMIT}",
    ),
    "large head_dim": (
        lambda: decode(q=huge(2, 4, 3, LIMIT, dtype=torch.float16)),
        f"head_dim must be below 2^31, got {LIMIT}",
    ),
    # k and v
    "k axes": (
        lambda: decode(k=k(2, 10, 8)),
        "k must have shape [batch, num_heads_kv, seqlen_k, head_dim], got [2, 10, 8]",
    ),
    "v axes": (
        lambda: decode(v=k(2, 10, 8)),
        "v must have shape [batch, num_heads_kv, seqlen_k, head_dim], got [2, 10, 8]",
    ),
    "k pages axes": (
        lambda: decode(k=k(2, 10, 8), page_table=int32(2, 1)),
        "k must have shape [num_pages, num_heads_kv, page_size, head_dim], got [2, 10, 8]",
    ),
    "k dtype": (lambda: decode(k=k(dtype=torch.float16)), "k must be float32, got float16"),
    "v dtype": (lambda: decode(v=k(dtype=torch.bfloat16)), "v must be float32, got bfloat16"),
    "k strides": (
        lambda: decode(k=transposed(k())),
        "k must have a contiguous last axis, got stride 10",
    ),
    "v strides": (
        lambda: decode(v=transposed(k())),
        "v must have a contiguous last axis, got stride 10",
    ),
    "k head_dim": (lambda: decode(k=k(2, 2, 10, 7)), "k must have q's head_dim 8, got 7"),
    "v head_dim": (lambda: decode(v=k(2, 2, 10, 0)), "v must have a head_dim of at least 1, got 0"),
    "large v head_dim": (
        lambda: decode(q=q().half(), k=k().half(), v=huge(2, 2, 10, LIMIT, dtype=torch.float16)),
        f"head_dim of v must be below 2^31, got {LIMIT}",
    ),
    "v seqlen_k": (
        lambda: decode(v=k(2, 2, 9, 8)),
        "v must have k's first three axes [2, 2, 10], got [2, 2, 9]",
    ),
    "v heads and tokens swapped": (
        lambda: decode(v=k().transpose(1, 2)),
        "v must have k's first three axes [2, 2, 10], got [2, 10, 2]",
    ),
    "heads": (lambda: decode(k=k(2, 3, 10, 8), v=k(2, 3, 10, 8)), f"{HEADS}4 and 3; {AXES}"),
    "heads and tokens swapped": (
        lambda: decode(k=k().transpose(1, 2), v=k().transpose(1, 2)),
        f"{HEADS}4 and 10; {AXES}",
    ),
    "no kv heads": (lambda: decode(k=k(2, 0, 10, 8), v=k(2, 0, 10, 8)), f"{HEADS}4 and 0; {AXES}"),
    "k batch": (
        lambda: decode(k=k(1, 2, 10, 8), v=k(1, 2, 10, 8)),
        "k must have q's batch 2, got 1",
    ),
    "seqlen_k": (
        lambda: decode(k=huge(2, 2, LIMIT, 8), v=huge(2, 2, LIMIT, 8)),
        f"seqlen_k must be below 2^31, got {LIMIT}",
    ),
    # page_table
    "page_size": (
        lambda: decode(k=k(5, 2, 0, 8), v=k(5, 2, 0, 8), page_table=int32(2, 1)),
        "k must have a page_size of at least 1, got 0",
    ),
    "pages and heads swapped": (
        lambda: decode(k=k(5, 16, 2, 8), v=k(5, 16, 2, 8), page_table=int32(2, 1)),
        f"{HEADS}4 and 16; {PAGES}",
    ),
    "page_table dtype": (
        lambda: decode(page_table=int64(2, 1)),
        "page_table must be int32, got int64",
    ),
    "page_table axes": (lambda: decode(page_table=int32(2)), TABLE + "[2]"),
    "page_table batch": (lambda: decode(page_table=int32(3, 1)), TABLE + "[3, 1]"),
    "page_table heads": (lambda: decode(page_table=int32(2, 4, 1)), TABLE + "[2, 4, 1]"),
    "page_table strides": (
        lambda: decode(page_table=transposed(int32(2, 3))),
        "page_table must have a contiguous last axis, got stride 2",
    ),
    "seqlen_k of pages": (
        lambda: decode(k=huge(2, 2, 2**30, 8), v=huge(2, 2, 2**30, 8), page_table=int32(2, 3)),
        f"seqlen_k must be below 2^31, got {3 * 2**30}",
    ),
    "large pages": (
        lambda: decode(k=huge(2, 2, LIMIT, 8), v=huge(2, 2, LIMIT, 8), page_table=int32(2, 1)),
        f"page_size must be below 2^31, got {LIMIT}",
    ),
    "many pages": (
        lambda: decode(k=huge(LIMIT, 2, 1, 8), v=huge(LIMIT, 2, 1, 8), page_table=int32(2, 1)),
        f"num_pages must be below 2^31, got {LIMIT}",
    ),
    "page id too large": (
        lambda: decode(page_table=int32(2, 3) + torch.tensor([0, 0, 2]).int()),
        "page_table must hold page ids in [0, 2) where key_ranges needs them, got 2 for page 2 of "
        "sequence 0",
    ),
    "page id negative": (
        lambda: decode(
            page_table=torch.tensor([[0, 1], [1, -1]]).int(),
            key_ranges=torch.tensor([0, 11]).int().repeat(2, 3, 1),
        ),
        "page_table must hold page ids in [0, 2) where key_ranges needs them, got -1 for page 1 of "
        "sequence 1",
    ),
    # keys and values of 8 bits
    "int8 values of other keys": (lambda: decode(v=int8()), "v must be float32, got int8"),
    "float values of int8 keys": (lambda: decode(k=int8()), "v must be int8, got float32"),
    "float8 values of int8 keys": (
        lambda: decode(k=int8(), v=float8()),
        "v must be int8, got float8_e4m3fn",
    ),
    "another float8": (
        lambda: decode(k=k().to(torch.float8_e5m2), v=k().to(torch.float8_e5m2)),
        "k must be float32, got float8_e5m2",
    ),
    "int8 queries": (
        lambda: decode(q=int8(2, 4, 3, 8), k=int8(), v=int8()),
        "q must be float32, bfloat16 or float16, got int8",
    ),
    "no k_scale": (
        lambda: decode(k=int8(), v=int8(), v_scale=scale()),
        "k_scale must be given for int8 keys, got None",
    ),
    "no v_scale": (
        lambda: decode(k=int8(), v=int8(), k_scale=scale()),
        "v_scale must be given for int8 keys, got None",
    ),
    "k_scale alone": (
        lambda: decode(k=float8(), v=float8(), k_scale=scale()),
        "v_scale must be given with k_scale, got None",
    ),
    "v_scale alone": (
        lambda: decode(k=float8(), v=float8(), v_scale=scale()),
        "k_scale must be given with v_scale, got None",
    ),
    "scale of float keys": (
        lambda: decode(k_scale=scale(), v_scale=scale()),
        "k_scale must be None for float32 keys, got a tensor of shape [2, 2, 10]",
    ),
    "k_scale dtype": (
        lambda: decode(k=int8(), v=int8(), k_scale=scale().half(), v_scale=scale()),
        "k_scale must be float32, got float16",
    ),
    "v_scale shape": (
        lambda: decode(k=int8(), v=int8(), k_scale=scale(), v_scale=scale(2, 2, 1)),
        "v_scale must have shape [batch, num_heads_kv, seqlen_k] = [2, 2, 10], got [2, 2, 1]",
    ),
    "k_scale of pages": (
        lambda: decode(
            k=int8(5, 2, 10, 8),
            v=int8(5, 2, 10, 8),
            page_table=int32(2, 1),
            k_scale=scale(),
            v_scale=scale(),
        ),
        "k_scale must have shape [num_pages, num_heads_kv, page_size] = [5, 2, 10], got [2, 2, 10]",
    ),
    # key_ranges
    "key_ranges dtype": (
        lambda: decode(key_ranges=int64(2, 3, 2)),
        "key_ranges must be int32, got int64",
    ),
    "key_ranges shape": (
        lambda: decode(key_ranges=int32(2, 2)),
        f"key_ranges must have shape {RANGES} = [2, 3, 2], got [2, 2]",
    ),
    "key_ranges of another batch": (
        lambda: decode(key_ranges=int32(1, 3, 2)),
        f"key_ranges must have shape {RANGES} = [2, 3, 2], got [1, 3, 2]",
    ),
    "key_ranges strides": (
        lambda: decode(key_ranges=transposed(int32(2, 3, 2))),
        "key_ranges must have a contiguous last axis, got stride 3",
    ),
    # scores
    "softmax_scale": (
        lambda: decode(softmax_scale=float("inf")),
        "softmax_scale must be in [-1e+15, 1e+15], got inf",
    ),
    "softmax_scale nan": (
        lambda: decode(softmax_scale=float("nan")),
        "softmax_scale must be in [-1e+15, 1e+15], got nan",
    ),
    "softcap": (lambda: decode(softcap=-1.0), "softcap must be 0 or in [1e-15, 1e+15], got -1"),
    "softcap that float32 rounds to 0": (
        lambda: decode(softcap=1e-50),
        "softcap must be 0 or in [1e-15, 1e+15], got 1e-50",
    ),
    "softcap beyond float32": (
        lambda: decode(softcap=1e300),
        "softcap must be 0 or in [1e-15, 1e+15], got 1e+300",
    ),
    "softcap nan": (
        lambda: decode(softcap=float("nan")),
        "softcap must be 0 or in [1e-15, 1e+15], got nan",
    ),
    "key_layout length": (lambda: decode(key_layout=(0, 1)), LAYOUT + "[0, 1]"),
    "key_layout first": (lambda: decode(key_layout=(-1, 1, 1)), LAYOUT + "[-1, 1, 1]"),
    "key_layout block": (lambda: decode(key_layout=(0, 0, 1)), LAYOUT + "[0, 0, 1]"),
    "key_layout stride": (lambda: decode(key_layout=(0, 4, 3)), LAYOUT + "[0, 4, 3]"),
    "key_layout positions": (
        lambda: decode(key_layout=(2**62, 1, 2**62)),
        f"key_layout must keep positions below 2^63 over seqlen_k {SEQLEN_K}, got "
        "[4611686018427387904, 1, 4611686018427387904]",
    ),
    "query_positions dtype": (
        lambda: alibi(query_positions=int32(2, 3)),
        "query_positions must be int64, got int32",
    ),
    "query_positions shape": (
        lambda: alibi(query_positions=int64(2)),
        "query_positions must have shape [batch, seqlen_q] = [2, 3], got [2]",
    ),
    "query_positions missing": (
        lambda: alibi(query_positions=None),
        "alibi_slopes needs query_positions, got None",
    ),
    "alibi_slopes dtype": (
        lambda: alibi(alibi_slopes=torch.ones(4, dtype=torch.float16)),
        "alibi_slopes must be float32, got float16",
    ),
    "alibi_slopes shape": (
        lambda: alibi(alibi_slopes=torch.ones(2)),
        "alibi_slopes must have shape [num_heads_q] = [4], got [2]",
    ),
    "alibi_slopes strides": (
        lambda: alibi(alibi_slopes=torch.ones(8)[::2]),
        "alibi_slopes must have a contiguous last axis, got stride 2",
    ),
    # results
    "out_dtype": (
        lambda: decode(out_dtype=torch.float64),
        "out_dtype must be float32, bfloat16 or float16, got float64",
    ),
    "num_workers": (lambda: decode(num_workers=-2), "num_workers must be at least -1, got -2"),
    "too many workers": (
        lambda: decode(num_workers=LIMIT),
        f"num_workers must be below 2^31, got {LIMIT}",
    ),
    "o shape": (
        lambda: decode_out(o=torch.empty(2, 3, 4, 8)),
        "o must have shape [batch, num_heads_q, seqlen_q, head_dim] = [2, 4, 3, 8], "
        "got [2, 3, 4, 8]",
    ),
    "lse shape": (
        lambda: decode_out(lse=torch.empty(2, 4, 3, 1)),
        "lse must have shape [batch, num_heads_q, seqlen_q] = [2, 4, 3], got [2, 4, 3, 1]",
    ),
    "o against out_dtype": (
        lambda: decode_out(out_dtype=torch.float16),
        "out_dtype must be o's dtype or None, got float16 and float32",
    ),
    "o dtype": (
        lambda: decode_out(o=torch.empty(2, 4, 3, 8, dtype=torch.float64)),
        "o must be float32, bfloat16 or float16, got float64",
    ),
    "lse dtype": (
        lambda: decode_out(lse=torch.empty(2, 4, 3, dtype=torch.float64)),
        "lse must be float32, got float64",
    ),
    "o strides": (
        lambda: decode_out(o=transposed(torch.empty(2, 4, 3, 8))),
        "o must have a contiguous last axis, got stride 3",
    ),
}


@pytest.mark.parametrize("name", DECODE)
def test_check_decode_says_what_lean_decode_says(name, monkeypatch):
    def check(*args, out=None, **options):
        if out is not None:  # which check_decode does not take
            return lean_decode(*args, out=out, **options)
        return check_decode(*args, **options)

    monkeypatch.setattr(refused_calls, "lean_decode", check)
    call, message = DECODE[name]
    assert message_of(call) == f"lean_decode: {message}"


@pytest.mark.parametrize("name", DECODE)
def test_lean_decode(name):
    call, message = DECODE[name]
    assert message_of(call) == f"lean_decode: {message}"


@pytest.mark.parametrize(
    "name, ours",
    [
        ("causal", "key_ranges"),
        ("attn_mask", "key_ranges"),
        ("block_table", "page_table"),
        ("sm_scale", "softmax_scale"),
    ],
)
def test_arguments_of_other_engines(name, ours):
    """The error names the argument that has the meaning here."""
    message = f"unexpected keyword argument '{name}'; {ours} has its meaning$"
    with pytest.raises(TypeError, match=rf"lean_decode\(\) got an {message}"):
        lean_decode(q(), k(), k(), **{name: None})
    with pytest.raises(TypeError, match=rf"tree_decode\(\) got an {message}"):
        tree_decode(q(), k(), k(), **{name: None})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'other'$"):
        lean_decode(q(), k(), k(), other=None)
    with pytest.raises(TypeError, match=r"'softmax_scal'; did you mean softmax_scale\?$"):
        lean_decode(q(), k(), k(), softmax_scal=None)
    with pytest.raises(TypeError, match=r"'return_lse'; leave it out: o and lse are always ret"):
        tree_decode(q(), k(), k(), return_lse=True)
    # It is no argument of a merge, which has no keys.
    with pytest.raises(TypeError, match=r"all_merge_states\(\) got an .* argument 'causal'$"):
        all_merge_states(q(), q()[..., 0], causal=True)
