# SPDX-License-Identifier: BSD-3-Clause
"""Problems for `lean_decode`, with NaN wherever nothing may be read, and the error bounds.

The bound of every comparison: relative to the largest magnitude of its row, `o` may be off the
float64 reference by twice what plain PyTorch in the same dtype is, plus one unit in the last place;
`lse` by twice what plain float32 PyTorch is, plus four.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tree_attention import _C, reference

NAN, INF = math.nan, math.inf


def assert_close_to_reference(
    o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Checks `(o, lse)`, from any backend, split or number of ranks, against the reference of the
    same arguments, and returns that reference."""
    inputs = [None if x is None else x.cpu() for x in (q, k, v, key_ranges)]
    options = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
    with one_thread():
        true_o, true_lse = reference.attention(*inputs, **options)
        plain = {
            dtype: reference.attention(*inputs, **options, dtype=dtype)
            for dtype in {q.dtype, torch.float32}
        }
    plain_o, plain_lse = plain[q.dtype][0], plain[torch.float32][1]
    assert o.shape == true_o.shape and lse.shape == true_lse.shape
    assert lse.dtype == torch.float32
    assert_same_non_finite("o", o, true_o)
    assert_same_non_finite("lse", lse, true_lse)

    ulp = max(torch.finfo(q.dtype).eps, torch.finfo(o.dtype).eps)
    limit = 2 * _row_errors(plain_o, true_o).max().item() + ulp
    assert limit < 0.5, f"the yardstick is too coarse to test anything: {limit:.2g}"
    errors = _row_errors(o, true_o)
    assert errors.max() <= limit, (
        f"o: relative error {errors.max():.3g} in row {_argmax(errors)}, limit {limit:.3g}"
    )

    plain_error = _finite(plain_lse.double() - true_lse, true_lse).abs().max().item()
    size = _finite(true_lse, true_lse).abs().clamp(min=1)
    limits = 2 * plain_error + 4 * torch.finfo(torch.float32).eps * size
    excess = _finite(lse.cpu().double() - true_lse, true_lse).abs() / limits
    assert excess.max() <= 1, f"lse: {excess.max():.3g} times its limit in row {_argmax(excess)}"
    return true_o, true_lse


@contextmanager
def one_thread() -> Iterator[None]:
    """Many small operations are faster so, above all beside other work on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _row_errors(o: Tensor, truth: Tensor) -> Tensor:
    """The largest error of each row relative to the row's largest magnitude."""
    error = _finite(o.cpu().double() - truth, truth).abs().amax(-1)
    return error / _finite(truth, truth).abs().amax(-1).clamp(min=1e-30)


def _finite(x: Tensor, truth: Tensor) -> Tensor:
    return torch.where(truth.isfinite(), x, 0.0)


def _argmax(x: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(x.argmax(), x.shape))


def assert_same_non_finite(name: str, actual: Tensor, expected: Tensor) -> None:
    """NaN, +inf and -inf stand at the same places."""
    actual, expected = actual.cpu(), expected.cpu()
    for what, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differ = test(actual) != test(expected)
        assert not differ.any(), f"{name}: {what} differs at {differ.nonzero()[:4].tolist()}"


def assert_same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> None:
    for name, x, y in zip(("o", "lse")[: len(a)], a, b, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        differ = x.contiguous().view(integer) != y.contiguous().view(integer)
        assert not differ.any(), f"{name}: {differ.sum()} elements differ in bits"


def rounds_weights(o: Tensor) -> bool:
    """True where `o` has no more digits than the weights of its values (docs/numerics.md)."""
    in_pairs = not o.is_cuda and _C.cpu_instruction_set() in ("avx512_bf16", "neon_bf16")
    return in_pairs and o.dtype == torch.bfloat16


def make_strided(x: Tensor, layout: str) -> Tensor:
    """A copy of 4-D `x` with a contiguous last axis, in storage that is NaN everywhere else.

    `BHSD` is contiguous, `BSHD` has the token axis before the heads. `padded` has gaps on every
    axis and rows at multiples of 16 bytes, as CUDA needs them; `unaligned` rows begin anywhere.
    """
    if layout == "BHSD":
        return x.contiguous()
    if layout == "BSHD":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    assert layout in ("padded", "unaligned")
    begin = 1 if layout == "unaligned" else 16 // x.element_size()
    *outer, dim = x.shape
    filler = -128 if x.dtype == torch.int8 else NAN
    storage = torch.full([*(size + 3 for size in outer), 2 * begin + dim], filler, dtype=x.dtype)
    view = storage[(*(slice(1, 1 + size) for size in outer), slice(begin, begin + dim))]
    return view.copy_(x)


def to_device(x: Any, device: torch.device) -> Any:
    """A tensor with its strides, which `.to` would not keep of views; anything else as it is."""
    if not isinstance(x, Tensor) or x.device == device:
        return x
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return storage.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def paginate(
    k: Tensor, v: Tensor, page_size: int, *, per_head: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Scatters keys and values over pages in random order, among unused pages full of NaN.

    Returns `k_pages`, `v_pages` `[num_pages, num_heads_kv, page_size, dim]` and an int32 table
    `[batch, pages]`, or `[batch, num_heads_kv, pages]` where each head has pages of its own.
    """
    batch, num_heads, seqlen_k, _ = k.shape
    pages = -(-seqlen_k // page_size)
    num_lists = num_heads if per_head else 1
    num_pages = batch * num_lists * pages + 2
    table = torch.randperm(num_pages)[: batch * num_lists * pages].view(batch, num_lists, pages)
    stored = []
    for x in (k, v):
        padded = x.new_full((batch, num_heads, pages * page_size, x.shape[3]), NAN)
        padded[:, :, :seqlen_k] = x
        chunks = padded.unflatten(2, (pages, page_size))  # [batch, head, page, slot, dim]
        storage = x.new_full((num_pages, num_heads, page_size, x.shape[3]), NAN)
        heads = torch.arange(num_heads)[None, :, None]
        storage[table.expand(batch, num_heads, pages), heads] = chunks
        stored.append(storage)
    table = table if per_head else table[:, 0]
    return stored[0], stored[1], table.int()


def make_key_ranges(kind: str, batch: int, seqlen_q: int, seqlen_k: int) -> Tensor | None:
    """int32 `[batch, seqlen_q, 2]` of a named kind, or three of them per query for `several`; None
    for `all`."""
    i = torch.arange(seqlen_q)
    length = torch.randint(seqlen_k + 1, (batch, 1))
    if kind == "all":
        return None
    if kind == "ragged":
        begin, end = torch.zeros(batch, seqlen_q), length.expand(-1, seqlen_q)
    elif kind == "left padded":
        begin, end = length.expand(-1, seqlen_q), torch.full((batch, seqlen_q), seqlen_k)
    elif kind == "causal":  # the first queries may stand before the first key
        begin, end = torch.zeros(batch, seqlen_q), (length - seqlen_q + 1 + i).clamp(min=0)
    elif kind == "window":
        end = (length - seqlen_q + 1 + i).clamp(min=0)
        begin = (end - 7).clamp(min=0)
    else:  # empty, inverted and beyond the cache among them; several also overlap
        assert kind in ("random", "several")
        each = (3,) if kind == "several" else ()
        begin, end = torch.randint(-3, seqlen_k + 4, (2, batch, seqlen_q, *each))
    return torch.stack([begin, end], -1).int()


@dataclass
class Problem:
    """The arguments of one call of `lean_decode`."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_ranges: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, **extra: Any) -> tuple[Tensor, Tensor]:
        from tree_attention import lean_decode

        return lean_decode(self.q, self.k, self.v, self.key_ranges, **self.options, **extra)

    def check(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return assert_close_to_reference(
            o, lse, self.q, self.k, self.v, self.key_ranges, **self.options
        )

    def run_and_check(self, **extra: Any) -> tuple[Tensor, Tensor]:
        o, lse = self.run(**extra)
        self.check(o, lse)
        return o, lse

    def to(self, device: torch.device) -> "Problem":
        options = {name: to_device(x, device) for name, x in self.options.items()}
        tensors = (to_device(x, device) for x in (self.q, self.k, self.v, self.key_ranges))
        moved = Problem(*tensors, options)
        if self.k.numel() and self.v.data_ptr() == self.k.data_ptr():  # latents
            moved.v = moved.k[..., : self.v.shape[3]]
        return moved

    def shard(self, layout: Any, rank: int) -> "Problem":
        """What `rank` holds of this problem (without pages), with its local key ranges."""
        slots = layout.local_slots(rank, 0, self.k.shape[2]).to(self.k.device)
        ranges = self.key_ranges
        if ranges is not None:
            local = layout.local_range(rank, ranges[..., 0], ranges[..., 1])
            ranges = torch.stack(local, -1).int()
        options = dict(self.options)
        if "alibi_slopes" in options:
            options["key_layout"] = layout.key_layout(rank)
        for name in options.keys() & {"k_scale", "v_scale"}:
            options[name] = options[name][:, :, slots]
        return replace(
            self, k=self.k[:, :, slots], v=self.v[:, :, slots], key_ranges=ranges, options=options
        )


def hide(x: Tensor, kv_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantise`, with the NaN that may not be read in the values as well, where they have one."""
    values, scale = reference.quantise(x, kv_dtype)
    if kv_dtype == torch.float8_e4m3fn:
        values = values.float().masked_fill(scale.isnan()[..., None], NAN).to(kv_dtype)
    return values, scale


def make_problem(
    *,
    batch: int = 2,
    num_heads_kv: int = 2,
    group_size: int = 4,
    seqlen_q: int = 1,
    seqlen_k: int = 150,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    ranges: str = "all",
    layout: str = "BHSD",
    page_size: int = 0,
    per_head: bool = False,
    alibi: float = 0.0,
    score_size: float = 1.0,
    **options: Any,
) -> Problem:
    """A random problem on the CPU: scores of standard deviation `score_size`, the largest slope
    `alibi`, NaN in every key and value that no query sees, between strides and in unused pages.
    Keys and values of 8 bits have it in their scales, and float8 in both."""
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    num_heads_q = num_heads_kv * group_size
    q = torch.randn(batch, num_heads_q, seqlen_q, head_dim) * score_size
    k = torch.randn(batch, num_heads_kv, seqlen_k, head_dim)
    v = torch.randn(batch, num_heads_kv, seqlen_k, head_dim_v)
    if head_dim_v < 8:
        v = v.abs()  # else a whole row may cancel, and nothing is small relative to it
    key_ranges = make_key_ranges(ranges, batch, seqlen_q, seqlen_k)
    if key_ranges is not None:
        if page_size:  # the last page's tail is no key
            key_ranges = key_ranges.clamp(max=seqlen_k)
        j = torch.arange(seqlen_k)
        ranges_of_all = key_ranges.flatten(1, -2)
        seen = ((ranges_of_all[..., :1] <= j) & (j < ranges_of_all[..., 1:])).any(1)
        for x in (k, v):
            x.masked_fill_(~seen[:, None, :, None], NAN)
    if alibi:
        options["alibi_slopes"] = alibi * 2.0 ** -torch.arange(num_heads_q).remainder(4.0)
        options["query_positions"] = torch.randint(seqlen_k + 1, (batch, seqlen_q))
        options.setdefault("key_layout", (3, 16, 48))
    if page_size:
        k, v, options["page_table"] = paginate(k, v, page_size, per_head=per_head)
        if key_ranges is None:
            key_ranges = torch.tensor([0, seqlen_k], dtype=torch.int32).repeat(batch, seqlen_q, 1)
    if kv_dtype is None:
        k, v = k.to(dtype), v.to(dtype)
    else:
        (k, options["k_scale"]), (v, options["v_scale"]) = (hide(x, kv_dtype) for x in (k, v))
        if layout != "BHSD":  # any strides
            for name in ("k_scale", "v_scale"):
                options[name] = torch.stack([options[name], options[name] * NAN], -1)[..., 0]
    q, k, v = (make_strided(x, layout) for x in (q.to(dtype), k, v))
    return Problem(q, k, v, key_ranges, options)
