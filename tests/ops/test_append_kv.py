# SPDX-License-Identifier: BSD-3-Clause
"""append_kv: rows go to their slots, quantised as the reference says, and nothing else changes."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import make_strided, to_device
from tiers import tiers
from tree_attention import append_kv, lean_decode, reference
from tree_attention.reference.attention import LARGEST

OP = "append_kv"
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CACHES = [*DTYPES, INT8, FLOAT8]


@dataclass
class Call:
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    options: dict

    def to(self, device: torch.device) -> "Call":
        tensors = (self.k, self.v, self.k_cache, self.v_cache, self.slots)
        options = {name: to_device(x, device) for name, x in self.options.items()}
        return Call(*(to_device(x, device) for x in tensors), options)

    def run(self, **changed):
        arguments = (self.k, self.v, self.k_cache, self.v_cache, self.slots)
        return append_kv(*arguments, **self.options | changed)


def make_call(
    *, batch=2, heads=2, tokens=3, capacity=20, head_dim=64, head_dim_v=None, page_size=0,
    dtype=torch.bfloat16, kv_dtype=INT8, layout="BHSD", scaled=True,
) -> Call:  # fmt: skip
    """Distinct slots, some tokens not kept; caches and scales full of what must stay."""
    dims = head_dim, head_dim_v or head_dim
    k, v = (
        make_strided((3 * torch.randn(batch, heads, tokens, dim)).to(dtype), layout) for dim in dims
    )
    outer = batch * capacity // page_size + 1 if page_size else batch
    shape = outer, heads, page_size or capacity
    caches = [make_strided(torch.full((*shape, dim), 5.0).to(kv_dtype), layout) for dim in dims]
    limit = outer * page_size if page_size else capacity
    if page_size:
        slots = torch.randperm(limit)[: batch * tokens].view(batch, tokens)
    else:
        slots = torch.stack([torch.randperm(limit)[:tokens] for _ in range(batch)])
    slots = slots.masked_fill(torch.rand(batch, tokens) < 0.2, -1)
    options: dict = {"paged": bool(page_size)}
    if scaled and kv_dtype in (INT8, FLOAT8):
        for name in ("k_scale", "v_scale"):
            options[name] = torch.full((*shape[:1], shape[2], shape[1]), 7.0).transpose(1, 2)
    return Call(k, v, *caches, slots, options)


def expected_of(x: Tensor, cache: Tensor, scale: Tensor | None, call: Call):
    """The cache and the scales after the call, one token at a time."""
    cache, scale = cache.clone(), None if scale is None else scale.clone()
    page_size = cache.shape[2]
    for b, i in call.slots.ne(-1).nonzero().tolist():
        slot = int(call.slots[b, i])
        outer, inner = divmod(slot, page_size) if call.options["paged"] else (b, slot)
        row = x[b, :, i]
        if scale is not None:
            cache[outer, :, inner], scale[outer, :, inner] = reference.quantise(row, cache.dtype)
        elif cache.dtype == FLOAT8:
            cache[outer, :, inner] = row.float().clamp(-448, 448).to(FLOAT8)
        else:
            cache[outer, :, inner] = row.to(cache.dtype)
    return cache, scale


def assert_same_bytes(actual: Tensor, expected: Tensor) -> None:
    actual, expected = (
        x.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for x in (actual, expected)
    )
    assert torch.equal(actual, expected), f"{(actual != expected).sum()} bytes differ"


def run_and_check(call: Call, device: torch.device, slots: Tensor | None = None) -> None:
    """`slots` are to mean the same as the call's."""
    inputs = call.k.clone(), call.v.clone()
    expected = [
        expected_of(x, cache, call.options.get(name), call)
        for x, cache, name in (
            (call.k, call.k_cache, "k_scale"), (call.v, call.v_cache, "v_scale"),
        )
    ]  # fmt: skip
    call = call.to(device)
    if slots is not None:
        call.slots = slots.to(device)
    assert call.run() is None
    for cache, name, (rows, scale) in zip(
        (call.k_cache, call.v_cache), ("k_scale", "v_scale"), expected, strict=True
    ):
        assert_same_bytes(cache, rows)
        if scale is not None:
            assert_same_bytes(call.options[name], scale)
    assert_same_bytes(call.k, inputs[0])
    assert_same_bytes(call.v, inputs[1])


@pytest.mark.parametrize("page_size", [0, 4], ids=["rows", "pages"])
@pytest.mark.parametrize("kv_dtype", CACHES, ids=lambda dtype: f"to {str(dtype)[6:]}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_every_dtype(dtype, kv_dtype, page_size, device):
    call = make_call(dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, layout="BSHD", tokens=9)
    assert (call.slots == -1).any() and (call.slots >= 0).any()
    run_and_check(call, device)


# The fixture only says which backend there is.
any_example = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


@any_example
@given(
    seed=st.integers(0, 2**31), batch=st.integers(1, 3), heads=st.integers(1, 3),
    tokens=st.integers(1, 6), head_dim=st.integers(1, 70), head_dim_v=st.integers(1, 40),
    page_size=st.sampled_from([0, 1, 5]), layout=st.sampled_from(["BHSD", "BSHD", "padded"]),
    dtype=st.sampled_from(DTYPES), kv_dtype=st.sampled_from(CACHES), scaled=st.booleans(),
)  # fmt: skip
def test_any_call(device, seed, scaled, kv_dtype, **shape):
    torch.manual_seed(seed)
    call = make_call(kv_dtype=kv_dtype, scaled=scaled or kv_dtype == INT8, **shape)
    run_and_check(call, device)


@pytest.mark.parametrize("batch, heads, tokens", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_nothing_to_append(batch, heads, tokens, device):
    k = torch.ones(batch, heads, tokens, 8, device=device)
    caches = torch.full((2, batch, heads, 4, 8), 5.0, device=device)
    append_kv(k, k, *caches, torch.zeros(batch, tokens, dtype=torch.int64, device=device))
    assert (caches == 5).all()


@pytest.mark.gpu("torch.compile")
@pytest.mark.parametrize("page_size", tiers([4], [0]), ids=["pages", "rows"])
@pytest.mark.parametrize("kv_dtype", CACHES, ids=lambda dtype: f"to {str(dtype)[6:]}")
def test_keys_alone(kv_dtype, page_size, device):
    """A cache whose values are a view of its keys."""
    call = make_call(kv_dtype=kv_dtype, page_size=page_size, tokens=9)
    expected, scales = expected_of(call.k, call.k_cache, call.options.get("k_scale"), call)
    call = call.to(device)
    scale = call.options.get("k_scale")
    options = {"k_scale": scale, "paged": bool(page_size)}
    arguments = (call.k, None, call.k_cache, None, call.slots)
    append_kv(*arguments, **options)
    assert_same_bytes(call.k_cache, expected)
    if scales is not None:
        assert_same_bytes(scale, scales)
    if kv_dtype != FLOAT8:  # of which opcheck cannot compare tensors
        op = torch.ops.tree_attention.append_kv.default
        results = torch.library.opcheck(op, arguments, options)
        assert len(results) >= 4 and set(results.values()) == {"SUCCESS"}, results


@any_example
@given(
    x=st.lists(st.floats(width=32), min_size=1, max_size=40),
    kv_dtype=st.sampled_from([INT8, FLOAT8]),
)
def test_any_numbers(device, x, kv_dtype):
    """Infinite, NaN, subnormal and zero among them: the bytes are the reference's."""
    row = torch.tensor(x)
    cache = torch.zeros(1, 1, 1, len(x), device=device).to(kv_dtype)
    scale = torch.zeros(2, 1, 1, 1, device=device)
    slots = torch.zeros(1, 1, dtype=torch.int64, device=device)
    v_cache = torch.zeros_like(cache)
    rows = row.view(1, 1, 1, -1).to(device)
    append_kv(rows, rows, cache, v_cache, slots, k_scale=scale[0], v_scale=scale[1])
    values, expected = reference.quantise(row, kv_dtype)
    assert_same_bytes(cache.flatten(), values)
    assert_same_bytes(v_cache.flatten(), values)
    assert_same_bytes(scale.flatten(), expected.expand(2))
    if row.isfinite().all():
        error = (values.double() * expected.double() - row.double()).abs().max()
        step = 0.5 if kv_dtype == INT8 else 16.0  # of the largest numbers, or of subnormal scales
        assert error <= step * expected.double() * 1.001 + 448 * 2.0**-149
    else:
        assert expected.isnan() and not values.float().any()


@pytest.mark.parametrize("kv_dtype", [INT8, FLOAT8])
def test_every_float16_is_rounded_to_even(kv_dtype, device):
    """All numbers of a format, ties among them, in rows whose scale is a power of two."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = numbers[numbers.isfinite()].float()
    largest = LARGEST[kv_dtype]
    numbers = numbers[numbers.abs() <= largest]
    x = torch.cat([torch.full((len(numbers), 1), float(largest)), numbers[:, None]], 1)
    x = x.view(1, 1, -1, 2)
    caches = [torch.zeros(x.shape, device=device).to(kv_dtype) for _ in range(2)]
    k_scale, v_scale = torch.zeros(2, *x.shape[:3], device=device)
    slots = torch.arange(x.shape[2], device=device)[None]
    rows = x.to(device)
    append_kv(rows, rows, *caches, slots, k_scale=k_scale, v_scale=v_scale)
    assert (k_scale == 1).all() and (v_scale == 1).all()
    expected = x.round().to(INT8) if kv_dtype == INT8 else x.to(FLOAT8)
    assert_same_bytes(caches[0], expected)
    assert_same_bytes(caches[1], expected)


def test_float8_without_scales_saturates(device):
    numbers = [1e9, -1e9, math.inf, -math.inf, 465.0, math.nan]
    x = torch.tensor(numbers, device=device).view(1, 1, 1, -1)
    cache, v_cache = (torch.zeros(x.shape, device=device).to(FLOAT8) for _ in range(2))
    append_kv(x, x, cache, v_cache, torch.zeros(1, 1, dtype=torch.int64, device=device))
    assert cache.float().flatten()[:5].tolist() == [448, -448, 448, -448, 448]
    assert cache.float().flatten()[5].isnan()


@pytest.mark.parametrize("kv_dtype", [INT8, FLOAT8])
def test_what_is_appended_is_what_attention_reads(kv_dtype):
    k, v = torch.randn(2, 2, 2, 40, 64)
    q = torch.randn(2, 8, 1, 64)
    (k8, k_scale), (v8, v_scale) = (reference.quantise(x, kv_dtype) for x in (k, v))
    caches = [torch.zeros(2, 2, 64, 64).to(kv_dtype) for _ in range(2)]
    scales = {name: torch.full((2, 2, 64), math.nan) for name in ("k_scale", "v_scale")}
    for begin, end in ((0, 30), (30, 31), (31, 40)):
        slots = torch.arange(begin, end).expand(2, -1)
        append_kv(k[:, :, begin:end], v[:, :, begin:end], *caches, slots, **scales)
    ranges = torch.tensor([0, 40]).int().repeat(2, 1, 1)
    result = lean_decode(q, *caches, ranges, **scales)
    expected = lean_decode(q, k8, v8, k_scale=k_scale, v_scale=v_scale)
    for x, y in zip(result, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kv_dtype", tiers([torch.bfloat16], [INT8]))
@pytest.mark.parametrize("page_size", tiers([4], [0]))
def test_opcheck(kv_dtype, page_size):
    """It cannot compare tensors of float8."""
    call = make_call(kv_dtype=kv_dtype, page_size=page_size)
    arguments = (call.k, call.v, call.k_cache, call.v_cache, call.slots)
    op = torch.ops.tree_attention.append_kv.default
    results = torch.library.opcheck(op, arguments, call.options)
    assert len(results) >= 4 and set(results.values()) == {"SUCCESS"}, results
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert call.run() is None


def test_compiles_into_one_graph():
    """The caches and scales are written, too."""
    torch._dynamo.reset()
    call, again = (torch.manual_seed(1) and make_call() for _ in range(2))

    def step(k, v, k_cache, v_cache, slots, k_scale, v_scale):
        append_kv(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
        return k_cache + 1

    def arguments(c: Call):
        scales = c.options["k_scale"], c.options["v_scale"]
        return c.k, c.v, c.k_cache, c.v_cache, c.slots, *scales

    with torch.no_grad():
        result = torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments(call))
        assert torch.equal(result, step(*arguments(again)))
    for x, y in zip(arguments(call), arguments(again), strict=True):
        assert_same_bytes(x, y)
