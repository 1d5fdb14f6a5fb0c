# SPDX-License-Identifier: BSD-3-Clause
"""What CUDA refuses beyond test_decode_errors.py, and how it says so."""

from functools import partial

import pytest
import torch

from emulated import Limits, check_capability, emulated_operators, plan
from helpers import make_problem
from tree_attention import lean_decode, merge_states


def message_of(call, kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value).splitlines()[0]


def shifted(x: torch.Tensor, elements: int) -> torch.Tensor:
    """A copy that begins `elements` later in its storage."""
    storage = torch.empty(x.numel() + elements, dtype=x.dtype, device=x.device)
    return storage[elements:].view(x.shape).copy_(x)


def with_stride(x: torch.Tensor, axis: int, elements: int) -> torch.Tensor:
    """A copy whose stride on an outer axis is `elements` longer."""
    stride = list(x.stride())
    for outer in range(axis + 1):
        stride[outer] += elements
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


@pytest.mark.parametrize("head_dim", [1, 20, 100, 257, 264, 576])
def test_head_dim(head_dim, cuda_kernels):
    message = f"must be a multiple of 8 up to 256 on CUDA, got {head_dim}"
    problem = make_problem(head_dim=head_dim, head_dim_v=64).to(cuda_kernels)
    assert message_of(problem.run) == f"lean_decode: head_dim {message}"
    problem = make_problem(head_dim=64, head_dim_v=head_dim).to(cuda_kernels)
    assert message_of(problem.run) == f"lean_decode: head_dim of v {message}"


def test_outputs_are_always_cut(cuda_kernels):
    problem = make_problem().to(cuda_kernels)
    assert message_of(lambda: problem.run(num_workers=-1)) == (
        "lean_decode: num_workers must not be negative on CUDA, got -1"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_alignment(argument, dtype, cuda_kernels):
    problem = make_problem(dtype=dtype, seqlen_q=2).to(cuda_kernels)
    x = getattr(problem, argument)
    elements = 16 // dtype.itemsize
    problem.run()
    setattr(problem, argument, shifted(x, elements))
    problem.run()
    setattr(problem, argument, shifted(x, 1))
    assert message_of(problem.run) == (
        f"lean_decode: {argument} must begin at a multiple of 16 bytes on CUDA, got one "
        f"{dtype.itemsize} bytes beyond"
    )
    for axis in range(3):
        setattr(problem, argument, with_stride(x, axis, elements))
        problem.run_and_check()
        setattr(problem, argument, with_stride(x, axis, 1))
        assert message_of(problem.run) == (
            f"lean_decode: {argument} must have strides that are multiples of 16 bytes on CUDA, "
            f"got {getattr(problem, argument).stride(0)} elements of {dtype.itemsize} bytes on "
            f"axis 0"
        )


def test_keys_are_counted_in_32_bits(cuda_kernels):
    """Rows that are one in memory: as many keys as CUDA takes, of which the last few are seen."""
    limit = 2**31 - 257
    row = torch.randn(1, 1, 1, 64, device=cuda_kernels)
    for keys in (limit, limit + 1):
        k = row.expand(1, 1, keys, 64)
        ranges = torch.tensor([[[keys - 5, keys]]], dtype=torch.int32, device=cuda_kernels)
        if keys == limit:
            o, _ = lean_decode(row, k, k, ranges)
            torch.testing.assert_close(o, row)
        else:
            assert message_of(lambda k=k, ranges=ranges: lean_decode(row, k, k, ranges)) == (
                f"lean_decode: seqlen_k must be at most {limit} on CUDA, got {keys}"
            )


@pytest.mark.parametrize("seqlen_k", [1, 70])
def test_strides_of_axes_with_one_element_do_not_matter(seqlen_k, cuda_kernels):
    problem = make_problem(batch=1, num_heads_kv=1, group_size=1, seqlen_k=seqlen_k)
    problem = problem.to(cuda_kernels)
    for name in ("q", "k", "v"):
        x = getattr(problem, name)
        token_stride = 7 if x.shape[2] == 1 else x.stride(2)
        setattr(problem, name, x.as_strided(x.shape, (3, 5, token_stride, 1)))
    problem.run_and_check()


def test_refused_arguments_leave_the_outputs_alone(cuda_kernels):
    problem = make_problem().to(cuda_kernels)
    out = problem.run()
    for x in out:
        x.fill_(7)
    problem.k = shifted(problem.k, 1)
    message_of(lambda: problem.run(out=out))
    assert all((x == 7).all() for x in out)


def test_old_architectures():
    for op in ("lean_decode", "merge_states"):
        check_capability(op, "NVIDIA A100", 8, 0)
        check_capability(op, "NVIDIA H200", 9, 0)
        call = partial(check_capability, op, "Tesla T4", 7, 5)
        assert message_of(call, RuntimeError) == (
            f"{op}: the CUDA device must have compute capability 8.0 or higher, got 7.5 "
            "(Tesla T4); tensors on the CPU need no GPU"
        )


def test_shared_memory():
    """A device with less shared memory than every kernel needs is refused."""
    problem = make_problem(head_dim=256)
    small = Limits(3, 64 << 10, 48 << 10)
    needed = plan(problem.q.dtype, 256, 4, small).shared_bytes
    with emulated_operators(0, small):
        assert message_of(problem.run) == (
            f"lean_decode: head_dim 256 needs {needed} bytes of shared memory per block, the CUDA "
            f"device has {48 << 10}"
        )


def test_number_of_tiles(cuda_kernels):
    """Blocks add them in 32 bits; no memory is that large, but views of it are."""
    q = torch.zeros(256, 1, 1, 64, dtype=torch.bfloat16, device=cuda_kernels)
    k = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device=cuda_kernels)
    k = k.expand(256, 1, 2**30, 64)
    assert message_of(lambda: lean_decode(q, k, k)) == (
        "lean_decode: batch x blocks of 8 query rows x tiles of 128 keys must be below 2^31 on "
        f"CUDA, got {256 * (2**23 + 1)}; attend to fewer sequences or query tokens in one call"
    )


def test_number_of_tiles_of_a_worker(cuda_kernels):
    q, k = (torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device=cuda_kernels) for _ in range(2))
    q, k = q.expand(1, 600, 1, 64), k.expand(1, 600, 2**30, 64)
    assert message_of(lambda: lean_decode(q, k, k, num_workers=2)) == (
        "lean_decode: each of 2 workers must have less than 2^31 tiles of 128 keys on CUDA, got "
        f"{300 * (2**23 + 1)}; ask for more workers or attend to fewer kv heads in one call"
    )


@pytest.fixture
def check_pages(monkeypatch) -> None:
    monkeypatch.setenv("TREE_ATTENTION_CHECK_PAGES", "1")


@pytest.mark.parametrize("bad_id", [-1, 12, 2**31 - 1])
@pytest.mark.parametrize("per_head", [False, True])
def test_page_ids(per_head, bad_id, cuda_kernels, check_pages):
    """The words of the CPU; entries that no range needs may be anything."""
    problem = make_problem(seqlen_k=50, seqlen_q=2, page_size=10, per_head=per_head)
    problem.key_ranges = torch.tensor([[[20, 30], [10, 20]], [[0, 0], [30, 31]]]).int()
    table = problem.options["page_table"]
    num_pages = problem.k.shape[0]
    if bad_id == 12:
        bad_id = num_pages
    table[0, ..., 0], table[0, ..., 3:], table[1, ..., :3], table[1, ..., 4:] = (bad_id,) * 4
    problem.to(cuda_kernels).run_and_check()
    for batch, page in ((0, 1), (0, 2), (1, 3)):
        before = table.clone()
        (table[batch, 1] if per_head else table[batch])[page] = bad_id
        expected = (
            f"lean_decode: page_table must hold page ids in [0, {num_pages}) where key_ranges "
            f"needs them, got {bad_id} for page {page} of sequence {batch}"
        )
        assert message_of(problem.to(cuda_kernels).run) == expected
        table.copy_(before)


@pytest.mark.gpu("check of a capture")
def test_page_ids_are_not_checked_during_a_capture(cuda, check_pages):
    problem = make_problem(page_size=16, dtype=torch.bfloat16).to(cuda)
    problem.run_and_check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        message = message_of(problem.run, RuntimeError)
        torch.ones(1, device=cuda)  # a graph must not be empty
    assert message == (
        "lean_decode: TREE_ATTENTION_CHECK_PAGES=1 must not be set while a CUDA graph is "
        "captured: the check waits for the device"
    )


@pytest.mark.gpu("devices that an operator sees")
@pytest.mark.parametrize("own, other", [("cuda:0", "cpu"), ("cpu", "cuda:0")])
@pytest.mark.parametrize("argument", ["q", "k", "v", "key_ranges", "o", "lse"])
def test_mixed_devices(argument, own, other, cuda):
    """Without a GPU: test_decode_errors.py."""
    problem = make_problem(ranges="ragged").to(torch.device(own))
    o, lse = problem.run()
    x = {"q": problem.q, "k": problem.k, "v": problem.v, "key_ranges": problem.key_ranges}
    x |= {"o": o, "lse": lse}
    x[argument] = x[argument].to(other)
    message = message_of(
        lambda: lean_decode(x["q"], x["k"], x["v"], x["key_ranges"], out=(x["o"], x["lse"]))
    )
    if argument == "q":
        assert message == f"lean_decode: k must be on q's device {other}, got {own}"
    else:
        assert message == f"lean_decode: {argument} must be on q's device {own}, got {other}"


@pytest.mark.gpu("gradients")
def test_gradients_are_refused(cuda):
    problem = make_problem().to(cuda)
    problem.q.requires_grad_()
    message = message_of(problem.run, RuntimeError)
    assert "q must not require a gradient (inference only)" in message
    with pytest.raises(RuntimeError, match="o_parts must not require a gradient"):
        merge_states(torch.ones(2, 4, 8, device=cuda).requires_grad_(), torch.ones(2, 4).to(cuda))


def test_last_axes_are_contiguous(cuda):
    problem = make_problem().to(cuda)
    problem.v = problem.v.transpose(2, 3).contiguous().transpose(2, 3)
    assert message_of(problem.run) == (
        "lean_decode: v must have a contiguous last axis, got stride 150"
    )
