# SPDX-License-Identifier: BSD-3-Clause
"""Large scores and many keys: errors of rounding stay within their bounds."""

import math

import pytest
import torch

from helpers import make_problem, rounds_weights
from test_lean_decode import by_dtype
from tiers import tiers
from tree_attention import lean_decode


@pytest.mark.parametrize("seed", [6, 12, 25])  # where two sums per score are outside the bound
def test_scores_of_long_queries(seed, device):
    torch.manual_seed(seed)
    problem = make_problem(
        num_heads_kv=3, group_size=2, seqlen_q=3, seqlen_k=512, head_dim=128, softmax_scale=0.3
    )
    problem.to(device).run_and_check()


@by_dtype
def test_many_keys_far_below_one(dtype, device):
    """Their weights, 1e-8 of the largest, are all there is of the output: float16 has no such
    number."""
    problem = make_problem(seqlen_k=2000, dtype=dtype, out_dtype=torch.float32)
    problem.q[:], problem.k[:], problem.v[:] = 1.0, 0.0, 1.0
    problem.k[:, :, 1234, 0], problem.v[:, :, 1234] = 8 * 18.5, 0.0
    o, _ = problem.to(device).run(num_workers=1)
    torch.testing.assert_close(o, torch.full_like(o, 1999 * math.exp(-18.5)), rtol=2e-3, atol=0)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("ranges", ["causal", "several"])
def test_weights_have_the_digits_of_the_result(ranges, kv_dtype):
    """A state in float32 that is to become a result in bfloat16."""
    torch.manual_seed(0)
    problem = make_problem(
        seqlen_q=3, seqlen_k=300, dtype=torch.bfloat16, ranges=ranges, kv_dtype=kv_dtype
    )
    arguments = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.options}
    arguments |= {"key_ranges": problem.key_ranges}
    result, _ = lean_decode(**arguments)
    exact, _ = lean_decode(**arguments, out_dtype=torch.float32)
    options = {"out_dtype": torch.float32, "result_dtype": torch.bfloat16}
    found = lean_decode(**arguments, **options)
    assert torch.equal(found[0].bfloat16(), result)
    assert torch.equal(found[0], exact) != rounds_weights(result)
    out = torch.empty_like(found[0]), torch.empty_like(found[1])
    lean_decode(**arguments, result_dtype=torch.bfloat16, out=out)
    assert torch.equal(out[0], found[0])
    for dtype, says in ((torch.int8, "result_dtype must be"), ("half", "result_dtype must be a t")):
        with pytest.raises((ValueError, TypeError), match=f"lean_decode: {says}.*, got"):
            lean_decode(**arguments, result_dtype=dtype)


def test_infinite_scores_drop_keys(device):
    problem = make_problem(seqlen_k=130)
    problem.q[..., 0] = 1.0
    problem.k[:, :, 10:120, 0] = -math.inf
    o, lse = problem.to(device).run_and_check(num_workers=3)
    assert lse.isfinite().all()
    problem.k[..., 0] = -math.inf  # every score is -inf: the state of no keys
    o, lse = problem.to(device).run_and_check(num_workers=3)
    assert (o == 0).all() and (lse == -math.inf).all()


def test_inputs_are_not_modified(device):
    problem = make_problem(seqlen_q=2, ranges="causal", alibi=1 / 64, page_size=16).to(device)
    inputs = [problem.q, problem.k, problem.v, problem.key_ranges, *problem.options.values()]
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    problem.run(num_workers=4)
    for x, y in zip(tensors, before, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("score_size", [0.1, 1.0, 20.0], ids=["flat", "normal", "peaked"])
@pytest.mark.parametrize("num_workers", tiers([7], [1]))
def test_rounding_errors_do_not_grow_with_length(num_workers, score_size):
    """One float32 sum over all keys would have ten times the error of a blocked one here."""
    problem = make_problem(
        batch=1, num_heads_kv=1, group_size=8, seqlen_k=100_000, score_size=score_size
    )
    problem.run_and_check(num_workers=num_workers)


@pytest.mark.deep
def test_rounding_errors_do_not_grow_beside_an_empty_query():
    """Keys that not all queries of a step see are summed in levels, too."""
    problem = make_problem(
        batch=1, num_heads_kv=1, group_size=1, seqlen_q=2, seqlen_k=200_000, score_size=0.5
    )
    problem.v += 0.5
    errors = []
    for others_end in (200_000, 0):
        problem.key_ranges = torch.tensor([[[0, 200_000], [0, others_end]]], dtype=torch.int32)
        o, lse = problem.run(num_workers=1)
        true_o, _ = problem.check(o, lse)
        errors.append((o.double() - true_o)[0, 0, 0].abs().max().item())
    assert errors[1] <= 2 * errors[0]


@pytest.mark.parametrize("keys", [torch.float32, torch.int8])
def test_scores_that_rise_a_little_with_every_step(keys, instruction_set):
    """A base that followed each of them would change by a factor whose rounding is always the same:
    after 262,144 keys o would be off by 1e-4."""
    n, head_dim = 1 << 18, 32
    score = (2.75e-8 * (torch.arange(n) // 32)).float()
    q = torch.zeros(1, 1, 1, head_dim)
    q[..., 0] = 1
    k, v = torch.zeros(1, 1, n, head_dim), torch.ones(1, 1, n, head_dim)
    options = {}
    if keys == torch.int8:
        k[..., 0] = 1
        q, k, v = q.bfloat16(), k.to(keys), v.to(keys)
        options = {"k_scale": score.view(1, 1, n), "v_scale": torch.ones(1, 1, n)}
    else:
        k[0, 0, :, 0] = score
    o, lse = lean_decode(
        q, k, v, softmax_scale=1.0, num_workers=1, out_dtype=torch.float32, **options
    )
    torch.testing.assert_close(o, torch.ones_like(o), rtol=0, atol=2e-6)
    true_lse = score.double().logsumexp(0)
    torch.testing.assert_close(lse.double().view(()), true_lse, rtol=0, atol=2e-6)
