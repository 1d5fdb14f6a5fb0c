# SPDX-License-Identifier: BSD-3-Clause
"""The local operators: documentation and fake kernels (schemas and kernels: csrc/ops.cpp).

`torch.ops.tree_attention` has them once torch and the package, or this module, have been imported.
"""

import torch
from torch import Tensor
from typing_extensions import Unpack

from . import _loader
from ._numbers import boolean, integer, shown
from .options import (
    TENSOR_OPTIONS,
    AttentionOptions,
    check_no_vmap,
    check_option_names,
    check_tensors,
    takes_attention_options,
    with_numbers,
)

_extension = _loader.load()
_ops = torch.ops.tree_attention
# Looked up once, as every token's step calls them.
_lean_decode, _lean_decode_out = _ops.lean_decode.default, _ops.lean_decode.out
_check_decode = _ops.check_decode.default
_merge_states, _merge_states_out = _ops.merge_states.default, _ops.merge_states.out
_append_kv = _ops.append_kv.default


@takes_attention_options
def lean_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    result_dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]:
    """Exact attention of a few queries over the keys held here, with its log-sum-exp.

    Equivalent PyTorch (`tree_attention.reference.attention` is the whole contract in float64)::

        k, v = k * k_scale[..., None], v * v_scale[..., None]    # where they have 8 bits
        k, v = (x.repeat_interleave(num_heads_q // num_heads_kv, dim=1) for x in (k, v))
        scores = q @ k.mT * softmax_scale                    # then softcap, then ALiBi
        scores = scores.masked_fill(~visible, -inf)          # visible: begin <= key < end
        lse = scores.logsumexp(-1)
        o = (scores - lse[..., None]).exp() @ v

    Args:
        q: `[batch, num_heads_q, seqlen_q, head_dim]`, float32, bfloat16 or float16. Any strides
            with a contiguous last axis, for every tensor.
        k, v: `[batch, num_heads_kv, seqlen_k, head_dim]`, both in q's dtype, both int8 or both
            float8_e4m3fn; with `page_table` `[num_pages, num_heads_kv, page_size, head_dim]`.
            `num_heads_q` is a multiple of `num_heads_kv`; `v` may have another head_dim.
        key_ranges: int32 `[batch, seqlen_q, 2]`, the half-open range of keys each query sees,
            clamped to `[0, seqlen_k]`. The only mask: ragged lengths, padding, causal queries and
            windows are ranges. None: all keys. With `[batch, seqlen_q, num_ranges, 2]` a query
            sees the union of its ranges, in any order, and each takes what its keys take; see
            `tree_attention.patterns`.
        out_dtype: dtype of `o`, default q's; float32 when the state will be merged.
        result_dtype: dtype of what such states are merged to, default out_dtype. The weights of a
            16-bit q have as many digits as it needs, and more digits take longer on the CPU.
        out: `(o, lse)` to write into instead of new tensors, for example views of a send buffer.
            They share no memory with each other or another argument, but may interleave.

    Returns:
        o: `[batch, num_heads_q, seqlen_q, head_dim]`.
        lse: float32 `[batch, num_heads_q, seqlen_q]`, natural logarithm of the sum over scaled
        scores. A query without keys gets `o = 0` and `lse = -inf`, exactly.

    Raises:
        ValueError: an argument breaks the rules above.
        TypeError: q, k or v is no tensor, an option is no number, or there is no such keyword
            argument.
        RuntimeError: a gradient is required (inference only), or the GPU is too old.

    Keys and values of 8 bits are converted without an error: the result is what float32 arithmetic
    makes of what they stand for, up to the rounding of a weight to q's 16 bits on CUDA.

    Latent attention is a call with one kv head whose values are a view of the keys, with the same
    scales: `lean_decode(q, latents, latents[..., :512], k_scale=scale, v_scale=scale)`, where the
    latents have 576 columns.

    On CUDA (compute capability 8.0 or higher) head_dims are multiples of 8 up to 256, and q, k and
    v begin at, and have strides of, multiples of 16 bytes. For keys of 8 bits head_dims are
    multiples of 16, and q is bfloat16 or float16. Latents may have up to 576 columns of 16 bits, of
    which up to 512 are the values. The host never waits for the device, and
    calls can be captured in CUDA graphs, between whose replays key_ranges and every other tensor
    may change. Page ids are checked on the CPU; on CUDA only if the environment variable
    TREE_ATTENTION_CHECK_PAGES is 1, for which the host waits.

    For example::

        import torch
        from tree_attention import lean_decode

        q = torch.randn(1, 8, 1, 64)  # [batch, num_heads_q, seqlen_q, head_dim]
        k, v = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)  # 100 keys of 2 kv heads
        o, lse = lean_decode(q, k, v)
        print(o.shape, lse.shape)  # torch.Size([1, 8, 1, 64]) torch.Size([1, 8, 1])

    Source: the stream-K schedule of LeanAttention (arXiv:2405.10480).
    """
    if options:
        options = with_numbers("lean_decode", options)
    try:
        if out is None:
            result: tuple[Tensor, Tensor] = _lean_decode(
                q, k, v, key_ranges, out_dtype=out_dtype, result_dtype=result_dtype, **options
            )
            return result
        o, lse = out
        dtypes = {"out_dtype": out_dtype, "result_dtype": result_dtype}
        _lean_decode_out(q, k, v, key_ranges, o=o, lse=lse, **dtypes, **options)
        return out
    except (RuntimeError, TypeError, ValueError):
        _check_dtype("lean_decode", result_dtype, "result_dtype")
        outputs = {} if out is None else {"o": out[0], "lse": out[1]}
        _check_kinds("lean_decode", q, k, v, options, out_dtype, key_ranges=key_ranges, **outputs)
        raise


def check_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    **options: Unpack[AttentionOptions],
) -> None:
    """Raises what `lean_decode` would raise for these arguments, and does nothing else."""
    options = with_numbers("lean_decode", options)
    try:
        _check_decode(q, k, v, key_ranges, out_dtype=out_dtype, **options)
    except (RuntimeError, TypeError, ValueError):
        _check_kinds("lean_decode", q, k, v, options, out_dtype, key_ranges=key_ranges)
        raise


def _check_dtype(op: str, dtype: object, name: str = "out_dtype") -> None:
    """Raises TypeError, where torch's parser raises RuntimeError."""
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        raise TypeError(f"{op}: {name} must be a torch.dtype or None, got {shown(dtype)}")


def _check_kinds(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    out_dtype: object,
    **optional: object,
) -> None:
    """Raises TypeError for an unknown option, for what is no tensor and for what is no dtype.

    Only after the operator has refused the call, in words that name no argument.
    """
    _check_dtype(op, out_dtype)
    check_option_names(op, options)
    optional |= {name: x for name, x in options.items() if name in TENSOR_OPTIONS}
    given = {name: x for name, x in optional.items() if x is not None}
    check_tensors(op, q=q, k=k, v=v, **given)


def merge_states(
    o_parts: Tensor,
    lse_parts: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges n partial states of the same queries over disjoint keys, in the canonical order.

    Equivalent PyTorch, up to rounding::

        lse = lse_parts.logsumexp(0)
        o = ((lse_parts - lse).exp()[..., None] * o_parts).sum(0)

    Args:
        o_parts: `[n, ..., head_dim]`, float32, bfloat16 or float16, any strides, n >= 1.
        lse_parts: float32 `[n, ...]`, any strides; natural logarithm. A part with `-inf` is empty:
            it changes no bit of the result and its `o` is never read.
        out_dtype: dtype of `o`, default `o_parts`'. Arithmetic is float32.
        out: contiguous `(o, lse)` to write into instead of new tensors; `o`'s dtype is then the
            out_dtype. They share no memory with each other or the parts.

    Returns:
        o `[..., head_dim]` and lse `[...]`; `(0, -inf)` where every part is empty. n parts are
        split at the largest power of two below n, so merging aligned groups of 2^k parts first
        gives the same bits. NaN propagates to its row only.

    Raises:
        ValueError: shapes or dtypes break the rules above.
        TypeError: o_parts or lse_parts is no tensor.
        RuntimeError: a gradient is required.

    For example::

        import torch
        from tree_attention import lean_decode, merge_states

        q = torch.randn(1, 8, 1, 64)  # [batch, num_heads_q, seqlen_q, head_dim]
        k, v = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)  # 100 keys of 2 kv heads
        parts = [lean_decode(q, k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 40), (40, 100))]
        o_parts, lse_parts = (torch.stack(x) for x in zip(*parts))
        o, lse = merge_states(o_parts, lse_parts)
        print(torch.allclose(o, lean_decode(q, k, v)[0], atol=1e-6))  # True

    Source: the fix-up of LeanAttention section IV-A; Tree Attention, Algorithm 3.
    """
    check_tensors("merge_states", o_parts=o_parts, lse_parts=lse_parts)
    _check_dtype("merge_states", out_dtype)
    if out is None:
        result: tuple[Tensor, Tensor] = _merge_states(o_parts, lse_parts, out_dtype=out_dtype)
        return result
    o, lse = out
    if out_dtype not in (None, o.dtype):
        raise ValueError(
            f"merge_states: out_dtype must be out's {o.dtype} or None, got {out_dtype}"
        )
    _merge_states_out(o_parts, lse_parts, o=o, lse=lse)
    return out


def append_kv(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    paged: bool = False,
) -> None:
    """Writes the keys and values of new tokens into the cache, quantised where it has 8 bits.

    Equivalent PyTorch, without pages, for every token of sequence `b` and its `slot >= 0`::

        k_cache[b, :, slot], k_scale[b, :, slot] = reference.quantise(k[b, :, token], torch.int8)
        k_cache[b, :, slot] = k[b, :, token].to(k_cache.dtype)    # without scales

    and likewise the values. Where they are the keys' first columns (latent attention), `v` and
    `v_cache` are None and there is one scale: see `lean_decode`.

    Args:
        k, v: `[batch, num_heads_kv, tokens, head_dim]`, float32, bfloat16 or float16. Any strides
            with a contiguous last axis, for every tensor but the scales, which have any.
        k_cache, v_cache: `[batch, num_heads_kv, capacity, head_dim]` in one of these dtypes, int8
            or float8_e4m3fn; with `paged` `[num_pages, num_heads_kv, page_size, head_dim]`.
        slot_mapping: int64 `[batch, tokens]`: the slot in the sequence's own row of the cache, or
            with `paged` `page * page_size + offset`; -1: not kept here. Of tokens with the same
            slot the last is kept. On CUDA slots must differ: a row may become a mixture.
        k_scale, v_scale: float32, the caches' first three axes: required for int8, written with the
            rows. float8_e4m3fn without them takes the numbers themselves, where those beyond its
            largest, infinite ones among them, become 448 or -448; NaN stays NaN.
        paged: whether the caches are pages.

    Raises:
        ValueError: an argument breaks the rules above, a slot is out of range, or a cache or
            scale shares memory with itself or another argument; views that interleave do not.
            Nothing was written. On CUDA a slot out of range is not kept, or where the environment
            variable TREE_ATTENTION_CHECK_PAGES is 1, for which the host waits, an error.
        TypeError: one of the first five arguments is no tensor; v and v_cache may be None.
        RuntimeError: a gradient is required.

    For example::

        import torch
        from tree_attention import append_kv

        k_cache, v_cache = torch.zeros(1, 2, 8, 64), torch.zeros(1, 2, 8, 64)
        k, v = torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64)
        append_kv(k, v, k_cache, v_cache, torch.tensor([[5]]))
        print(torch.equal(k_cache[:, :, 5:6], k))  # True
    """
    check_tensors("append_kv", k=k, k_cache=k_cache, slot_mapping=slot_mapping)
    values = {"v": v, "v_cache": v_cache}
    check_tensors("append_kv", **{name: x for name, x in values.items() if x is not None})
    check_no_vmap("append_kv", k=k, k_cache=k_cache, slot_mapping=slot_mapping)
    paged = paged if type(paged) is bool else boolean("append_kv", "paged", paged)
    _append_kv(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale, paged=paged)


def lean_schedule(num_tiles: Tensor, num_workers: int) -> Tensor:
    """The partition of the kernels as a table: which worker runs which tiles of which output.

    Equivalent PyTorch::

        line = torch.repeat_interleave(torch.arange(len(num_tiles)), num_tiles)
        begins = torch.arange(num_workers + 1) * len(line) // num_workers    # of each worker

    Args:
        num_tiles: int32 `[outputs]`, on the CPU.
        num_workers: at least 1.

    Returns:
        int64 `[segments, 4]` with rows `(worker, output, tile_begin, tile_end)` in line order,
        tiles counted inside their output. Loads differ by at most one tile; an output without
        tiles has no row.

    Raises:
        ValueError: a negative number of tiles, another dtype or shape, or no worker.
        TypeError: num_tiles is no tensor, or num_workers no integer.

    For example::

        import torch
        from tree_attention import lean_schedule

        num_tiles = torch.tensor([3, 1], dtype=torch.int32)
        print(lean_schedule(num_tiles, 2).tolist())  # [[0, 0, 0, 2], [1, 0, 2, 3], [1, 1, 0, 1]]

    Source: LeanAttention, Algorithm 4, with its index arithmetic corrected.
    """
    check_tensors("lean_schedule", num_tiles=num_tiles)
    num_workers = integer("lean_schedule", "num_workers", num_workers, 1, (1 << 63) - 1)
    table: Tensor = _ops.lean_schedule.default(num_tiles, num_workers)
    return table


def reset_workspaces() -> None:
    """Makes CUDA workspaces usable again after a launch that was aborted; else nothing changes.

    Each device and stream has scratch memory for outputs that several blocks share, and a captured
    graph has its own, whose counters every launch returns to zero. One that was stopped half-way
    may not have done so, and later results would be wrong. This waits for the devices and zeroes
    all counters. It must not be called while a CUDA graph is captured.

    For example::

        import tree_attention

        tree_attention.reset_workspaces()
    """
    _extension.reset_workspaces()


def _check_devices(op: str, whose: str, device: torch.device, **arguments: object) -> None:
    """One tensor of the meta device suffices for dispatch to a fake kernel."""
    for name, argument in arguments.items():
        if isinstance(argument, Tensor) and argument.device != device:
            raise ValueError(
                f"{op}: {name} must be on {whose} device {device}, got {argument.device}"
            )


@torch.library.register_fake("tree_attention::lean_decode")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    **options: object,
) -> tuple[Tensor, Tensor]:
    _check_devices("lean_decode", "q's", q.device, k=k, v=v, key_ranges=key_ranges, **options)
    o = q.new_empty((*q.shape[:3], v.shape[3]), dtype=out_dtype or q.dtype)
    return o, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("tree_attention::lean_decode.out")
def _(q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor | None = None, **options: object) -> None:
    _check_devices("lean_decode", "q's", q.device, k=k, v=v, key_ranges=key_ranges, **options)


@torch.library.register_fake("tree_attention::check_decode")
def _(q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor | None = None, **options: object) -> None:
    _check_devices("lean_decode", "q's", q.device, k=k, v=v, key_ranges=key_ranges, **options)


@torch.library.register_fake("tree_attention::merge_states")
def _(
    o_parts: Tensor, lse_parts: Tensor, *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    _check_devices("merge_states", "o_parts'", o_parts.device, lse_parts=lse_parts)
    o = o_parts.new_empty(o_parts.shape[1:], dtype=out_dtype or o_parts.dtype)
    return o, lse_parts.new_empty(lse_parts.shape[1:])


@torch.library.register_fake("tree_attention::merge_states.out")
def _(o_parts: Tensor, lse_parts: Tensor, **outputs: object) -> None:
    _check_devices("merge_states", "o_parts'", o_parts.device, lse_parts=lse_parts, **outputs)


@torch.library.register_fake("tree_attention::append_kv")
def _(k: Tensor, *tensors: Tensor | None, paged: bool = False, **scales: object) -> None:
    names = ("v", "k_cache", "v_cache", "slot_mapping")
    _check_devices("append_kv", "k's", k.device, **dict(zip(names, tensors, strict=True)), **scales)


@torch.library.register_fake("tree_attention::linear_of_experts")
def _(
    x: Tensor,
    experts: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    front: int,
    is_transposed: bool,
) -> Tensor:
    return x.new_empty((experts.shape[0], weight.shape[2 if is_transposed else 1]))


@torch.library.register_fake("tree_attention::lean_schedule")
def _(num_tiles: Tensor, num_workers: int) -> Tensor:
    num_segments = torch.library.get_ctx().new_dynamic_size()
    return num_tiles.new_empty((num_segments, 4), dtype=torch.int64)
