# SPDX-License-Identifier: BSD-3-Clause
"""lean_decode into given outputs, and what follows from its lse: shards, windows, sinks."""

import math

import pytest
import torch

from helpers import NAN, Problem, assert_close_to_reference, assert_same_bits, make_problem
from tiers import tiers
from tree_attention import lean_decode, merge_states, reference
from tree_attention.sharding import BlockCyclic, Contiguous, ContiguousThenCyclic

OUTPUTS = {
    "contiguous": lambda b, h, s, d: (torch.full((b, h, s, d), NAN), torch.full((b, h, s), NAN)),
    "o as [batch, seqlen_q, heads, head_dim]": lambda b, h, s, d: (
        torch.full((b, s, h, d), NAN).transpose(1, 2),
        torch.full((b, s, h), NAN).transpose(1, 2),
    ),
    "gaps in every axis": lambda b, h, s, d: (
        torch.full((b + 1, h + 2, s + 3, d + 5), NAN)[1:, 1:-1, 2:-1, 3:-2],
        torch.full((b, h, s, 3), NAN)[..., 1],
    ),
}


@pytest.mark.gpu("tensor of a whole storage")
@pytest.mark.parametrize("ranges", ["all", "random"])
@pytest.mark.parametrize("outputs", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_writes_strided_outputs_and_nothing_else(outputs, ranges, device):
    problem = make_problem(seqlen_q=5, ranges=ranges).to(device)
    o, lse = outputs(2, 8, 5, 64)
    storage_o, storage_lse = o.untyped_storage(), lse.untyped_storage()
    if device.type != "cpu":
        views = [x.as_strided((x.untyped_storage().nbytes() // 4,), (1,), 0) for x in (o, lse)]
        moved = [view.to(device) for view in views]
        o = moved[0].as_strided(o.shape, o.stride(), o.storage_offset())
        lse = moved[1].as_strided(lse.shape, lse.stride(), lse.storage_offset())
        storage_o, storage_lse = o.untyped_storage(), lse.untyped_storage()
    returned = problem.run(out=(o, lse), num_workers=3)
    assert returned[0] is o and returned[1] is lse
    assert_same_bits((o, lse), problem.run(num_workers=3))
    for x, storage in ((o, storage_o), (lse, storage_lse)):
        flat = torch.empty(0, device=device).set_(storage)
        assert flat.isnan().sum() == flat.numel() - x.numel(), "a gap was written to"


def test_writes_into_a_packed_send_buffer(device):
    """The state of a rank as one message, `[rows * head_dim | rows]`."""
    problem = make_problem(batch=2, seqlen_q=3, dtype=torch.bfloat16, ranges="causal").to(device)
    rows = 2 * 8 * 3
    buffer = torch.full((rows * 64 + rows,), NAN, device=device)
    out = buffer[: rows * 64].view(2, 8, 3, 64), buffer[rows * 64 :].view(2, 8, 3)
    problem.run(out=out)
    assert not buffer.isnan().any()
    problem.check(*out)
    assert_same_bits(out, problem.run(out_dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_out_takes_the_dtype_of_o(dtype, device):
    problem = make_problem(dtype=torch.bfloat16).to(device)
    o = torch.empty(2, 8, 1, 64, dtype=dtype, device=device)
    lse = torch.empty(2, 8, 1, device=device)
    problem.run(out=(o, lse))
    assert_same_bits((o, lse), problem.run(out_dtype=dtype))
    problem.run(out=(o, lse), out_dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seqlen_k", [0, 500], ids=["no keys", "keys"])
def test_outputs_of_any_alignment(seqlen_k, dtype, device):
    """Neighbouring rows differ in theirs; what is aligned is stored by several elements at once."""
    problem = make_problem(dtype=dtype, seqlen_k=seqlen_k).to(device)
    expected = problem.run(num_workers=3)
    for offset in range(5):
        memory = torch.full((*expected[0].shape[:3], 64 + 5), NAN, dtype=dtype, device=device)
        o = memory[..., offset : offset + 64]
        problem.run(out=(o, torch.empty_like(expected[1])), num_workers=3)
        assert_same_bits([o], expected[:1])
        assert memory.isnan().sum() == 5 * o[..., 0].numel()


# A cache split over ranks: each rank's partial state from its own keys, local ranges and layout.

LAYOUTS = {
    "block cyclic": BlockCyclic(4, 16),
    "block cyclic, more ranks than blocks": BlockCyclic(16, 64),
    "contiguous": Contiguous([0, 75, 150, 225, 300]),
    "uneven and empty": Contiguous([0, 0, 1, 290, 290, 300]),
    "prefilled, then cyclic": ContiguousThenCyclic([0, 90, 90, 200], 8),
}


def merged_shards(problem: Problem, layout, dtype, **extra):
    states = [
        problem.shard(layout, rank).run(out_dtype=torch.float32, **extra)
        for rank in range(layout.world_size)
    ]
    o_parts, lse_parts = (torch.stack(parts) for parts in zip(*states, strict=True))
    return merge_states(o_parts, lse_parts, out_dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranges", tiers(["causal", "random"], ["all", "window"]))
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_merged_shards_equal_the_whole_cache(layout, ranges, dtype, device):
    problem = make_problem(batch=3, seqlen_q=4, seqlen_k=300, ranges=ranges, dtype=dtype)
    counts = [layout.count(rank, 300) for rank in range(layout.world_size)]
    assert sum(counts) == 300 and (layout.world_size < 5 or 0 in counts)
    problem = problem.to(device)
    o, lse = merged_shards(problem, layout, dtype)
    problem.check(o, lse)


@pytest.mark.parametrize("name", ["block cyclic", "contiguous", "uneven and empty"])
def test_alibi_on_shards_uses_global_positions(name, device):
    """lse too must be that of the unsharded cache: a shift by rank would spoil the merge."""
    problem = make_problem(
        seqlen_q=4, seqlen_k=300, ranges="causal", alibi=0.5, key_layout=(0, 1, 1)
    ).to(device)
    o, lse = merged_shards(problem, LAYOUTS[name], torch.float32)
    problem.check(o, lse)
    local = {**problem.options, "key_layout": (0, 1, 1)}
    whole, _ = lean_decode(problem.q, problem.k, problem.v, problem.key_ranges, **local)
    states = [
        lean_decode(shard.q, shard.k, shard.v, shard.key_ranges, **local)
        for shard in (problem.shard(LAYOUTS[name], r) for r in range(4))
    ]
    wrong, _ = merge_states(*(torch.stack(parts) for parts in zip(*states, strict=True)))
    assert (wrong - whole).abs().max() > 10 * (o - whole).abs().max(), "local positions do not do"


def test_softcap_and_scale_on_shards(device):
    problem = make_problem(seqlen_k=300, softcap=2.0, softmax_scale=0.4).to(device)
    problem.check(*merged_shards(problem, LAYOUTS["block cyclic"], torch.float32, num_workers=3))


def test_window_and_global_keys_as_two_calls(device):
    """A pattern of two ranges: one call for each, merged; the ranges must not overlap."""
    problem = make_problem(seqlen_q=6, seqlen_k=200)
    end = torch.arange(195, 201).int()
    window = torch.stack([end - 40, end], -1).repeat(2, 1, 1)
    first = torch.tensor([0, 4]).int().repeat(2, 6, 1)
    problem = problem.to(device)
    states = [
        lean_decode(problem.q, problem.k, problem.v, ranges.to(device))
        for ranges in (first, window)
    ]
    o, lse = merge_states(*(torch.stack(parts) for parts in zip(*states, strict=True)))
    for i in range(6):  # query i: keys 0..3 and [155 + i, 195 + i)
        keys = torch.cat([torch.arange(4), torch.arange(155 + i, 195 + i)])
        assert_close_to_reference(
            o[:, :, i : i + 1], lse[:, :, i : i + 1], problem.q[:, :, i : i + 1],
            problem.k[:, :, keys], problem.v[:, :, keys],
        )  # fmt: skip


def test_sink_is_one_sigmoid_after_the_merge(device):
    """A sink takes its share of the softmax and contributes no value: a key of score `sink` whose
    value is zero. lse itself never holds it."""
    problem = make_problem(seqlen_k=100, group_size=2)
    sinks = torch.randn(4)
    o, lse = merged_shards(problem.to(device), LAYOUTS["block cyclic"], torch.float32)
    o, lse = o.cpu(), lse.cpu()
    with_sink = o * torch.sigmoid(lse - sinks[:, None])[..., None]

    scores = problem.q.double() @ problem.k.double().repeat_interleave(2, 1).mT / 8
    scores = torch.cat([scores, sinks.double().view(1, 4, 1, 1).expand(2, -1, -1, -1)], -1)
    weights = scores.softmax(-1)[..., :-1]
    expected = weights @ problem.v.double().repeat_interleave(2, 1)
    torch.testing.assert_close(with_sink.double(), expected, rtol=1e-5, atol=1e-6)
    assert (expected / reference.attention(problem.q, problem.k, problem.v)[0]).max() < 0.999


def test_empty_state_is_the_identity_of_the_merge(device):
    problem = make_problem(seqlen_k=100).to(device)
    none = torch.zeros(2, 1, 2, dtype=torch.int32, device=device)
    empty = lean_decode(problem.q, problem.k, problem.v, none)
    assert (empty[0] == 0).all() and (empty[1] == -math.inf).all()
    state = problem.run()
    for parts in ((state, empty), (empty, state), (empty, empty, state, empty)):
        merged = merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)))
        assert_same_bits(merged, state)
