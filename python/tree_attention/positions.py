# SPDX-License-Identifier: BSD-3-Clause
"""Positions that enter attention as a bias of the scores: ALiBi, and the buckets of T5.

Positions that enter before attention need nothing here: rotary ones turn q and k, learned and
sinusoidal ones are added to the embeddings, and the cache holds keys that know their place.
"""

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from ._numbers import integer
from .ops import lean_decode, merge_states
from .options import AttentionOptions, check_tensors, takes_attention_options
from .patterns import checked_slots

__all__ = ["alibi_slopes", "decode_with_range_bias", "t5_ranges"]

# More than any model has; a mistake would fill the memory.
_MAX_HEADS = 1 << 16


def alibi_slopes(num_heads_q: int) -> Tensor:
    """The published slopes of ALiBi for `lean_decode`, float32 `[num_heads_q]`.

    Equivalent PyTorch, where `num_heads_q` is a power of two::

        2.0 ** (-8.0 / num_heads_q * torch.arange(1, num_heads_q + 1))

    Else the slopes of the power of two below, followed by every second one of the next power.

    Raises:
        TypeError, ValueError: `num_heads_q` is no integer from 1 to 65536.

    For example::

        from tree_attention.positions import alibi_slopes

        print(alibi_slopes(4).tolist())  # [0.25, 0.0625, 0.015625, 0.00390625]

    Source: ALiBi (arXiv:2108.12409), section 3, and its authors' code for other numbers of heads.
    """
    num_heads_q = integer("alibi_slopes", "num_heads_q", num_heads_q, 1, _MAX_HEADS)
    below = 1 << num_heads_q.bit_length() - 1
    exponents = [8.0 * i / below for i in range(1, below + 1)]
    exponents += [8.0 * i / (2 * below) for i in range(1, 2 * (num_heads_q - below), 2)]
    return torch.tensor([2.0**-x for x in exponents], dtype=torch.float32)


def t5_ranges(slots: Tensor, *, num_buckets: int = 32, max_distance: int = 128) -> Tensor:
    """The slots in each bucket of T5's relative positions, for the queries of a decoder.

    Args:
        slots: the slots of the queries, integers `[batch, seqlen_q]`.
        num_buckets: half of them hold one distance each, from 0 on. The others grow by a constant
            factor up to `max_distance`; the last one also has all that lies further back.

    Returns:
        int32 `[batch, seqlen_q, num_buckets, 2]`, half-open ranges of slots by bucket. Together
        they are the slots up to the query's own.

    Raises:
        TypeError, ValueError: `num_buckets` is no integer of at least 2, `max_distance` none above
            half of it; as in `patterns`.

    For example::

        import torch
        from tree_attention.positions import t5_ranges

        print(t5_ranges(torch.tensor([[9]]))[0, 0, 0].tolist())  # [9, 10]

    Source: T5 (arXiv:1910.10683), section 2.1, and `_relative_position_bucket` of its code.
    """
    slots = checked_slots("t5_ranges", slots)
    num_buckets = integer("t5_ranges", "num_buckets", num_buckets, 2)
    exact = num_buckets // 2
    max_distance = integer("t5_ranges", "max_distance", max_distance, exact + 1)
    # In float32 as in T5, where a distance at the edge of a bucket may be rounded across it.
    distances = torch.arange(max_distance, dtype=torch.float32, device="cpu")
    scale = (num_buckets - exact) / math.log(max_distance / exact)
    large = exact + ((distances / exact).log() * scale).clamp(min=0).long()
    buckets = torch.where(distances < exact, distances.long(), large.clamp(max=num_buckets - 1))
    # The first distance of every bucket, and the end of the last.
    first = torch.searchsorted(buckets, torch.arange(num_buckets + 1, device="cpu"))
    first = first.to(slots.device)
    ends = slots[..., None] + 1 - first[:-1]
    begins = slots[..., None] + 1 - first[1:]
    begins[..., -1] = 0
    return torch.stack([begins, ends], dim=-1).clamp(min=0).int()


@takes_attention_options
def decode_with_range_bias(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor,
    bias: Tensor,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]:
    """`lean_decode` with a bias of the scores that is the same for all keys of a range.

    Equivalent PyTorch, where range r of a query holds key j::

        scores[..., j] = q @ k[j] * softmax_scale + bias[:, r]

    One call for each range, as a constant added to scores is added to their `lse`. On shards, give
    each rank its local ranges (`patterns.local`) and merge what the ranks return.

    Args:
        q, k, v: see `lean_decode`.
        key_ranges: int32 `[batch, seqlen_q, num_ranges, 2]`; no two ranges of a query share a key.
        bias: `[num_heads_q, num_ranges]`, for T5 the transposed embedding of its buckets.

    Returns:
        o and lse as of `lean_decode`.

    Raises:
        ValueError: `key_ranges` or `bias` has another shape, or `lean_decode` refuses an argument.

    For example::

        import torch
        from tree_attention.positions import decode_with_range_bias, t5_ranges

        q = torch.randn(1, 8, 1, 64)  # [batch, num_heads_q, seqlen_q, head_dim]
        k, v = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)  # 100 keys of 2 kv heads
        bias = torch.randn(8, 32)  # of each query head and bucket
        o, lse = decode_with_range_bias(q, k, v, t5_ranges(torch.tensor([[99]])), bias)
        print(o.shape)  # torch.Size([1, 8, 1, 64])
    """
    check_tensors("decode_with_range_bias", q=q, k=k, v=v, key_ranges=key_ranges, bias=bias)
    if key_ranges.dim() != 4 or key_ranges.shape[2] < 1:
        raise ValueError(
            "decode_with_range_bias: key_ranges must have shape [batch, seqlen_q, num_ranges, 2] "
            f"with at least 1 range, got {list(key_ranges.shape)}"
        )
    if bias.shape != (q.shape[1], key_ranges.shape[2]):
        raise ValueError(
            "decode_with_range_bias: bias must have shape [num_heads_q, num_ranges] = "
            f"{[q.shape[1], key_ranges.shape[2]]}, got {list(bias.shape)}"
        )
    states = [
        lean_decode(q, k, v, ranges, out_dtype=torch.float32, **options)
        for ranges in key_ranges.unbind(2)
    ]
    o_parts, lse_parts = (torch.stack(x) for x in zip(*states, strict=True))
    return merge_states(o_parts, lse_parts + bias.float().T[:, None, :, None], out_dtype=q.dtype)
