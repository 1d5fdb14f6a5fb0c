# SPDX-License-Identifier: BSD-3-Clause
"""The CUDA benchmark's shapes, bytes and tensors, on the CPU."""

import math

import pytest
import torch

from bench_problems import SMALL, make_inputs
from benchmarks.cuda import cases as shapes
from benchmarks.cuda.cases import CudaCase
from benchmarks.cuda.inputs import UNSEEN, num_sets
from benchmarks.harness.accuracy import Float64Check
from tree_attention.ops import lean_decode

LISTS = [shapes.quick_cases, shapes.standard_cases, shapes.full_cases]


@pytest.mark.parametrize("cases", LISTS)
def test_names_are_unique(cases) -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)


def test_lists_grow() -> None:
    quick, standard, full = ({case.name for case in cases()} for cases in LISTS)
    assert quick < standard < full
    assert shapes.LATENCY.name in quick


def test_standard_cases_cover_what_is_promised() -> None:
    cases = shapes.standard_cases()
    assert {case.batch for case in cases} >= {1, 8, 32, 64}
    assert {case.heads for case in cases} >= {(32, 8), (32, 4), (32, 32), (64, 8), (8, 1)}
    assert {case.head_dim for case in cases} == {64, 128, 576}
    assert {case.dtype for case in cases} == {"bf16", "fp16", "fp32"}
    assert {case.page_size for case in cases} >= {1, 16, 64}
    assert {case.seqlen_q for case in cases} >= {1, 2, 4, 8, 16}
    assert max(max(case.lengths) for case in cases) == 1 << 20
    assert any(case.window for case in cases)
    assert any(case.slots >= 64 * case.lengths[0] for case in cases)
    assert {case.kv_dtype for case in cases} == {"", "int8", "fp8"}
    one_long = next(case for case in cases if case.layout == "packed")
    assert sorted(one_long.lengths) == [1024] * 63 + [1 << 20]


def test_the_quick_cases_compile_nothing() -> None:
    assert not any(case.flex for case in shapes.quick_cases())
    assert any(case.flex for case in shapes.standard_cases())


def test_shapes_of_the_papers() -> None:
    """Section V of LeanAttention: heads without groups, contexts of 1k to 512k, and a batch."""
    cases = [case for case in shapes.standard_cases() if case.section == shapes.PAPERS]
    assert all(query == kv for query, kv in (case.heads for case in cases))
    for heads, head_dim, batch in [(n, 64, 1) for n in (16, 24, 56, 64)] + [
        (24, 64, 4),
        (24, 128, 1),
    ]:
        contexts = [
            case.lengths[0]
            for case in cases
            if (case.heads[0], case.head_dim, case.batch) == (heads, head_dim, batch)
        ]
        assert min(contexts) == 1024 and max(contexts) == 512 * 1024 and len(contexts) >= 6


def test_every_ragged_case_has_a_twin_of_as_many_bytes() -> None:
    for cases in LISTS:
        twins = [case for case in cases() if case.section == shapes.UNIFORM]
        for case in cases():
            if case.section == shapes.RAGGED:
                twin = shapes.uniform_twin(case)
                assert twin in twins and not twin.ragged
                assert case.io_bytes <= twin.io_bytes <= 1.001 * case.io_bytes


def test_bytes_are_those_that_ranges_cover() -> None:
    key = 2 * 2 * 8 * 2  # K and V, 2 heads, head_dim 8, 16 bits
    rows = 2 * 2 * 4 * 8 * 2  # q and o, 2 sequences, 4 heads
    case = CudaCase(heads=(4, 2), head_dim=8, lengths=(3, 5), capacity=100)
    assert case.io_bytes == 8 * key + rows and case.read_bytes == 8 * key
    assert case.set_bytes == 200 * key
    window = CudaCase(heads=(4, 2), head_dim=8, lengths=(3, 50), window=10, seqlen_q=2)
    assert window.io_bytes == (3 + 11) * key + 2 * rows
    paged = CudaCase(heads=(4, 2), head_dim=8, lengths=(3, 5), page_size=4)
    assert paged.io_bytes == case.io_bytes and paged.set_bytes == 16 * key
    packed = CudaCase(heads=(4, 2), head_dim=8, lengths=(3, 3, 9), layout="packed")
    assert packed.set_bytes == packed.read_bytes == 15 * key
    cached = CudaCase(kv_dtype="int8", heads=(4, 2), head_dim=8, lengths=(3, 5), capacity=100)
    scales = 2 * 2 * 4  # of K and V, 2 heads, in float32
    assert cached.read_bytes == 8 * (key // 2 + scales) and cached.set_bytes == 200 * (
        key // 2 + scales
    )
    assert cached.io_bytes == cached.read_bytes + rows
    latent = CudaCase(heads=(4, 1), head_dim=8, latent_dim=6, lengths=(3, 5), capacity=100)
    assert latent.read_bytes == 8 * 8 * 2 and latent.set_bytes == 200 * 8 * 2
    assert latent.io_bytes == latent.read_bytes + 2 * 4 * (8 + 6) * 2


def test_packed_needs_one_batch_stride() -> None:
    with pytest.raises(ValueError, match="packed sequences but the last must have one length"):
        CudaCase(lengths=(3, 4, 9), layout="packed")


def test_sets_exceed_the_cache() -> None:
    l2 = 50 << 20
    for case in shapes.full_cases():
        sets = num_sets(case.read_bytes, l2)
        if sets == 1:
            assert case.read_bytes >= 32 * l2
        else:
            assert (sets - 1) * case.read_bytes >= 2 * l2


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_inputs_are_the_problem_of_the_case(case: CudaCase) -> None:
    inputs = make_inputs(case)
    ranges = inputs.key_ranges
    for b, length in enumerate(case.lengths):
        for i in range(case.seqlen_q):
            begin, end = ranges[b, i].tolist()
            assert end == length - case.seqlen_q + 1 + i
            assert begin == (max(0, end - case.window) if case.window else 0)
        assert ranges[b, 0, 0] == case.first_key(length)
    results = [
        lean_decode(inputs.q, kv.k, kv.v, ranges, **inputs.options(i))
        for i, kv in enumerate(inputs.sets)
    ]
    o, lse = results[0]
    assert o.isfinite().all() and o.abs().max() < 100  # nothing unseen was read
    assert all(torch.equal(o, other) for other, _ in results[1:])
    first = inputs.sets[0]
    options = inputs.options(0)
    truth = Float64Check(inputs.q, first.k, first.v, ranges, **options)
    assert truth.accuracy(o, lse).right
    if inputs.all_keys:
        assert torch.equal(lean_decode(inputs.q, first.k, first.v, **options)[0], o)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_cuda_kernels_take_every_layout(case: CudaCase, cuda_kernels: torch.device) -> None:
    inputs = make_inputs(case, 1, cuda_kernels)
    kv, ranges, options = inputs.sets[0], inputs.key_ranges, inputs.options(0)
    o, lse = lean_decode(inputs.q, kv.k, kv.v, ranges, **options)
    truth = Float64Check(inputs.q, kv.k, kv.v, ranges, **options)
    assert truth.accuracy(o, lse).right


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_unseen_keys_would_show(case: CudaCase) -> None:
    """All ranges one key longer: another result, wherever there is a key outside."""
    inputs = make_inputs(case, 1)
    kv, ranges, options = inputs.sets[0], inputs.key_ranges.clone(), inputs.options(0)
    o, _ = lean_decode(inputs.q, kv.k, kv.v, ranges, **options)
    ranges[:, :, 1] += 1
    longer, _ = lean_decode(inputs.q, kv.k, kv.v, ranges, **options)
    outside = max(case.lengths) < case.slots or (case.ragged and case.layout != "packed")
    assert (longer.abs().max() > UNSEEN / 2) == outside
    assert torch.equal(o, longer) == (case.seqlen_q == 1 and not case.lengths_on_device)


@pytest.mark.parametrize("head_bytes", [1, 1 << 30], ids=["one head", "all heads"])
def test_float64_check_finds_a_wrong_row(head_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Float64Check, "CHUNK_BYTES", head_bytes)
    case = SMALL[7]
    inputs = make_inputs(case, 1)
    kv, table = inputs.sets[0], inputs.page_table
    o, lse = lean_decode(inputs.q, kv.k, kv.v, inputs.key_ranges, page_table=table)
    check = Float64Check(inputs.q, kv.k, kv.v, inputs.key_ranges, page_table=table)
    assert check.accuracy(o, lse).right and check.accuracy(o).right
    for wrong in (math.nan, o[1, 3, 0, 5].item() + 0.5):
        changed = o.clone()
        changed[1, 3, 0, 5] = wrong
        assert not check.accuracy(changed, lse).right
    assert not check.accuracy(o, lse + 1e-3).right
