# SPDX-License-Identifier: BSD-3-Clause
"""Devices and outputs that lean_decode refuses."""

import pytest
import torch

from refused_calls import (
    alibi,
    decode,
    decode_out,
    int8,
    int32,
    int64,
    k,
    message_of,
    other_devices,
    q,
    scale,
)
from tree_attention import lean_decode
from tree_attention.ops import check_decode

DEVICES = {
    "k": lambda x: decode(k=k().to(x)),
    "v": lambda x: decode(v=k().to(x)),
    "page_table": lambda x: decode(page_table=int32(2, 1).to(x)),
    "k_scale": lambda x: decode(k=int8(), v=int8(), k_scale=scale().to(x), v_scale=scale()),
    "v_scale": lambda x: decode(k=int8(), v=int8(), k_scale=scale(), v_scale=scale().to(x)),
    "key_ranges": lambda x: decode(key_ranges=int32(2, 3, 2).to(x)),
    "query_positions": lambda x: alibi(query_positions=int64(2, 3).to(x)),
    "alibi_slopes": lambda x: alibi(alibi_slopes=torch.ones(4, device=x)),
    "o": lambda x: decode_out(o=torch.empty(2, 4, 3, 8, device=x)),
    "lse": lambda x: decode_out(lse=torch.empty(2, 4, 3, device=x)),
}


@other_devices
@pytest.mark.parametrize("argument", DEVICES)
def test_devices(argument, other_device):
    message = message_of(lambda: DEVICES[argument](other_device))
    assert message == f"lean_decode: {argument} must be on q's device cpu, got {other_device}"


def test_overlapping_outputs_are_refused():
    expanded = torch.empty(1, 4, 3, 8).expand(2, -1, -1, -1)
    message = message_of(lambda: decode_out(o=expanded))
    assert "lean_decode: o must not have two elements at one place in memory" in message
    x, buffer = q(), torch.empty(2 * 4 * 3 * 8)
    inside = buffer[:24].view(2, 4, 3)
    of_8_bits = {"k": int8(), "v": int8(), "k_scale": scale(), "v_scale": scale()}
    in_scales = of_8_bits["v_scale"].view(-1)[:24].view(2, 4, 3)
    for call in (
        lambda: decode_out(o=x, q=x),
        lambda: decode_out(lse=in_scales, **of_8_bits),
        lambda: decode_out(o=buffer.view(2, 4, 3, 8), lse=inside),
    ):
        assert "must not share memory with" in message_of(call)


def test_check_decode_reads_the_pages_of_every_range():
    """A page that only the second range of a query needs, and one that none needs."""
    ranges = torch.tensor([[0, 5], [10, 20]]).int().repeat(2, 3, 1, 1)
    for refuses in (lean_decode, check_decode):
        needed, other = int32(2, 3), int32(2, 3)
        needed[1, 1] = other[1, 2] = 9
        refuses(q(), k(), k(), ranges, page_table=other)
        message = message_of(lambda f=refuses, t=needed: f(q(), k(), k(), ranges, page_table=t))
        assert "got 9 for page 1 of sequence 1" in message


def test_no_output_is_touched_by_a_refused_call():
    o, lse = torch.full((2, 4, 3, 8), 7.0), torch.full((2, 4, 3), 7.0)
    ranges = torch.tensor([0, 30]).int().repeat(2, 3, 1)
    message_of(lambda: decode_out(o, lse, page_table=int32(2, 3) + 9, key_ranges=ranges))
    assert (o == 7).all() and (lse == 7).all()
