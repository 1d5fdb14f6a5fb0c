# SPDX-License-Identifier: BSD-3-Clause
"""The operators have no derivative, and say so of every argument."""

import pytest
import torch

from refused_calls import BATCH, DIM, HEADS_Q, SEQLEN_Q, alibi, decode_out, k, message_of, q
from tree_attention import merge_states
from tree_attention.ops import check_decode

GRADIENT = " must not require a gradient (inference only), got requires_grad=True; call it under "


@pytest.mark.parametrize("argument", ["q", "k", "v", "alibi_slopes"])
def test_gradients_are_refused_by_the_call_itself(argument):
    shapes = {"q": q, "k": k, "v": k, "alibi_slopes": lambda: torch.ones(HEADS_Q)}
    changed = {argument: shapes[argument]().requires_grad_()}
    expected = f"lean_decode: {argument}{GRADIENT}torch.no_grad()"
    assert message_of(lambda: alibi(**changed), RuntimeError) == expected
    out = torch.empty(BATCH, HEADS_Q, SEQLEN_Q, DIM), torch.empty(BATCH, HEADS_Q, SEQLEN_Q)
    assert message_of(lambda: alibi(out=out, **changed), RuntimeError) == expected
    arguments = {"q": q(), "k": k(), "v": k(), **changed}
    arguments["query_positions"] = torch.zeros(BATCH, SEQLEN_Q, dtype=torch.int64)
    assert message_of(lambda: check_decode(**arguments), RuntimeError) == expected
    with torch.no_grad():
        o, _ = alibi(**changed)
    assert not o.requires_grad
    with torch.inference_mode():
        o, _ = alibi(**changed)


@pytest.mark.parametrize("argument", ["o", "lse"])
def test_outputs_that_require_a_gradient_are_refused(argument):
    shapes = {"o": (BATCH, HEADS_Q, SEQLEN_Q, DIM), "lse": (BATCH, HEADS_Q, SEQLEN_Q)}
    changed = {argument: torch.empty(shapes[argument], requires_grad=True)}
    assert (
        message_of(lambda: decode_out(**changed), RuntimeError)
        == f"lean_decode: {argument}{GRADIENT}torch.no_grad()"
    )


def test_merge_refuses_gradients():
    o, lse = torch.ones(2, 4, 8, requires_grad=True), torch.ones(2, 4)
    expected = f"merge_states: o_parts{GRADIENT}torch.no_grad()"
    assert message_of(lambda: merge_states(o, lse), RuntimeError) == expected
    expected = f"merge_states: lse_parts{GRADIENT}torch.no_grad()"
    assert (
        message_of(lambda: merge_states(o.detach(), lse.requires_grad_()), RuntimeError) == expected
    )
    with torch.no_grad():
        merge_states(o, lse)
