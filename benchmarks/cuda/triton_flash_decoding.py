# SPDX-License-Identifier: BSD-3-Clause
# mypy: disable-error-code="no-untyped-def"
"""FlashDecoding in Triton: what our schedule is compared with, written as well as we can.

All query heads of a group and all query tokens are packed as rows, so each key is read once. Every
output is cut into the same number of equal parts, each the work of one program; a second kernel
merges them. The number is chosen on the host from the capacity, the cuts on the device from the
key ranges, so that it suits captured graphs as the operator does.

Source: FlashDecoding (crfm.stanford.edu/2023/10/12/flashdecoding.html); the number of parts after
FlashAttention-2's num_splits_heuristic, which takes 85 % of the best for enough and stops at 128.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_KEYS = 64
MAX_ROWS = 64  # of a program; further rows read the keys again
MAX_PARTS = 256
LOG2_E = 1.4426950408889634


def num_parts(outputs: int, key_blocks: int, multiprocessors: int) -> int:
    """The fewest that keep nearly as many programs busy, to the last wave, as the best number."""
    slots = 2 * multiprocessors  # two programs fit on one
    if outputs >= 0.8 * slots:
        return 1
    limit = max(1, min(MAX_PARTS, slots, key_blocks))
    waves = [outputs * n / slots for n in range(1, limit + 1)]
    efficiency = [w / -(-w // 1) for w in waves]
    # More parts that leave the longest part as long as before are no gain.
    longest = [-(-key_blocks // n) for n in range(1, limit + 1)]
    useful = [n == 0 or longest[n] < longest[n - 1] for n in range(limit)]
    best = max(e for e, use in zip(efficiency, useful, strict=True) if use)
    return next(
        n + 1
        for n, (e, use) in enumerate(zip(efficiency, useful, strict=True))
        if use and e >= 0.95 * best
    )


@triton.jit
def part_kernel(
    q, k, v, key_ranges, page_table, o_parts, lse_parts,
    scale_log2, num_rows, seqlen_q, seqlen_k, num_parts, page_table_stride,
    q_batch, q_head, q_token,
    k_batch, k_head, k_slot, v_batch, v_head, v_slot,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (kv head and rows, part, sequence)."""
    row_blocks = tl.cdiv(num_rows, ROWS)
    head = (tl.program_id(0) // row_blocks).to(tl.int64)
    num_heads_q = tl.num_programs(0) // row_blocks * GROUP
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)

    row = tl.program_id(0) % row_blocks * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    token = row // GROUP
    query_head = head * GROUP + row % GROUP
    ranges = key_ranges + (batch * seqlen_q + token) * 2
    begin = tl.maximum(tl.load(ranges, mask=real, other=0), 0)
    end = tl.minimum(tl.load(ranges + 1, mask=real, other=0), seqlen_k)
    seen = real & (begin < end)
    first_block = tl.min(tl.where(seen, begin, 2147483647), 0) // BLOCK
    last_block = tl.cdiv(tl.max(tl.where(seen, end, 0), 0), BLOCK)
    blocks_per_part = tl.cdiv(tl.maximum(last_block - first_block, 0), num_parts)
    part_begin = (first_block + part * blocks_per_part) * BLOCK
    part_end = tl.minimum(last_block, first_block + (part + 1) * blocks_per_part) * BLOCK

    dim = tl.arange(0, HEAD_DIM)
    q_offsets = batch * q_batch + query_head[:, None] * q_head + token[:, None] * q_token
    rows = tl.load(q + q_offsets + dim[None, :], mask=real[:, None], other=0.0)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for block_begin in range(part_begin, part_end, BLOCK):
        key = block_begin + tl.arange(0, BLOCK)
        if PAGE_SIZE:
            page = tl.load(
                page_table + batch * page_table_stride + key // PAGE_SIZE,
                mask=key < seqlen_k, other=0,
            ).to(tl.int64)  # fmt: skip
            slot = key % PAGE_SIZE
            k_offsets = page * k_batch + head * k_head + slot * k_slot
            v_offsets = page * v_batch + head * v_head + slot * v_slot
        else:
            k_offsets = batch * k_batch + head * k_head + key.to(tl.int64) * k_slot
            v_offsets = batch * v_batch + head * v_head + key.to(tl.int64) * v_slot
        held = key < seqlen_k
        keys = tl.load(k + k_offsets[None, :] + dim[:, None], mask=held[None, :], other=0.0)
        scores = tl.dot(rows, keys, input_precision=PRECISION) * scale_log2
        visible = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        scores = tl.where(visible, scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(largest - base)
        values = tl.load(v + v_offsets[:, None] + dim[None, :], mask=held[:, None], other=0.0)
        total = total * decay + tl.sum(weights, 1)
        product = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        sums = sums * decay[:, None] + product
        largest = new_largest

    some = total > 0
    o = sums / tl.where(some, total, 1.0)[:, None]
    natural = (largest + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453
    lse = tl.where(some, natural, -float("inf"))
    # [batch, query head, token, part]
    state = ((batch * num_heads_q + query_head) * seqlen_q + token) * num_parts + part
    o_offsets = state[:, None] * HEAD_DIM + dim[None, :]
    tl.store(o_parts + o_offsets, o.to(o_parts.dtype.element_ty), mask=real[:, None])
    tl.store(lse_parts + state, lse, mask=real)


@triton.jit
def merge_kernel(
    o_parts, lse_parts, o, lse, num_parts, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr
):
    """Program row: its parts, all at once."""
    row = tl.program_id(0).to(tl.int64)
    part, dim = tl.arange(0, PARTS), tl.arange(0, HEAD_DIM)
    part_lse = tl.load(
        lse_parts + row * num_parts + part, mask=part < num_parts, other=-float("inf")
    )
    largest = tl.max(part_lse, 0)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    weights = tl.exp(part_lse - base)
    total = tl.sum(weights, 0)
    offsets = (row * num_parts + part)[:, None] * HEAD_DIM + dim[None, :]
    parts = tl.load(o_parts + offsets, mask=(weights > 0)[:, None], other=0.0)
    merged = tl.sum(weights[:, None] * parts, 0) / tl.where(total > 0, total, 1.0)
    tl.store(o + row * HEAD_DIM + dim, merged.to(o.dtype.element_ty))
    merged_lse = base + tl.log(tl.where(total > 0, total, 1.0))
    tl.store(lse + row, tl.where(total > 0, merged_lse, -float("inf")))


def flash_decoding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor,
    page_table: Tensor | None = None,
    *,
    multiprocessors: int,
) -> tuple[Tensor, Tensor]:
    """`lean_decode(q, k, v, key_ranges, page_table=page_table)`; head_dim is a power of two."""
    batch, num_heads_q, seqlen_q, head_dim = q.shape
    num_heads_kv = k.shape[1]
    group_size = num_heads_q // num_heads_kv
    num_rows = group_size * seqlen_q
    seqlen_k = k.shape[2] if page_table is None else page_table.shape[1] * k.shape[2]
    block = BLOCK_KEYS if q.dtype.itemsize == 2 else BLOCK_KEYS // 2
    rows = min(MAX_ROWS, max(16, triton.next_power_of_2(num_rows)))
    programs = num_heads_kv * triton.cdiv(num_rows, rows)
    parts = num_parts(batch * programs, triton.cdiv(seqlen_k, block), multiprocessors)
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    o_parts, lse_parts = o, lse
    if parts > 1:
        o_parts = torch.empty((*lse.shape, parts, head_dim), dtype=torch.float32, device=q.device)
        lse_parts = torch.empty((*lse.shape, parts), dtype=torch.float32, device=q.device)
    part_kernel[(programs, parts, batch)](
        q, k, v, key_ranges, page_table, o_parts, lse_parts,
        head_dim**-0.5 * LOG2_E, num_rows, seqlen_q, seqlen_k, parts,
        0 if page_table is None else page_table.stride(0),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        GROUP=group_size, HEAD_DIM=head_dim, ROWS=rows, BLOCK=block,
        PAGE_SIZE=0 if page_table is None else k.shape[2],
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if parts > 1:
        merge_kernel[(lse.numel(),)](
            o_parts, lse_parts, o, lse, parts,
            HEAD_DIM=head_dim, PARTS=triton.next_power_of_2(parts),
            num_warps=4 if parts <= 64 else 8,
        )  # fmt: skip
    return o, lse
