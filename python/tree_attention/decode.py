# SPDX-License-Identifier: BSD-3-Clause
"""Tree decoding: every rank attends to the keys it holds, then the partial states are merged."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from .deterministic import check_size, decode_by_blocks
from .exchange import (
    Communicator,
    ExchangeOptions,
    add_collective,
    check_no_gradient,
    check_options,
    check_state,
    fake_merge,
    get_communicator,
    name_of,
    named,
)
from .ops import (
    AttentionOptions,
    check_option_names,
    check_tensors,
    fields_of_options,
    lean_decode,
    queries_of,
    takes_attention_options,
)


@takes_attention_options
def tree_decode(
    q: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    key_ranges: Tensor | None = None,
    *,
    group: dist.ProcessGroup | Communicator | None = None,
    strategy: str = "auto",
    out_dtype: torch.dtype | None = None,
    payload_dtype: torch.dtype = torch.float32,
    head_sharded: bool = False,
    deterministic: int = 0,
    explain: bool = False,
    timeout: float | timedelta | None = None,
    **options: Unpack[AttentionOptions],
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
        strategy: "auto" or one of `strategies()`. "auto" takes a canonical one, by the times that
            `python -m tree_attention calibrate` measured on these ranks or else by a shipped rule.
        out_dtype: dtype of `o`, default q's.
        payload_dtype: dtype of the `o` that ranks send each other: float32, or bfloat16 to send
            half as much and round every rank's part once.
        head_sharded: return to each rank the heads that `torch.tensor_split` would give it, for
            models whose next layer is split by heads.
        deterministic: 0, the default, or a number of global slots, for example 4096. The bits are
            then the same for every number of ranks, of threads and of other sequences in the batch,
            on CPUs with the same instruction set. Keys are cut at multiples of so many slots, each
            rank's key_layout must cut there too, and ranks send a state for each of these blocks.
            A query has as many ranges on every rank.
            Only with strategy "auto" and a float32 payload, on the CPU, without head_sharded.
        explain: print on rank 0 which strategy was taken, and the row of a table that decided.
        timeout: seconds, or a `datetime.timedelta`, in which an exchange returns or raises, 30
            unless the communicator says otherwise. A number where torch.compile traces the call.
        softmax_scale, softcap, alibi_slopes, query_positions, key_layout, page_table, k_scale,
            v_scale, num_workers: see `AttentionOptions`; key_layout, page_table and the scales are
            this rank's.

    Returns:
        o: `[batch, num_heads_q, seqlen_q, head_dim]`, merged in float32 and rounded once. lse:
        float32 `[batch, num_heads_q, seqlen_q]`, natural logarithm. Both with the same bits on
        every rank; `(0, -inf)` for a query that sees no key on any rank. With head_sharded only
        this rank's heads.

    Raises:
        ValueError: there is no such strategy, payload_dtype or out_dtype, the strategy cannot do
            what the options ask for, or timeout is not above 0. Nothing was sent.
        TypeError: q, k_local or v_local is no tensor, there is no such keyword argument, or timeout
            is neither a number nor a timedelta.
        RuntimeError: `lean_decode` refuses an argument. Nothing was sent.
        ExchangeError: a rank was lost, stalled, or called with other arguments; or another thread
            uses the group (see `Communicator`).

    Source: Tree Attention (arXiv:2408.04093), Algorithm 3.
    """
    if torch.compiler.is_compiling():
        check_no_gradient("tree_decode", "q, k and v", q, k_local, v_local)
        result: tuple[Tensor, Tensor] = _in_graph(
            q,
            k_local,
            v_local,
            key_ranges,
            name_of(group),
            strategy=strategy,
            out_dtype=out_dtype,
            payload_dtype=payload_dtype,
            head_sharded=head_sharded,
            deterministic=deterministic,
            explain=explain,
            timeout=timeout,
            **options,
        )
        return result
    comm = get_communicator(group)
    with comm.before_call():
        check_tensors("tree_decode", q=q, k_local=k_local, v_local=v_local)
        check_option_names("tree_decode", options)
        check_options("tree_decode", strategy, payload_dtype, head_sharded, out_dtype)
        seconds = comm.seconds_of("tree_decode", timeout)
        exchange = ExchangeOptions(strategy, out_dtype or q.dtype, payload_dtype, head_sharded)
        check_size("tree_decode", deterministic)
        if deterministic:
            _check_deterministic(deterministic, exchange, q)
        # lean_decode refuses tensors of other dimensions.
        is_refused = any(x.dim() != 4 for x in (q, k_local, v_local))
        if is_refused or (comm.world_size == 1 and not deterministic):
            dtype = exchange.out_dtype
            return lean_decode(q, k_local, v_local, key_ranges, out_dtype=dtype, **options)
    if deterministic:
        return decode_by_blocks(
            comm, q, k_local, v_local, key_ranges, deterministic, exchange, seconds, **options
        )  # fmt: skip
    fields = (
        ("num_heads_kv", k_local.shape[1]),
        ("head_dim", q.shape[3]),
        *fields_of_options(options),
    )
    queries = queries_of(q, options)
    batch, num_heads_q, seqlen_q, _ = q.shape
    shape = (batch, num_heads_q, seqlen_q, v_local.shape[3])
    with comm.turn("tree_decode"):
        with comm.before_call():
            state = comm.state(shape, q.device, payload_dtype)
            lean_decode(q, k_local, v_local, key_ranges, out=(state.o, state.lse), **options)
            check_state("tree_decode", state.o, state.lse)
        return comm.merge("tree_decode", fields, state, exchange, seconds, queries, explain=explain)


def _check_deterministic(size: int, exchange: ExchangeOptions, q: Tensor) -> None:
    given = {
        "strategy": (exchange.strategy, "auto"),
        "payload_dtype": (exchange.payload_dtype, torch.float32),
        "head_sharded": (exchange.head_sharded, False),
        "the device": (q.device.type, "cpu"),
    }
    for name, (value, needed) in given.items():
        if value != needed:
            raise ValueError(
                f"tree_decode: with deterministic={size} {name} must be {needed}, got {value}"
            )


def _run(
    q: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    key_ranges: Tensor | None,
    group: str,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    return tree_decode(q, k_local, v_local, key_ranges, group=named(group), **options)


def _fake(
    q: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    key_ranges: Tensor | None,
    group: str,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    return fake_merge(q, v_local.shape[3], group, **options)


_in_graph = add_collective(
    "tree_decode(Tensor q, Tensor k_local, Tensor v_local, Tensor? key_ranges, str group, *, "
    "str strategy, ScalarType? out_dtype, ScalarType payload_dtype, bool head_sharded, "
    "int deterministic, bool explain, float? timeout, float? softmax_scale=None, "
    "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? query_positions=None, "
    "int[] key_layout=[0, 1, 1], Tensor? page_table=None, Tensor? k_scale=None, "
    "Tensor? v_scale=None, int num_workers=0) -> (Tensor o, Tensor lse)",
    _run,
    _fake,
)
