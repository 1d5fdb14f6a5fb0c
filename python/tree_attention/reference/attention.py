# SPDX-License-Identifier: BSD-3-Clause
"""Attention, the merge of states and 8-bit keys: what every kernel is tested against."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# The largest magnitude of a row that is quantised becomes this number.
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_layout: Sequence[int] = (0, 1, 1),
    page_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Compute `lean_decode` one set of keys at a time, with the same arguments.

    Args:
        dtype: dtype of every step and of the results. With q's own dtype this is plain PyTorch,
            whose errors set the bounds for this library's.

    Returns:
        o: `[batch, num_heads_q, seqlen_q, head_dim_v]`.
        lse: `[batch, num_heads_q, seqlen_q]`, natural logarithm of the sum of the exponentiated
            scores. A query without keys has `o = 0` and `lse = -inf`.

    For example::

        import torch
        from tree_attention.reference import attention

        q = torch.randn(1, 8, 1, 64)  # [batch, num_heads_q, seqlen_q, head_dim]
        k, v = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)  # 100 keys of 2 kv heads
        o, lse = attention(q, k, v)
        print(o.dtype)  # torch.float64
    """
    batch, num_heads_q, seqlen_q, head_dim = q.shape
    num_heads_kv, group_size = k.shape[1], num_heads_q // k.shape[1]
    seqlen_k = k.shape[2] if page_table is None else page_table.shape[-1] * k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale

    o = torch.zeros(batch, num_heads_q, seqlen_q, v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full(o.shape[:-1], -math.inf, dtype=dtype, device=q.device)
    if key_ranges is None:
        key_ranges = torch.tensor([0, seqlen_k]).expand(batch, seqlen_q, 2)
    for b in range(batch):
        # Queries of one sequence with the same ranges see the same keys.
        sets, set_of = key_ranges[b].flatten(1).unique(dim=0, return_inverse=True)
        # What no query sees is not read. keys, values: [num_heads_kv, len(seen), dim].
        seen = _slots(sets.flatten().tolist(), seqlen_k, q.device)
        keys = _tokens(k, b, seen, page_table).to(dtype)
        values = _tokens(v, b, seen, page_table).to(dtype)
        if k_scale is not None:
            keys = keys * _tokens(k_scale, b, seen, page_table).to(dtype)[..., None]
        if v_scale is not None:
            values = values * _tokens(v_scale, b, seen, page_table).to(dtype)[..., None]
        for n, ranges in enumerate(sets.tolist()):
            j = _slots(ranges, seqlen_k, q.device)
            if not len(j):
                continue
            i = (set_of == n).nonzero().flatten().to(q.device)
            q_i = q[b][:, i].to(dtype).reshape(num_heads_kv, group_size * len(i), head_dim)
            rows = _as_slice(torch.searchsorted(seen, j))

            scores = scale * _product(q_i, keys[:, rows].mT)
            scores = scores.view(num_heads_kv, group_size, len(i), len(j))
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                assert query_positions is not None
                first, block, stride = key_layout
                key_positions = first + j // block * stride + j % block
                slopes = alibi_slopes.to(dtype).reshape(num_heads_kv, group_size, 1, 1)
                scores = scores - slopes * (query_positions[b][i][:, None] - key_positions)

            lse_i = torch.logsumexp(scores, dim=-1)
            lse[b][:, i] = lse_i.flatten(0, 1)
            # A key with the score -inf is no key. Softmax of such scores alone would be NaN.
            weights = torch.softmax(scores, dim=-1).masked_fill(lse_i[..., None] == -math.inf, 0)
            o_i = _product(weights.flatten(1, 2), values[:, rows])
            o[b][:, i] = o_i.view(num_heads_q, len(i), -1)
    return o, lse


def _slots(ranges: list[int], seqlen_k: int, device: torch.device) -> Tensor:
    """The slots in any of the ranges `begin, end, begin, end, ...`, ascending."""
    is_visible = torch.zeros(seqlen_k, dtype=torch.bool, device=device)
    for begin, end in zip(ranges[::2], ranges[1::2], strict=True):
        is_visible[max(begin, 0) : max(end, 0)] = True
    return is_visible.nonzero().flatten()


def _as_slice(rows: Tensor) -> slice | Tensor:
    """Ascending rows; a slice, which copies nothing, where none is missing between them."""
    first, end = int(rows[0]), int(rows[-1]) + 1
    return slice(first, end) if end - first == len(rows) else rows


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Matrices of 16 bits are multiplied in float32, in which their product sums too: on some CPUs
    it takes 25 times as long."""
    if a.dtype.itemsize == 2:
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def _tokens(x: Tensor, b: int, j: Tensor, page_table: Tensor | None) -> Tensor:
    """The rows `j` of sequence `b` in keys, values or scales: `[num_heads_kv, len(j), ...]`."""
    if page_table is None:
        return x[b][:, j]
    num_heads_kv, page_size = x.shape[1], x.shape[2]
    pages = page_table[b].expand(num_heads_kv, -1)[:, j // page_size].long()
    heads = torch.arange(num_heads_kv, device=x.device)[:, None]
    return x[pages, heads, j % page_size]


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merges the states `(o, lse)` of two disjoint sets of keys, of which `a` is the lower one.

    A state with `lse = -inf` is empty: it is left out by selection, and its `o` is not used.

    Returns:
        The state of the union of both sets; `lse` is a natural logarithm.

    For example::

        import torch
        from tree_attention.reference import attention, merge

        q = torch.randn(1, 8, 1, 64)  # [batch, num_heads_q, seqlen_q, head_dim]
        k, v = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)  # 100 keys of 2 kv heads
        o, lse = merge(
            attention(q, k[:, :, :40], v[:, :, :40]), attention(q, k[:, :, 40:], v[:, :, 40:])
        )
        print(torch.allclose(o, attention(q, k, v)[0]))  # True
    """
    (o_a, lse_a), (o_b, lse_b) = a, b
    empty_a, empty_b = lse_a == -math.inf, lse_b == -math.inf
    t = torch.exp(-(lse_b - lse_a).abs())
    larger = 1 / (1 + t)
    weight_a = torch.where(lse_a >= lse_b, larger, t * larger)
    weight_b = torch.where(lse_a >= lse_b, t * larger, larger)
    lse = torch.maximum(lse_a, lse_b) + torch.log1p(t)
    o = weight_a[..., None] * o_a + weight_b[..., None] * o_b

    lse = torch.where(empty_a, lse_b, torch.where(empty_b, lse_a, lse))
    o_empty = torch.where(empty_b[..., None], torch.zeros_like(o), o_b)
    o = torch.where(empty_a[..., None], o_empty, torch.where(empty_b[..., None], o_a, o))
    return o, lse


def merge_states(o_parts: Tensor, lse_parts: Tensor) -> tuple[Tensor, Tensor]:
    """Merges `n` partial states over the canonical tree.

    The tree splits `n` parts at the largest power of two below `n`.

    Args:
        o_parts: `[n, ..., head_dim]`.
        lse_parts: `[n, ...]`, natural logarithms.

    Returns:
        o: `[..., head_dim]` in float64; 0 where all parts are empty.
        lse: `[...]` in float64; -inf where all parts are empty.

    For example::

        import torch
        from tree_attention.reference import merge_states

        o, lse = merge_states(torch.randn(3, 8, 64), torch.randn(3, 8))
        print(o.shape, lse.shape)  # torch.Size([8, 64]) torch.Size([8])
    """
    n = len(lse_parts)
    if n == 1:
        o, lse = o_parts[0].double(), lse_parts[0].double()
        return torch.where((lse == -math.inf)[..., None], torch.zeros_like(o), o), lse
    middle = 1 << (n - 1).bit_length() - 1
    lower = merge_states(o_parts[:middle], lse_parts[:middle])
    return merge(lower, merge_states(o_parts[middle:], lse_parts[middle:]))


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows of `x` `[..., head_dim]` as `dtype`, int8 or float8_e4m3fn, and their scales.

    Returns:
        values: `[..., head_dim]`; zeros for a row with the scale 0, a NaN or an infinity.
        scale: float32 `[...]`, the largest magnitude of the row divided by 127 or 448; NaN for a
            row with a NaN or an infinity. `values * scale` is the row up to rounding.

    For example::

        import torch
        from tree_attention.reference import quantise

        values, scale = quantise(torch.tensor([[-2.54, 1.27]]), torch.int8)
        print(values.tolist())  # [[-127, 64]]
    """
    x = x.float()
    scale = x.abs().amax(-1) / LARGEST[dtype]
    scale = torch.where(x.isfinite().all(-1), scale, torch.nan)
    # Where the scale is subnormal, its own rounding could take the quotient beyond the largest.
    quotient = (x / scale[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype])
    quotient = quotient.masked_fill(~(scale > 0)[..., None], 0.0)
    return (quotient.round() if dtype == torch.int8 else quotient).to(dtype), scale
