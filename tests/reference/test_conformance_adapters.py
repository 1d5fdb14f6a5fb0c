# SPDX-License-Identifier: BSD-3-Clause
"""`adapt`: functions with the conventions of other engines conform through it."""

import math

import numpy as np
import pytest
import torch

from distributed import run_ranks
from test_conformance import sharded
from tree_attention import all_merge_states, merge_states
from tree_attention.reference.conformance import adapt, check_merge, check_sharded_decode


def merge_flat_pair_in_base_2(o_a, lse_a, o_b, lse_b):
    """FlashInfer's merge_state: [tokens, heads, head_dim], two states and base 2."""
    assert o_a.dim() == 3 and lse_a.dim() == 2
    natural = math.log(2) * torch.stack([lse_a, lse_b])
    o, lse = merge_states(torch.stack([o_a, o_b]).float(), natural)
    return o.to(o_a.dtype), lse / math.log(2)


def merge_second_axis(o_parts, lse_parts):
    """FlashInfer's merge_states: [tokens, parts, heads, head_dim]."""
    assert o_parts.dim() == 4
    return merge_states(o_parts.transpose(0, 1), lse_parts.transpose(0, 1))


def merge_with_lse_by_heads(o_parts, lse_parts):
    """o [parts, tokens, heads, head_dim], and lse [parts, heads, tokens]."""
    o, lse = merge_states(o_parts, lse_parts.transpose(1, 2))
    return o, lse.transpose(0, 1)


def merge_packed(states):
    o, lse = merge_states(states[..., :-1], states[..., -1])
    return torch.cat([o, lse[..., None]], -1)


def merge_for_each_rank(o_parts, lse_parts):
    o, lse = merge_states(o_parts, lse_parts)
    return list(zip(o.chunk(4, 1), lse.chunk(4, 1), strict=True))


def write_flat_pair(o, lse, o_a, lse_a, o_b, lse_b):
    """vLLM's merge_attn_states: [tokens, heads, head_dim] and [heads, tokens], written in place."""
    o_merged, lse_merged = merge_states(
        torch.stack([o_a, o_b]).float(), torch.stack([lse_a, lse_b]).transpose(1, 2)
    )
    o.copy_(o_merged)
    lse.copy_(lse_merged.T)


def write_second_axis(o, lse, o_parts, lse_parts):
    merge_states(o_parts.transpose(0, 1), lse_parts.transpose(0, 1), out=(o, lse))


def merge_without_lse(o_parts, lse_parts):
    return merge_states(o_parts, lse_parts)[0]


ADAPTED = {
    "pairs": adapt(merge_flat_pair_in_base_2, axes="(bt)hd", lse_base=2, pairwise=True),
    "second axis": adapt(merge_second_axis, axes="(bt)phd"),
    "lse by heads": adapt(merge_with_lse_by_heads, axes="(bt)hd", lse_axes="h(bt)"),
    "packed": adapt(merge_packed, packed=True),
    "shares": adapt(merge_for_each_rank, reduce_scattered=True),
    "written pairs": adapt(
        write_flat_pair, axes="(bt)hd", lse_axes="h(bt)", pairwise=True, out=True
    ),
    "written": adapt(write_second_axis, axes="(bt)phd", out=True),
    "no lse": adapt(merge_without_lse),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_other_conventions_conform(name):
    report = check_merge(ADAPTED[name], num_parts=2 if "pairs" in name else 3)
    assert report.passed, f"\n{report}"
    assert all(("not given" in line.measured) == (name == "no lse") for line in report.lines)


def test_what_is_not_written_is_told():
    """And of a merge that writes without `out` that it returned nothing."""
    report = check_merge(adapt(lambda o, lse, *parts: None, out=True))
    assert "o nan" in report.lines[0].measured and not any(x.passed for x in report.lines)
    report = check_merge(adapt(lambda *parts: None))
    assert {line.measured for line in report.lines} == {"None was returned"}


@pytest.mark.parametrize("option", ["packed", "reduce_scattered"])
def test_out_goes_with_states_alone(option):
    with pytest.raises(ValueError, match="adapt: out goes with neither packed nor reduce_scatt"):
        adapt(merge_states, out=True, **{option: True})


def test_written_numpy_arrays_are_adapted():
    def write(o, lse, o_parts, lse_parts):
        parts = (torch.from_numpy(np.ascontiguousarray(x)) for x in (o_parts, lse_parts))
        o[...], lse[...] = (x.numpy() for x in merge_states(*parts))

    report = check_merge(adapt(write, out=True), device="numpy")
    assert report.passed, f"\n{report}"


def test_pairs_are_merged_one_after_the_other():
    """Each pair rounds to 16 bits what it returns, which the case about that notices."""
    report = check_merge(ADAPTED["pairs"], num_parts=5)
    assert report.failed == ["16-bit parts that cancel"], f"\n{report}"


def test_numpy_arrays_are_adapted():
    def merge_packed_arrays(states):
        assert isinstance(states, np.ndarray)
        states = torch.from_numpy(states.astype(np.float32))
        return merge_packed(states).numpy()

    report = check_merge(adapt(merge_packed_arrays, packed=True), device="numpy")
    assert report.passed, f"\n{report}"


@pytest.mark.deep
def test_decodes_are_adapted():
    def decode(problem):
        o, lse = sharded()(problem)
        return torch.cat([o.float(), lse[..., None] / math.log(2)], -1).transpose(1, 2)

    report = check_sharded_decode(adapt(decode, axes="bthd", lse_base=2, packed=True))
    assert report.passed, f"\n{report}"


def conform_in_shares(rank, world_size):
    def merge(o_parts, lse_parts):
        o, lse = all_merge_states(o_parts[rank], lse_parts[rank], head_sharded=True)
        assert o.shape[1] == o_parts.shape[2] // world_size
        return o, lse

    report = check_merge(adapt(merge, reduce_scattered=True), num_parts=world_size)
    assert report.passed, f"\n{report}"


def test_shares_of_ranks_are_gathered():
    run_ranks(conform_in_shares, 2)
