# SPDX-License-Identifier: BSD-3-Clause
"""Tree decoding: every rank attends to the keys it holds, then the partial states are merged."""

import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from .decode_call import DECODE_DEFAULTS, DECODE_SCHEMA, DecodeCall, DecodeOptions, fake_decode
from .deterministic import check_size, decode_by_blocks
from .exchange import MERGE_DEFAULTS, Communicator, collective, get_communicator
from .ops import lean_decode
from .options import AttentionOptions, lists_options


@lists_options(DecodeOptions, DECODE_DEFAULTS, AttentionOptions)
@collective(
    "(Tensor q, Tensor k_local, Tensor v_local, Tensor? key_ranges=None, *, str? group=None, "
    f"int deterministic=0, bool explain=False, {DECODE_SCHEMA}) -> (Tensor o, Tensor lse)",
    fake_decode,
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
        strategy, out_dtype, payload_dtype, head_sharded, head_counts, timeout: see
            `all_merge_states`; by default "auto", q's dtype, float32, False, None and the
            communicator's.
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
        ValueError: as in `all_merge_states`, or `lean_decode` refuses an argument. Nothing was
            sent.
        RuntimeError, ExchangeError: as in `all_merge_states`.
        TypeError: q, k_local or v_local is no tensor, there is no such keyword argument, an
            argument is no number, or timeout is neither a number nor a timedelta.

    For example::

        import torch
        from tree_attention import BlockCyclic, tree_decode

        # One process; with several, after torch.distributed.init_process_group, rank and
        # world_size are those of torch.distributed.
        rank, world_size = 0, 1
        torch.manual_seed(0)  # the same q on every rank
        q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 999, 64), torch.randn(1, 2, 999, 64)
        mine = BlockCyclic(world_size, block=16).local_slots(rank, 0, 999)
        o, lse = tree_decode(q, k[:, :, mine], v[:, :, mine])
        print(o.shape, lse.shape)  # torch.Size([1, 8, 1, 64]) torch.Size([1, 8, 1])

    Source: Tree Attention (arXiv:2408.04093), Algorithm 3.
    """
    comm = get_communicator(group)
    with comm.begin("tree_decode", options.pop("timeout", None)) as call:
        decode = DecodeCall("tree_decode", q, k_local, v_local, key_ranges, options, MERGE_DEFAULTS)
        if block_size := check_size("tree_decode", deterministic):
            return decode_by_blocks(comm, call, decode, block_size)
        if comm.world_size == 1:
            return lean_decode(**decode.arguments, out_dtype=decode.exchange.out_dtype)
        state = comm.state(decode.shape, q.device, decode.exchange.payload_dtype)
        lean_decode(**decode.arguments, out=(state.o, state.lse))
        fields, exchange, queries = decode.signature, decode.exchange, decode.queries
        return comm.merge(call, fields, state, exchange, queries, explain=explain)
