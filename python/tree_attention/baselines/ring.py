# SPDX-License-Identifier: BSD-3-Clause
"""Ring decoding: keys and values travel around the ranks. The baseline of tree decoding."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from ..exchange import Communicator, Link, get_communicator
from ..ops import check_q_k_v, lean_decode, merge_states, ranges_without_keys
from ..options import AttentionOptions, queries_of, takes_attention_options
from .common import aligned, signature_of


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

    Equivalent PyTorch, with the shards of all ranks in one place::

        k, v = torch.cat(k_shards, 2), torch.cat(v_shards, 2)
        o, lse = lean_decode(q, k, v, key_ranges_of_the_whole, ...)

    While a rank attends to one shard, it passes that shard on and receives the next: with these two
    buffers each holds its own shard and two more, one more than Eq. 8 of Tree Attention counts. Key
    heads are not expanded to query heads. States are merged in rank order, so the bits are those of
    `tree_decode`.

    Args:
        timeout: seconds, or a `datetime.timedelta`, in which each hop returns or raises, 30 unless
            the communicator says otherwise.
        Everything else: as in `tree_decode`, local to this rank where it is there. With
            page_table, all pages travel.

    Returns:
        o and lse as `tree_decode` does.

    Raises:
        RuntimeError: `lean_decode` refuses an argument. Nothing was sent.
        TypeError: q, k_local or v_local is no tensor, or there is no such keyword argument.
        ExchangeError: a rank was lost, stalled, or called with other arguments.

    Source: Ring Attention (arXiv:2310.01889), as the baseline of Tree Attention section 6.
    """
    comm = get_communicator(group)
    with comm.begin("ring_decode", timeout) as call:
        check_q_k_v("ring_decode", q, k_local, v_local, options)
        if comm.world_size == 1:
            return lean_decode(q, k_local, v_local, key_ranges, **options)
        ring = _Ring(comm, q, _Shard.of(k_local, v_local, key_ranges, options), options)
        ring.refuse_bad_arguments()
        manifest = _Manifest.of(ring.own)
        return call.run(
            signature_of(q, v_local, options),
            lambda deadline: ring.run(manifest, call.seconds, deadline),
            q.device,
            door=partial(_gather_manifests, comm.link, manifest),
            queries=queries_of(q, options),
        )


class _Ring:
    """One pass of all shards around the ranks."""

    def __init__(
        self, comm: Communicator, q: Tensor, own: "_Shard", options: AttentionOptions
    ) -> None:
        self.comm, self.q, self.own, self.options = comm, q, own, options
        self.state = comm.state((*q.shape[:3], own.v.shape[3]), q.device)

    def refuse_bad_arguments(self) -> None:
        """Before anything is sent; without keys it costs no more than that."""
        no_keys = ranges_without_keys(self.q, self.own.key_ranges)
        self.attend(replace(self.own, key_ranges=no_keys), (self.state.o, self.state.lse))

    def attend(self, shard: "_Shard", out: tuple[Tensor, Tensor]) -> None:
        changed: AttentionOptions = {
            **self.options,
            "key_layout": shard.key_layout,
            "page_table": shard.page_table,
            "k_scale": shard.k_scale,
            "v_scale": shard.v_scale,
            "num_workers": shard.num_workers,
        }
        lean_decode(self.q, shard.k, shard.v, shard.key_ranges, out=out, **changed)

    def run(self, manifest: "_Manifest", seconds: float, deadline: float) -> tuple[Tensor, Tensor]:
        """Each hop has `seconds`, and the exchange of sizes before them the deadline."""
        link, q, own = self.comm.link, self.q, self.own
        manifests = _gather_manifests(link, manifest, deadline)
        link.check_seal()
        transport = link.transport_device(q.device)
        num_bytes = max(m.num_bytes(q, own) for m in manifests)
        # Two, so that one is received while the other is read and sent.
        buffers = [
            _shard_buffer(self.comm, i, num_bytes, transport)
            for i in range(min(2, link.world_size - 1))
        ]
        _, o_parts, lse_parts = self.state.parts(link.world_size)
        travelling = own.to(transport).contiguous()
        shard = replace(own, num_workers=manifests[link.rank].num_workers)
        for hop in range(link.world_size):
            owner = (link.rank - hop) % link.world_size
            deadline = time.monotonic() + seconds
            is_last = hop == link.world_size - 1
            if not is_last:
                arriving = manifests[owner - 1].lay_out(buffers[hop % 2], q, own)
                works = link.start_shift(arriving.tensors(), travelling.tensors())
            self.attend(shard, (o_parts[owner], lse_parts[owner]))
            if not is_last:
                link.finish(works, transport, deadline)
                travelling, shard = arriving, arriving.to(q.device)
        return merge_states(o_parts, lse_parts, out_dtype=q.dtype)


# Where shards are received, by number and device; kept with the communicator.
_buffers: WeakKeyDictionary[Communicator, dict[tuple[int, torch.device], Tensor]]
_buffers = WeakKeyDictionary()


def _shard_buffer(comm: Communicator, index: int, num_bytes: int, device: torch.device) -> Tensor:
    """Bytes to receive a shard into, kept for the next call."""
    buffers = _buffers.setdefault(comm, {})
    buffer = buffers.get((index, device))
    if buffer is None or buffer.numel() < num_bytes:
        buffers.pop((index, device), None)  # give back before taking more
        with torch.inference_mode(False):  # or nobody could write to it outside of it
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        buffers[index, device] = buffer
    return buffer


@dataclass(frozen=True)
class _Shard:
    """The keys and values of one rank and what belongs to them, on whichever rank they are."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    key_ranges: Tensor | None
    page_table: Tensor | None
    key_layout: Sequence[int]
    num_workers: int

    @staticmethod
    def of(k: Tensor, v: Tensor, key_ranges: Tensor | None, options: AttentionOptions) -> "_Shard":
        return _Shard(
            k,
            v,
            options.get("k_scale"),
            options.get("v_scale"),
            key_ranges,
            options.get("page_table"),
            options.get("key_layout", (0, 1, 1)),
            options.get("num_workers", 0),
        )

    def tensors(self) -> list[Tensor]:
        """The tensors that travel; the rest is in the manifest."""
        candidates = (
            self.k, self.v, self.k_scale, self.v_scale, self.key_ranges, self.page_table,
        )  # fmt: skip
        return [x for x in candidates if x is not None and x.numel()]

    def to(self, device: torch.device) -> "_Shard":
        return self._map(lambda x: x.to(device))

    def contiguous(self) -> "_Shard":
        return self._map(Tensor.contiguous)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "_Shard":
        def of(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        return replace(
            self,
            k=change(self.k),
            v=change(self.v),
            k_scale=of(self.k_scale),
            v_scale=of(self.v_scale),
            key_ranges=of(self.key_ranges),
            page_table=of(self.page_table),
        )


@dataclass(frozen=True)
class _Manifest:
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
    def of(shard: _Shard) -> "_Manifest":
        table, ranges = shard.page_table, shard.key_ranges
        first, block, stride = shard.key_layout
        return _Manifest(
            k_shape_0=shard.k.shape[0],
            k_shape_2=shard.k.shape[2],
            key_ranges_dim=0 if ranges is None else ranges.dim(),
            num_ranges=0 if ranges is None else ranges.shape[2],
            page_table_dim=0 if table is None else table.dim(),
            page_table_size=0 if table is None else table.shape[-1],
            first=first,
            block=block,
            stride=stride,
            num_workers=shard.num_workers,
            num_threads=torch.get_num_threads() if shard.k.device.type == "cpu" else 0,
        )

    def num_bytes(self, q: Tensor, like: _Shard) -> int:
        return sum(_aligned_bytes(*item) for item in self._items(q, like) if item is not None)

    def lay_out(self, buffer: Tensor, q: Tensor, like: _Shard) -> _Shard:
        """The shard's tensors as views of `buffer`; `like` is any shard of the same call."""
        tensors: list[Tensor | None] = []
        begin = 0
        for item in self._items(q, like):
            if item is None:
                tensors.append(None)
                continue
            shape, dtype = item
            size = math.prod(shape) * dtype.itemsize
            tensors.append(buffer[begin : begin + size].view(dtype).view(shape))
            begin += _aligned_bytes(shape, dtype)
        k, v, k_scale, v_scale, key_ranges, page_table = tensors
        assert k is not None and v is not None
        layout = (self.first, self.block, self.stride)
        return _Shard(
            k, v, k_scale, v_scale, key_ranges, page_table, layout, self.num_workers
        )  # fmt: skip

    def _items(self, q: Tensor, like: _Shard) -> list[tuple[tuple[int, ...], torch.dtype] | None]:
        batch, _, seqlen_q, _ = q.shape
        num_heads_kv = like.k.shape[1]
        k, v = (
            ((self.k_shape_0, num_heads_kv, self.k_shape_2, x.shape[3]), x.dtype)
            for x in (like.k, like.v)
        )
        each = (2,) if self.key_ranges_dim == 3 else (self.num_ranges, 2)
        ranges = ((batch, seqlen_q, *each), torch.int32)
        lists = (batch,) if self.page_table_dim == 2 else (batch, num_heads_kv)
        table = ((*lists, self.page_table_size), torch.int32)
        scale = (k[0][:3], torch.float32)
        return [
            k,
            v,
            None if like.k_scale is None else scale,
            None if like.v_scale is None else scale,
            ranges if self.key_ranges_dim else None,
            table if self.page_table_dim else None,
        ]


# What a rank sends to each other one before any shard.
MANIFEST_BYTES = 8 * len(fields(_Manifest))


def _gather_manifests(link: Link, own: _Manifest, deadline: float) -> list[_Manifest]:
    # Receivers must know sizes, and any rank may have appended a key. The last column is the seal.
    host = torch.device("cpu")
    send = torch.tensor((*astuple(own), 0), dtype=torch.int64, device=host)
    receive = send.new_empty(link.world_size, send.numel())
    link.gather(receive.view(torch.uint8), send.view(torch.uint8), host).run(deadline)
    manifests = [_Manifest(*row[:-1]) for row in receive.tolist()]
    if len({m.num_threads for m in manifests}) == 1:
        return manifests
    # Every rank splits a shard as its owner does, or its state would differ in bits.
    return [replace(m, num_workers=m.num_workers or m.num_threads) for m in manifests]


def _aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return aligned(math.prod(shape) * dtype.itemsize)
