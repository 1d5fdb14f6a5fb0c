# SPDX-License-Identifier: BSD-3-Clause
"""The table of lean_decode's arguments: what ranks compare, and what a part of a call takes."""

import pytest
import torch

import tree_attention.decode  # noqa: F401  # whose operator of graphs is compared
from helpers import make_problem
from tree_attention.decode_call import DECODE_SCHEMA
from tree_attention.ops import lean_decode
from tree_attention.options import ARGUMENTS, ATTENTION_DEFAULTS, TENSOR_OPTIONS, part_of

OPTIONS = {
    "lists of pages for each head": {"page_size": 8, "per_head": True, "ranges": "causal"},
    "one list of pages, slopes": {"page_size": 8, "alibi": 0.1, "ranges": "several"},
    "scales": {"kv_dtype": torch.int8, "dtype": torch.bfloat16, "ranges": "window"},
}


def test_every_argument_has_a_line() -> None:
    arguments = torch.ops.tree_attention.lean_decode.default._schema.arguments
    assert {*ARGUMENTS, "out_dtype", "result_dtype"} == {x.name for x in arguments}
    tensors = {x.name for x in arguments if "Tensor" in str(x.type)}
    assert {name for name, x in ARGUMENTS.items() if x.axes} == tensors
    assert set(TENSOR_OPTIONS) == tensors - {"q", "k", "v", "key_ranges"}


def test_operators_of_graphs_have_the_options_of_the_operator() -> None:
    arguments = torch.ops.tree_attention.tree_decode.default._schema.arguments
    defaults = {x.name: x.default_value for x in arguments if x.name in ATTENTION_DEFAULTS}
    assert defaults == ATTENTION_DEFAULTS
    local = torch.ops.tree_attention.lean_decode.default._schema.arguments
    types = [{x.name: str(x.type) for x in declared} for declared in (arguments, local)]
    assert all(types[0][name] == types[1][name] for name in ATTENTION_DEFAULTS)
    assert all(name in DECODE_SCHEMA for name in ATTENTION_DEFAULTS)


@pytest.mark.parametrize("case", OPTIONS)
def test_parts_of_a_call(case: str) -> None:
    """Attention to some sequences, or some heads, is that part of attention to all."""
    torch.manual_seed(0)
    problem = make_problem(batch=3, num_heads_kv=4, seqlen_q=2, seqlen_k=40, **OPTIONS[case])
    arguments = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.options}
    arguments["key_ranges"] = problem.key_ranges
    whole = lean_decode(**arguments)
    group = problem.q.shape[1] // 4
    everything = slice(None)
    for sequences, key_heads, heads in (
        (slice(1, 3), everything, everything),
        (everything, slice(1, 3), slice(group, 3 * group)),
    ):
        part = lean_decode(**part_of(arguments, sequences, heads, key_heads))
        for found, of_all in zip(part, whole, strict=True):
            torch.testing.assert_close(found, of_all[sequences, heads])
