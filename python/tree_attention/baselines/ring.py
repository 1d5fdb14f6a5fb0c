# SPDX-License-Identifier: BSD-3-Clause
"""Ring decoding: keys and values travel around the ranks. The baseline of tree decoding."""

import math
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from .._loader import load
from ..exchange import MAX_KEPT_BYTES, Communicator, Link, Signature, State, get_communicator
from ..ops import check_q_k_v, lean_decode, merge_states, ranges_without_keys
from ..options import AttentionOptions, fields_of_options, queries_of, takes_attention_options

# Tensors in received memory begin at addresses that any vector load or store can take.
_ALIGNMENT = 64


@takes_attention_options
def ring_decode(
    q: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    key_ranges: Tensor | None = None,
    *,
    group: dist.ProcessGroup | Communicator | None = None,
    timeout: float | timedelta | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]:
    """`tree_decode` by ring attention: the shards travel, in `world_size - 1` hops.

    Equivalent PyTorch: as of `tree_decode`, with the same bits, as states are merged in rank order.

    While a rank attends to one shard, it passes that shard on and receives the next: with these two
    buffers each holds its own shard and two more, one more than Eq. 8 of Tree Attention counts. Key
    heads are not expanded to query heads. With page_table, all pages travel.

    Args:
        timeout: seconds, or a `datetime.timedelta`, in which each hop returns or raises, 30 unless
            the communicator says otherwise.
        Everything else, what is returned and what is raised: as in `tree_decode`.

    Source: Ring Attention (arXiv:2310.01889), as the baseline of Tree Attention section 6.
    """
    comm = get_communicator(group)
    with comm.begin("ring_decode", timeout) as call:
        options = check_q_k_v("ring_decode", q, k_local, v_local, options)
        if comm.world_size == 1:
            return lean_decode(q, k_local, v_local, key_ranges, **options)
        state = comm.state((*q.shape[:3], v_local.shape[3]), q.device)
        # Refuses bad arguments before anything is sent; without keys it costs no more than that.
        no_keys = ranges_without_keys(q, key_ranges)
        lean_decode(q, k_local, v_local, no_keys, out=(state.o, state.lse), **options)
        scales = options.get("k_scale"), options.get("v_scale")
        # Every rank attends to every shard itself.
        instruction_set = load().cpu_instruction_set() if q.device.type == "cpu" else None
        own = _Shard(k_local, v_local, *scales, key_ranges, options.get("page_table"))
        manifest = _Manifest.of(own, options)

        def run(deadline: float) -> tuple[Tensor, Tensor]:
            manifests = _gather_manifests(comm.link, manifest, deadline)
            comm.link.check_call_id()
            return _pass_around(comm, state, q, own, manifests, options, call.seconds)

        return call.run(
            (*signature_of(q, v_local, options), ("instruction set", instruction_set)),
            run,
            q.device,
            replay=partial(_gather_manifests, comm.link, manifest),
            queries=queries_of(q, options),
        )


def signature_of(q: Tensor, v_local: Tensor, options: AttentionOptions) -> Signature:
    """Fields that ranks must have in common to call a ring together."""
    return (
        ("batch, num_heads_q, seqlen_q, head_dim", tuple(q.shape)),
        ("dtype", q.dtype),
        ("dtype of v", v_local.dtype),
        ("k_scale is given", options.get("k_scale") is not None),
        ("device", q.device.type),
        ("num_heads_kv, head_dim of v", (v_local.shape[1], v_local.shape[3])),
        *fields_of_options(options),
    )


def aligned(num_bytes: int) -> int:
    """The least size that holds `num_bytes` and keeps what follows aligned."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class _Shard(NamedTuple):
    """The tensors of one rank that travel, on whichever rank they are."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    key_ranges: Tensor | None
    page_table: Tensor | None

    def tensors(self) -> list[Tensor]:
        """One for each field, empty where there is none."""
        return [self.k.new_empty(0) if x is None else x for x in self]

    def map(self, change: Callable[[Tensor], Tensor]) -> "_Shard":
        changed: list[Any] = [None if x is None else change(x) for x in self]
        return _Shard(*changed)


class _Manifest(NamedTuple):
    """Facts of a shard that ranks need before it comes: a row of int64 that each rank publishes."""

    k_shape_0: int  # batch, or pages
    k_shape_2: int  # keys, or the size of a page
    key_ranges_dim: int  # 0 where there are none
    num_ranges: int  # of a query, where it has several
    page_table_dim: int  # 0 where there is none
    page_table_size: int
    first: int
    block: int
    stride: int
    num_workers: int
    num_threads: int  # 0 where lean_decode does not depend on it

    @staticmethod
    def of(shard: _Shard, options: AttentionOptions) -> "_Manifest":
        table, ranges = shard.page_table, shard.key_ranges
        row = (
            *shard.k.shape[::2],
            *((0, 0) if ranges is None else (ranges.dim(), ranges.shape[2])),
            *((0, 0) if table is None else (table.dim(), table.shape[-1])),
            *options.get("key_layout", (0, 1, 1)),
            options.get("num_workers", 0),
            torch.get_num_threads() if shard.k.device.type == "cpu" else 0,
        )
        return _Manifest(*row)

    def num_bytes(self, q: Tensor, like: _Shard) -> int:
        items = self._items(q, like)
        return sum(aligned(math.prod(x[0]) * x[1].itemsize) for x in items if x is not None)

    def lay_out(self, buffer: Tensor, q: Tensor, like: _Shard) -> _Shard:
        """The shard's tensors as views of `buffer`; `like` is any shard of the same call."""
        tensors: list[Any] = []
        for item in self._items(q, like):
            if item is None:
                tensors.append(None)
                continue
            shape, dtype = item
            size = math.prod(shape) * dtype.itemsize
            tensors.append(buffer[:size].view(dtype).view(shape))
            buffer = buffer[aligned(size) :]
        return _Shard(*tensors)

    def _items(self, q: Tensor, like: _Shard) -> list[tuple[tuple[int, ...], torch.dtype] | None]:
        batch, num_heads_kv = q.shape[0], like.k.shape[1]
        rows = (self.k_shape_0, num_heads_kv, self.k_shape_2)
        each = (2,) if self.key_ranges_dim == 3 else (self.num_ranges, 2)
        ranges = ((batch, q.shape[2], *each), torch.int32)
        lists = (batch,) if self.page_table_dim == 2 else (batch, num_heads_kv)
        return [
            ((*rows, like.k.shape[3]), like.k.dtype),
            ((*rows, like.v.shape[3]), like.v.dtype),
            None if like.k_scale is None else (rows, torch.float32),
            None if like.v_scale is None else (rows, torch.float32),
            ranges if self.key_ranges_dim else None,
            ((*lists, self.page_table_size), torch.int32) if self.page_table_dim else None,
        ]


# What a rank sends to each other one before any shard.
MANIFEST_BYTES = 8 * len(_Manifest._fields)


def _gather_manifests(link: Link, own: _Manifest, deadline: float) -> list[_Manifest]:
    # Receivers must know sizes, and any rank may have appended a key. The last column is the seal.
    host = torch.device("cpu")
    send = torch.tensor((*own, 0), dtype=torch.int64, device=host)
    receive = send.new_empty(link.world_size, send.numel())
    link.gather(receive.view(torch.uint8), send.view(torch.uint8), host).run(deadline)
    manifests = [_Manifest(*row[:-1]) for row in receive.tolist()]
    if len({m.num_threads for m in manifests}) == 1:
        return manifests
    # Every rank splits a shard as its owner does, or its state would differ in bits.
    return [m._replace(num_workers=m.num_workers or m.num_threads) for m in manifests]


def _pass_around(
    comm: Communicator,
    state: State,
    q: Tensor,
    own: _Shard,
    manifests: list[_Manifest],
    options: AttentionOptions,
    seconds: float,
) -> tuple[Tensor, Tensor]:
    """Attends to every rank's shard; each hop has `seconds`."""
    link, transport = comm.link, comm.link.transport_device(q.device)
    num_bytes = max(m.num_bytes(q, own) for m in manifests)
    # Two, so that one is received while the other is read and sent.
    num_buffers = min(2, link.world_size - 1)
    buffers = [_shard_buffer(comm, i, num_bytes, transport) for i in range(num_buffers)]
    _, o_parts, lse_parts = state.parts(link.world_size)
    shard, travelling = own, own.map(lambda x: x.to(transport).contiguous())
    for hop in range(link.world_size):
        owner = (link.rank - hop) % link.world_size
        deadline = time.monotonic() + seconds
        is_last = hop == link.world_size - 1
        if not is_last:
            arriving = manifests[owner - 1].lay_out(buffers[hop % 2], q, own)
            works = link.start_shift(arriving.tensors(), travelling.tensors())
        manifest = manifests[owner]
        changed: AttentionOptions = {
            **options,
            "key_layout": (manifest.first, manifest.block, manifest.stride),
            "page_table": shard.page_table,
            "k_scale": shard.k_scale,
            "v_scale": shard.v_scale,
            "num_workers": manifest.num_workers,
        }
        out = o_parts[owner], lse_parts[owner]
        lean_decode(q, shard.k, shard.v, shard.key_ranges, out=out, **changed)
        if not is_last:
            link.finish(works, transport, deadline)
            travelling, shard = arriving, arriving.map(lambda x: x.to(q.device))
    return merge_states(o_parts, lse_parts, out_dtype=q.dtype)


# Where shards are received, by number and device; kept with the communicator.
_buffers: WeakKeyDictionary[Communicator, dict[tuple[int, torch.device], Tensor]]
_buffers = WeakKeyDictionary()


def _shard_buffer(comm: Communicator, index: int, num_bytes: int, device: torch.device) -> Tensor:
    """Bytes to receive a shard into, kept for the next call unless they are too many."""
    buffers = _buffers.setdefault(comm, {})
    buffer = buffers.get((index, device))
    if buffer is None or buffer.numel() < num_bytes:
        buffers.pop((index, device), None)  # give back before taking more
        with torch.inference_mode(False):  # or nobody could write to it outside of it
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if num_bytes <= MAX_KEPT_BYTES:
            buffers[index, device] = buffer
    return buffer
