# SPDX-License-Identifier: BSD-3-Clause
"""Tree decoding: every rank attends to the keys it holds, then the partial states are merged."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Communicator, check_options, get_communicator
from .ops import lean_decode


def tree_decode(
    q: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    key_ranges: Tensor | None = None,
    *,
    group: dist.ProcessGroup | Communicator | None = None,
    strategy: str = "auto",
    payload_dtype: torch.dtype = torch.float32,
    head_sharded: bool = False,
    explain: bool = False,
    timeout: float | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_layout: Sequence[int] = (0, 1, 1),
    page_table: Tensor | None = None,
    num_workers: int = 0,
) -> tuple[Tensor, Tensor]:
    """Exact attention over keys and values that are split over ranks and stay where they are.

    Equivalent PyTorch, with the shards of all ranks in one place::

        k, v = torch.cat(k_shards, 2), torch.cat(v_shards, 2)
        o, lse = lean_decode(q, k, v, key_ranges_of_the_whole, ...)

    Collective: all ranks call with the same q and the same options, each with its own shard.

    Args:
        q: `[batch, num_heads_q, seqlen_q, head_dim]`, the same on every rank.
        k_local, v_local: this rank's keys and values; shards may differ in length and be empty.
        key_ranges: int32 `[batch, seqlen_q, 2]` in *local* keys, as `ShardLayout.local_range` gives
            them. None: all keys of the shard.
        group: process group or `Communicator`, default the world. Without torch.distributed this
            is `lean_decode`.
        strategy: "auto" or one of `strategies()`. "auto" takes the one that is predicted to be
            fastest, among those that give the same bits.
        payload_dtype: of the `o` that ranks send each other: float32, or bfloat16 to send half as
            much and round every rank's part once.
        head_sharded: return to each rank the heads `torch.chunk` would give it, for models whose
            next layer is split by heads.
        explain: print on rank 0 what each strategy was predicted to take.
        timeout: seconds in which the exchange returns or raises, 30 unless the communicator says
            otherwise.
        key_layout: of this rank's shard, as `ShardLayout.key_layout` gives it.
        softmax_scale, softcap, alibi_slopes, query_positions, page_table, num_workers: as in
            `lean_decode`; page_table is this rank's.

    Returns:
        o: `[batch, num_heads_q, seqlen_q, head_dim]` in q's dtype, merged in float32 and rounded
        once. lse: float32 `[batch, num_heads_q, seqlen_q]`, natural logarithm. Both with the same
        bits on every rank; `(0, -inf)` for a query that sees no key on any rank. With head_sharded
        this rank's heads of them.

    Raises:
        ValueError: no such strategy, or options it has not.
        RuntimeError: `lean_decode` refuses an argument. Nothing was sent.
        ExchangeError: a rank was lost, stalled, or called with other arguments.

    Source: Tree Attention (arXiv:2408.04093), Algorithm 3.
    """
    comm = get_communicator(group)
    # lean_decode refuses tensors of other dimensions.
    is_local = comm.world_size == 1 or q.dim() != 4 or v_local.dim() != 4
    try:
        check_options(strategy, payload_dtype, head_sharded)
        out = None
        if not is_local:
            batch, num_heads_q, seqlen_q, _ = q.shape
            shape = (batch, num_heads_q, seqlen_q, v_local.shape[3])
            out = comm.send_state(*shape, q.device, payload_dtype)
        o, lse = lean_decode(
            q,
            k_local,
            v_local,
            key_ranges,
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            query_positions=query_positions,
            key_layout=key_layout,
            page_table=page_table,
            num_workers=num_workers,
            out=out,
        )
    except BaseException:
        comm.give_up_call()
        raise
    if is_local:
        return o, lse
    signature = (
        ("call", "tree_decode"),
        ("num_heads_kv", k_local.shape[1]),
        ("head_dim", q.shape[3]),
        ("softmax_scale", softmax_scale),
        ("softcap", softcap),
        ("alibi_slopes", alibi_slopes is not None),
    )
    return comm.exchange(
        o,
        lse,
        strategy,
        q.dtype,
        payload_dtype=payload_dtype,
        head_sharded=head_sharded,
        explain=explain,
        timeout=timeout,
        signature=signature,
    )
