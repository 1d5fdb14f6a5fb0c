# SPDX-License-Identifier: BSD-3-Clause
"""Outputs share no memory with each other or an input: views may interleave, and not meet."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from refused_calls import BATCH, DIM, HEADS_KV, HEADS_Q, SEQLEN_K, SEQLEN_Q, decode, message_of
from tree_attention import append_kv, merge_states

OUT = BATCH, HEADS_Q, SEQLEN_Q


def append_nothing(k_cache: Tensor, v_cache: Tensor | None, **scales: Tensor) -> None:
    """An append of a token that is not kept."""
    pages, heads, _, head_dim = k_cache.shape
    k = torch.zeros(pages, heads, 1, head_dim)
    v = None if v_cache is None else torch.zeros(pages, heads, 1, v_cache.shape[3])
    slots = torch.full((pages, 1), -1)
    append_kv(k, v, k_cache, v_cache, slots, **scales)


def gaps(largest: int) -> st.SearchStrategy:
    return st.lists(st.integers(0, largest), min_size=3, max_size=3)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    more=gaps(9),
    other=st.none() | gaps(40),
    order=st.permutations(range(3)),
    offset=st.integers(0, 60),
    head_dims=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    is_scale=st.booleans(),
)
def test_views_are_refused_where_bytes_meet(
    sizes, more, other, order, offset, head_dims, is_scale
) -> None:
    """As the addresses of all elements say: a cache of 8 bits, and another one or a scale, with its
    strides or any. Of other strides those between each other may be refused as well."""
    memory, addresses = torch.zeros(16_000, dtype=torch.uint8), torch.arange(16_000)
    strides, step = [0, 0, 0], head_dims[0]
    for axis in order:  # nested, with gaps
        strides[axis] = step = step + more[axis]
        step *= sizes[axis]
    shape = *sizes, head_dims[0]
    k_cache = memory.view(torch.int8).as_strided(shape, [*strides, 1])
    k_bytes = addresses.as_strided(shape, [*strides, 1]).flatten()
    if is_scale:
        own = other or [stride // 4 for stride in strides]
        scale = memory.view(torch.float32).as_strided(sizes, own, offset // 4)
        words = addresses[: len(addresses) // 4].as_strided(sizes, own, offset // 4)
        bytes_of_other = (words.flatten()[:, None] * 4 + torch.arange(4)).flatten()
        arguments = {"v_cache": None, "k_scale": scale}
    else:
        shape, own = (*sizes, head_dims[1]), [*(other or strides), 1]
        v_cache = memory.view(torch.int8).as_strided(shape, own, offset)
        bytes_of_other = addresses.as_strided(shape, own, offset).flatten()
        scales = torch.zeros(2, *sizes)
        arguments = {"v_cache": v_cache, "k_scale": scales[0], "v_scale": scales[1]}
    counts = torch.bincount(torch.cat([k_bytes, bytes_of_other]))
    has_own_strides = other is None and not (is_scale and any(x % 4 for x in strides))
    try:
        append_nothing(k_cache, **arguments)
    except ValueError as error:
        assert "share memory with" in str(error) or "two elements at one place" in str(error)
        assert counts.max() > 1 or not has_own_strides
    else:
        assert counts.max() == 1


def int8(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int8)


INTERLEAVED = {
    "pages of two": lambda: int8(1000, 2, 8, 16, 128).unbind(1),
    "pages of keys and values": lambda: int8(1000, 8, 32, 128).split(16, 2),
    "rows": lambda: int8(2, 8, 5000, 192).split([128, 64], 3),
    "heads": lambda: int8(2, 16, 5000, 64).view(2, 8, 2, 5000, 64).unbind(2),
    "rows and slots in other orders": lambda: (
        (x := int8(2, 128, 5000, 2, 64))[..., 0, :],
        x.view(2, 5000, 128, 2, 64).transpose(1, 2)[..., 1, :],
    ),
}


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_caches_are_taken(name: str) -> None:
    k_cache, v_cache = INTERLEAVED[name]()
    assert k_cache.data_ptr() < v_cache.data_ptr() < k_cache.data_ptr() + k_cache.numel()
    scales = torch.empty(*k_cache.shape[:3], 2).unbind(3)
    append_nothing(k_cache, v_cache, k_scale=scales[0], v_scale=scales[1])
    both = torch.zeros(2, 1, 10, 12)
    message = message_of(lambda: append_nothing(both[..., :8], both[..., 4:]))
    assert message == (
        "append_kv: v_cache must not share memory with k_cache, or lie between its bytes with "
        "other strides, got strides [120, 120, 12, 1] and [120, 120, 12, 1] that begin 16 bytes "
        "apart; give v_cache memory of its own, as v_cache.clone() has"
    )


def test_a_cache_that_overlaps_itself_is_refused() -> None:
    k_cache = torch.zeros(100).as_strided((2, 1, 10, 4), (36, 40, 4, 1))
    assert message_of(lambda: append_nothing(k_cache, None)) == (
        "append_kv: k_cache must not have two elements at one place in memory, or axes that "
        "interleave, got shape [2, 1, 10, 4] with strides [36, 40, 4, 1]; give it memory of its "
        "own, as k_cache.clone() has"
    )
    append_nothing(k_cache.clone(), None)


def test_what_strides_do_not_decide_counts_as_overlapping() -> None:
    """No two elements are at one place."""
    k_cache = int8(8).as_strided((2, 1, 3, 1), (3, 1, 2, 1))
    scale = torch.empty(2, 1, 3)
    message = message_of(lambda: append_nothing(k_cache, None, k_scale=scale))
    assert message == (
        "append_kv: k_cache must not have two elements at one place in memory, or axes that "
        "interleave, got shape [2, 1, 3, 1] with strides [3, 1, 2, 1]; give it memory of its own, "
        "as k_cache.clone() has"
    )
    memory = torch.zeros(400, dtype=torch.int8)
    rows = memory.as_strided((1, 1, 6, 8), (1, 1, 32, 1))
    scale = memory.view(torch.float32).as_strided((1, 1, 6), (1, 1, 16), 4)  # at every second row
    message = message_of(lambda: append_nothing(rows, None, k_scale=scale))
    assert "k_scale must not share memory with k_cache, or lie between its bytes with" in message


def test_views_of_padded_pages_and_of_packed_projections_are_taken() -> None:
    """Pages whose size is no multiple of a row's, and inputs that repeat heads beside an output."""
    pages = int8(100, 4 * 16 * 36 + 20)[:, : 4 * 16 * 36].view(100, 4, 16, 36)
    scales = torch.empty(2, *pages.shape[:3])
    k_cache, v_cache = pages[..., :16], pages[..., 16:32]
    append_nothing(k_cache, v_cache, k_scale=scales[0], v_scale=scales[1])
    for order in ((0, 2, 1, 3), (2, 1, 0, 3)):  # which may be transposed
        moved = [x.permute(order) for x in (k_cache, v_cache)]
        own = torch.empty(2, *moved[0].shape[:3])
        append_nothing(*moved, k_scale=own[0], v_scale=own[1])
    packed = torch.zeros(BATCH, SEQLEN_K, HEADS_Q + 2, DIM).transpose(1, 2)
    k, v = (
        packed[:, i : i + 1].expand(BATCH, HEADS_KV, SEQLEN_K, DIM) for i in (HEADS_Q, HEADS_Q + 1)
    )
    o, lse = packed[:, :HEADS_Q, :SEQLEN_Q], torch.empty(OUT)
    decode(k=k, v=v, out=(o, lse))
    message = message_of(lambda: decode(k=k, v=v, out=(packed[:, 2:, :SEQLEN_Q], lse)))
    assert "lean_decode: o must not share memory with k" in message


def floats(*shape: int) -> Tensor:
    return torch.ones(shape)


def taken(x: Tensor, *shape: int) -> Tensor:
    """A float32 tensor at the beginning of the memory of `x`."""
    return (
        torch.tensor([])
        .set_(x.untyped_storage())
        .flatten()[: torch.Size(shape).numel()]
        .view(shape)
    )


INPUTS: dict[str, tuple[Callable[[], Tensor], dict]] = {
    "q": (lambda: floats(*OUT, DIM), {}),
    "k": (lambda: floats(BATCH, HEADS_KV, SEQLEN_K, DIM), {}),
    "v": (lambda: floats(BATCH, HEADS_KV, SEQLEN_K, DIM), {}),
    "key_ranges": (lambda: torch.zeros(BATCH, SEQLEN_Q, 8, dtype=torch.int32)[..., :2], {}),
    "alibi_slopes": (
        lambda: floats(24)[:HEADS_Q],
        {"query_positions": torch.zeros(BATCH, SEQLEN_Q, dtype=torch.int64)},
    ),
    "query_positions": (lambda: torch.zeros(BATCH, 9, dtype=torch.int64)[:, :SEQLEN_Q], {}),
    "page_table": (lambda: torch.zeros(BATCH, 20, dtype=torch.int32), {}),
    "k_scale": (lambda: floats(BATCH, HEADS_KV, SEQLEN_K), {}),
    "v_scale": (lambda: floats(BATCH, HEADS_KV, SEQLEN_K), {}),
}


@pytest.mark.parametrize("name", INPUTS)
def test_lean_decode_refuses_an_output_over_an_input(name: str) -> None:
    make, more = INPUTS[name]
    x = make()
    options = {**more, name: x}
    if name.endswith("scale"):
        eight = torch.zeros(BATCH, HEADS_KV, SEQLEN_K, DIM, dtype=torch.int8)
        scales = {s: floats(BATCH, HEADS_KV, SEQLEN_K) for s in ("k_scale", "v_scale")}
        options = {"k": eight, "v": eight, **scales, **options}
    o = torch.empty(*OUT, DIM)
    decode(out=(o, torch.empty(OUT)), **options)
    message = message_of(lambda: decode(out=(o, taken(x, *OUT)), **options))
    assert message.startswith(f"lean_decode: lse must not share memory with {name}, or lie between")
    assert message.endswith("give lse memory of its own, as lse.clone() has")


def test_lean_decode_refuses_strided_outputs_over_inputs_and_each_other() -> None:
    rows = torch.zeros(BATCH, HEADS_Q, SEQLEN_K, 2 * DIM)
    q, o = rows[:, :, :SEQLEN_Q, :DIM], rows[:, :, :SEQLEN_Q, DIM:]
    lse = torch.empty(OUT)
    decode(q=q, out=(o, lse))  # interleaved
    message = message_of(lambda: decode(q=q, out=(rows[:, :, 1 : SEQLEN_Q + 1, :DIM], lse)))
    assert "lean_decode: o must not share memory with q" in message
    states = torch.empty(*OUT, DIM + 1)
    decode(out=(states[..., :-1], states[..., -1]))
    message = message_of(lambda: decode(out=(states[..., :-1], states[..., -2])))
    assert "lean_decode: lse must not share memory with o" in message
    expanded = torch.empty(1, *OUT[1:], DIM).expand(*OUT, DIM)
    assert "lean_decode: o must not have two elements" in message_of(
        lambda: decode(out=(expanded, lse))
    )
    ranges = torch.zeros(BATCH, SEQLEN_Q, 8, 2, dtype=torch.int32)
    message = message_of(lambda: decode(key_ranges=ranges, out=(o, taken(ranges, *OUT))))
    assert "lean_decode: lse must not share memory with key_ranges" in message


def test_merge_states_refuses_outputs_over_parts() -> None:
    packed = torch.zeros(3, 4 * 9)  # of each part first o, then lse
    o_parts, lse_parts = packed[:, :32].view(3, 4, 8), packed[:, 32:]
    new = torch.empty(4, 8), torch.empty(4)
    merge_states(o_parts, lse_parts, out=new)
    merge_states(o_parts[:, :2], lse_parts[:, :2], out=(o_parts[1, 2:], lse_parts[1, 2:]))
    message = message_of(lambda: merge_states(o_parts, lse_parts, out=(o_parts[1], new[1])))
    assert message == (
        "merge_states: o must not share memory with o_parts, or lie between its bytes with other "
        "strides, got strides [8, 1] and [36, 8, 1] that begin 144 bytes apart; give o memory of "
        "its own, as o.clone() has"
    )
    message = message_of(lambda: merge_states(o_parts, lse_parts, out=(new[0], lse_parts[2])))
    assert "merge_states: lse must not share memory with lse_parts" in message
    message = message_of(lambda: merge_states(o_parts, lse_parts, out=(new[0], new[0][3, 4:])))
    assert "merge_states: lse must not share memory with o, or" in message
