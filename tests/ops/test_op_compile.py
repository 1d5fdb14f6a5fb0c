# SPDX-License-Identifier: BSD-3-Clause
"""The operators under torch's tools: opcheck, fake tensors, torch.compile, CPU threads."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import assert_same_bits, make_problem
from tiers import tiers, tiers_of
from tree_attention import (
    cascade_decode,
    index_topk,
    lean_decode,
    lean_schedule,
    merge_states,
    merge_topk,
)
from tree_attention.cascade import PageGroup

ops = torch.ops.tree_attention

PROBLEMS = {
    "plain": {},
    "causal, strided, bfloat16": {
        "seqlen_q": 3, "ranges": "causal", "layout": "padded", "dtype": torch.bfloat16,
    },
    "every option": {
        "seqlen_q": 2, "ranges": "random", "page_size": 16, "alibi": 0.1, "softcap": 5.0,
        "softmax_scale": 0.2, "head_dim_v": 48,
    },
    "no keys": {"seqlen_k": 0},
}  # fmt: skip
problems = pytest.mark.parametrize("name", PROBLEMS)


def check(op, args, kwargs):
    results = torch.library.opcheck(op, args, kwargs)
    assert len(results) >= 4 and set(results.values()) == {"SUCCESS"}, results


@pytest.mark.gpu("torch.compile")
@pytest.mark.parametrize("name", tiers_of(PROBLEMS, quick=["every option"]))
def test_opcheck_lean_decode(name, device):
    problem = make_problem(**PROBLEMS[name]).to(device)
    if problem.k.isnan().any():  # opcheck compares with equality
        problem.k, problem.v = problem.k.nan_to_num(0), problem.v.nan_to_num(0)
    args = (problem.q, problem.k, problem.v, problem.key_ranges)
    check(ops.lean_decode.default, args, problem.options)
    check(ops.lean_decode.default, args, problem.options | {"out_dtype": torch.float32})
    check(ops.check_decode.default, args, problem.options)
    shape = problem.q.shape[:3]
    o = torch.empty(*shape, problem.v.shape[3], dtype=problem.q.dtype, device=device)
    out = {"o": o, "lse": torch.empty(shape, device=device)}
    check(ops.lean_decode.out, args, problem.options | out)


def test_opcheck_cascade_decode():
    problem = make_problem(batch=3, page_size=16, seqlen_q=2, alibi=0.1)
    problem.k, problem.v = problem.k.nan_to_num(0), problem.v.nan_to_num(0)
    table = problem.options["page_table"]
    table[1:, :3] = table[0, :3]
    args = (problem.q, problem.k, problem.v)
    more = {"least_keys_saved": 1, "out_dtype": torch.float32}
    check(ops.cascade_decode.default, args, problem.options | more)
    check(ops.cascade_decode.default, args, problem.options | {"groups": [3, 0, 1, 2, 0, 2]})


@pytest.mark.deep
def test_common_pages_compile_into_one_graph():
    problem = make_problem(batch=3, page_size=16)
    table = problem.options["page_table"]
    table[1:, :3] = table[0, :3]
    groups = [PageGroup((0, 1, 2), 0, 3)]
    compiled = torch.compile(cascade_decode, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for more in ({}, {"groups": groups}):
            arguments = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.options, **more}
            assert_same_bits(compiled(**arguments), cascade_decode(**arguments))
    assert not torch.equal(cascade_decode(**arguments)[0], problem.run()[0])


def test_keys_and_values_of_8_bits():
    """opcheck cannot compare tensors of float8."""
    problem = make_problem(kv_dtype=torch.int8, dtype=torch.bfloat16, layout="padded")
    args = (problem.q, problem.k, problem.v, problem.key_ranges)
    check(ops.lean_decode.default, args, problem.options)
    problem = make_problem(kv_dtype=torch.float8_e4m3fn, seqlen_q=2)
    real = problem.run()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert_same_metadata(problem.run(), real)
    compiled = torch.compile(lean_decode, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        result = compiled(problem.q, problem.k, problem.v, **problem.options)
    assert_same_bits(result, real)


@pytest.mark.gpu("torch.compile")
@pytest.mark.parametrize("dtype", tiers([torch.float32], [torch.bfloat16]))
def test_opcheck_merge_states(dtype, device):
    o, lse = torch.randn(3, 2, 4, 8, dtype=dtype, device=device), torch.randn(3, 2, 4).to(device)
    check(ops.merge_states.default, (o, lse), {})
    check(ops.merge_states.default, (o, lse), {"out_dtype": torch.float16})
    check(ops.merge_states.default, (o.transpose(1, 2), lse.transpose(1, 2)), {})
    out = {
        "o": torch.empty(2, 4, 8, dtype=torch.float16, device=device),
        "lse": lse.new_empty(2, 4),
    }
    check(ops.merge_states.out, (o, lse), out)


def test_opcheck_lean_schedule():
    check(ops.lean_schedule.default, (torch.tensor([3, 0, 7]).int(), 4), {})


def index_problem(**options):
    q, k = torch.randn(2, 4, 3, 16), torch.randn(2, 1, 40, 16)
    options = {"topk": 5, "block": 4, "local_blocks": 1, **options}
    options["query_positions"] = torch.full((2, 3), 39)
    key_ranges = torch.tensor([[0, 30], [5, 40], [7, 7]]).int().expand(2, 3, 2)
    return (q, k, torch.rand(2, 4, 3), key_ranges), options


def test_opcheck_of_choices():
    args, options = index_problem(key_slots=torch.arange(40).int() * 2)
    check(ops.index_topk.default, args, options)
    check(ops.index_topk.default, args[:2], {"topk": 50})
    scores, slots = index_topk(*args, **options)
    check(ops.merge_topk.default, (scores, slots), {"topk": 7})
    check(ops.merge_topk.default, (scores.mT, slots.mT), {"topk": 2})


@pytest.mark.deep
def test_choices_look_alike_and_compile_into_one_graph():
    def choose(args, options):
        scores, slots = index_topk(*args, **options)
        return merge_topk(torch.stack([scores, scores]), torch.stack([slots, slots]), topk=6)

    args, options = index_problem()
    real = choose(args, options)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert_same_metadata(choose(args, options), real)
    compiled = torch.compile(choose, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        assert_same_bits(compiled(args, options), choose(args, options))
    with pytest.raises(ValueError, match=r"^index_topk: k must be on q's device meta, got cpu"):
        index_topk(args[0].to("meta"), args[1], topk=2)


def assert_same_metadata(fake, real):
    for x, y in zip(fake, real, strict=True):
        assert (x.shape, x.dtype, x.device, x.stride()) == (y.shape, y.dtype, y.device, y.stride())


@problems
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_fake_results_look_like_real_ones(name, out_dtype, device):
    problem = make_problem(**PROBLEMS[name]).to(device)
    real = problem.run(out_dtype=out_dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert_same_metadata(problem.run(out_dtype=out_dtype), real)
    parts = [x.expand(3, *x.shape) for x in real]
    real_merged = merge_states(*parts, out_dtype=out_dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert_same_metadata(merge_states(*parts, out_dtype=out_dtype), real_merged)


def step(q, k, v, key_ranges, options):
    """Two shards and their merge, as one rank sees the exchange."""
    half = k.shape[2] // 2
    states = [
        lean_decode(q, x, y, key_ranges, out_dtype=torch.float32, num_workers=2, **options)
        for x, y in ((k[:, :, :half], v[:, :, :half]), (k[:, :, half:], v[:, :, half:]))
    ]
    o_parts, lse_parts = (torch.stack(parts) for parts in zip(*states, strict=True))
    return merge_states(o_parts, lse_parts, out_dtype=q.dtype)


@pytest.mark.gpu("torch.compile")
def test_compiles_into_one_graph_for_any_length(device):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen_k in (40, 66, 128):
        problem = make_problem(seqlen_k=seqlen_k, seqlen_q=2, alibi=0.1).to(device)
        arguments = problem.q, problem.k, problem.v, problem.key_ranges, problem.options
        with torch.no_grad():
            assert_same_bits(compiled(*arguments), step(*arguments))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.deep
@pytest.mark.gpu("torch.compile")
def test_compiles_with_inductor(device):
    torch._dynamo.reset()
    problem = make_problem(seqlen_q=2, ranges="causal").to(device)
    arguments = problem.q, problem.k, problem.v, problem.key_ranges
    compiled = torch.compile(lean_decode, fullgraph=True)
    with torch.no_grad():
        assert_same_bits(compiled(*arguments, num_workers=3), problem.run(num_workers=3))


@pytest.mark.gpu("torch.compile")
def test_compiles_outputs_that_are_written_to(device):
    """Functionalisation must keep the mutation of a send buffer."""
    torch._dynamo.reset()
    problem = make_problem().to(device)

    def fill(buffer):
        out = buffer[:-16].view(2, 8, 1, 64), buffer[-16:].view(2, 8, 1)
        lean_decode(problem.q, problem.k, problem.v, num_workers=2, out=out)
        return buffer * 2

    with torch.no_grad():
        buffers = [torch.zeros(2 * 8 * 64 + 16, device=device) for _ in range(2)]
        doubled = fill(buffers[0])
        compiled = torch.compile(fill, fullgraph=True, backend="aot_eager")(buffers[1])
    assert buffers[0].count_nonzero() == buffers[0].numel()
    assert_same_bits((compiled, buffers[1]), (doubled, buffers[0]))


def test_exports():
    class Step(torch.nn.Module):
        def forward(self, q, k, v):
            return lean_decode(q, k, v, num_workers=2)

    problem = make_problem()
    arguments = problem.q, problem.k, problem.v
    exported = torch.export.export(Step(), arguments, strict=True)
    assert "tree_attention.lean_decode" in exported.graph_module.code
    assert_same_bits(exported.module()(*arguments), problem.run(num_workers=2))


def test_schedule_of_a_fake_tensor_has_an_unknown_length():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = mode.from_tensor(torch.tensor([3, 1]).int())
        table = lean_schedule(fake, 2)
    assert table.dtype == torch.int64 and table.dim() == 2 and table.shape[1] == 4
    assert isinstance(table.shape[0], torch.SymInt)


def test_a_graph_raises_what_the_call_does():
    """Where the fake kernel refuses, where the kernel itself does, and for values."""
    problem = make_problem(page_size=16)
    q, k, v, table = problem.q, problem.k, problem.v, problem.options["page_table"]
    for arguments, message in (
        ((q, k[..., :-1], v, table), "k must have q's head_dim 64, got 63"),
        ((q, k, v.double(), table), "v must be float32, got float64"),
        ((q, k, v, table.int() + 10**6), r"page_table must hold page ids in \[0, "),
    ):
        torch._dynamo.reset()
        call = torch.compile(
            lambda q, k, v, table: lean_decode(q, k, v, page_table=table),
            fullgraph=True,
            backend="aot_eager",
        )
        with torch.no_grad(), pytest.raises(ValueError, match=f"^lean_decode: {message}"):
            call(*arguments)
