# SPDX-License-Identifier: BSD-3-Clause
"""Tree decoding: every rank attends to the keys it holds, then the partial states are merged."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from .deterministic import check_size, decode_by_blocks
from .exchange import (
    MERGE_DEFAULTS,
    MERGE_SCHEMA,
    Communicator,
    ExchangeOptions,
    MergeOptions,
    check_state,
    collective,
    fake_merge,
    get_communicator,
)
from .ops import check_q_k_v, lean_decode
from .options import (
    ATTENTION_DEFAULTS,
    ATTENTION_SCHEMA,
    AttentionOptions,
    fields_of_options,
    lists_options,
    queries_of,
    split_options,
)


class DecodeOptions(AttentionOptions, MergeOptions, total=False):
    """Keyword arguments of `tree_decode` that other functions have too."""


def _fake(q: Tensor, v_local: Tensor, group: Communicator, **options: Any) -> tuple[Tensor, Tensor]:
    merge, _ = split_options(options, MERGE_DEFAULTS)
    return fake_merge(q, v_local.shape[3], group, merge)


@lists_options(DecodeOptions, {**MERGE_DEFAULTS, **ATTENTION_DEFAULTS}, AttentionOptions)
@collective(
    "(Tensor q, Tensor k_local, Tensor v_local, Tensor? key_ranges=None, *, str? group=None, "
    f"int deterministic=0, bool explain=False, {MERGE_SCHEMA}, {ATTENTION_SCHEMA}) "
    "-> (Tensor o, Tensor lse)",
    _fake,
)
def tree_decode(
    q: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    key_ranges: Tensor | None = None,
    *,
    group: dist.ProcessGroup | Communicator | None = None,
    deterministic: int = 0,
    explain: bool = False,
    **options: Unpack[DecodeOptions],
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
        strategy, out_dtype, payload_dtype, head_sharded, timeout: see `all_merge_states`; by
            default "auto", q's dtype, float32, False and the communicator's.
        deterministic: 0, the default, or a number of global slots, for example 4096. The bits are
            then the same for every number of ranks, of threads and of other sequences in the batch,
            on CPUs with the same instruction set. Keys are cut at multiples of so many slots, each
            rank's key_layout must cut there too, and ranks send a state for each of these blocks.
            A query has as many ranges on every rank.
            Only with strategy "auto" and a float32 payload, on the CPU, without head_sharded.
        explain: print on rank 0 which strategy was taken, and the row of a table that decided.
        softmax_scale, softcap, alibi_slopes, query_positions, key_layout, page_table, k_scale,
            v_scale, num_workers: see `AttentionOptions`; key_layout, page_table and the scales are
            this rank's.

    Returns:
        o: `[batch, num_heads_q, seqlen_q, head_dim]`, merged in float32 and rounded once. lse:
        float32 `[batch, num_heads_q, seqlen_q]`, natural logarithm. Both with the same bits on
        every rank; `(0, -inf)` for a query that sees no key on any rank. With head_sharded only
        this rank's heads.

    Raises:
        ValueError, ExchangeError: as in `all_merge_states`.
        TypeError: q, k_local or v_local is no tensor, there is no such keyword argument, an
            argument is no number, or timeout is neither a number nor a timedelta.
        RuntimeError: `lean_decode` refuses an argument. Nothing was sent.

    Source: Tree Attention (arXiv:2408.04093), Algorithm 3.
    """
    merging, attention = split_options(options, MERGE_DEFAULTS)
    comm = get_communicator(group)
    with comm.begin("tree_decode", merging.pop("timeout", None)) as call:
        attention = check_q_k_v("tree_decode", q, k_local, v_local, attention)
        exchange = ExchangeOptions.of("tree_decode", merging, q.dtype)
        deterministic = check_size("tree_decode", deterministic)
        if deterministic:
            return decode_by_blocks(
                comm, call, q, k_local, v_local, key_ranges, deterministic, exchange, attention
            )
        if comm.world_size == 1:
            return lean_decode(
                q, k_local, v_local, key_ranges, out_dtype=exchange.out_dtype, **attention
            )
        state = comm.state((*q.shape[:3], v_local.shape[3]), q.device, exchange.payload_dtype)
        lean_decode(q, k_local, v_local, key_ranges, out=(state.o, state.lse), **attention)
        check_state("tree_decode", state.o, state.lse)
        fields = (
            ("num_heads_kv", k_local.shape[1]),
            ("head_dim", q.shape[3]),
            ("dtype", q.dtype),
            *fields_of_options(attention),
        )
        queries = queries_of(q, attention)
        return comm.merge(call, fields, state, exchange, queries, explain=explain)
