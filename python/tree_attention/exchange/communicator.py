# SPDX-License-Identifier: BSD-3-Clause
"""A process group prepared for exchanges: `all_merge_states` and the buffers behind it.

`get_communicator` makes one at first use and keeps it with the group.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import count
from typing import ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from ..ops import merge_states
from .agreement.call import DEFAULT_TIMEOUT, Call, Calls
from .agreement.self_test import merge_digest
from .notes import Signature
from .options import (
    ExchangeOptions,
    MergeOptions,
    Timeout,
    check_gather,
    check_no_gradient,
    check_state,
    payload_of_sum,
    resolve_group,
)
from .transport.buffers import MAX_KEPT_BYTES, State, StateBuffers, StateLayout, share
from .transport.collectives import Collectives

# A call in which the messages of all ranks have more bytes is large. Host memory beyond
# `MAX_KEPT_BYTES` stays while large calls follow one another, as in a prompt's layers: each would
# take twice as long with fresh memory.
_LARGE_BYTES = MAX_KEPT_BYTES // 8
# So many small calls may be between two large ones; after one more the memory is freed.
_MAX_SMALL_CALLS = 1


class Communicator(Calls):
    """A process group that merges partial states.

        o, lse = lean_decode(q, k_local, v_local, key_ranges, out_dtype=torch.float32)
        o, lse = comm.all_merge_states(o, lse, out_dtype=q.dtype)    # the same bits on every rank

    Calls are collective: the same calls in the same order on every rank. After a rank was lost or
    stalled, every further call raises at once and the group can be used no more.

    A process group serves one thread at a time: a call raises ExchangeError, and sends nothing,
    while one of another thread is under way. Ranks compare the names of the calling threads, so
    that threads which enter in different orders are an error: threads that call together have the
    same name on all ranks, and no two threads of a process have the same, or `turn` names the
    caller. A forked child cannot use the groups of its parent.

    Args:
        group: the process group, by default the world; a world of one where torch.distributed
            is not initialised.
        timeout: seconds in which a call returns or raises, whatever the group's own timeout; here
            and in every call a number above 0 or a `datetime.timedelta`.
        nodes: the node of each rank, in rank order, as anything that is equal for ranks of a node.
            By default ranks of one torchrun agent on one host share a node; the environment
            variable TREE_ATTENTION_NODE overrides that for a process.

    Attributes:
        rank, world_size: position of this process in the group, and the number of ranks.
        topology: which ranks share a node. Known, unless given, after the first call.
        timeout: the default timeout of a call in seconds.
        failed: None, or why this communicator can no longer be used.
        bytes_sent, seconds: what this rank has sent, and how long its host has waited for it.
        name: tells it from the others of this process, also in compiled graphs.
    """

    by_name: ClassVar["WeakValueDictionary[str, Communicator]"] = WeakValueDictionary()
    _numbers: ClassVar = count(1)

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        *,
        nodes: Sequence[object] | None = None,
    ) -> None:
        super().__init__(group, timeout, nodes=nodes)
        self._buffers, self._collectives = StateBuffers(), Collectives()
        self._num_small_calls = 0  # in a row
        self.name = f"communicator {next(self._numbers)}"
        self.by_name[self.name] = self

    def all_merge_states(
        self, o: Tensor, lse: Tensor, *, explain: bool = False, **options: Unpack[MergeOptions]
    ) -> tuple[Tensor, Tensor]:
        """`tree_attention.all_merge_states` over this communicator."""
        op = "all_merge_states"
        with self.begin(op, options.pop("timeout", None)) as call:
            check_state(op, o, lse)
            exchange = ExchangeOptions.of(op, options, o.dtype)
            if self.world_size == 1:
                return merge_states(o[None], lse[None], out_dtype=exchange.out_dtype)
            state = self.state(o.shape, o.device, exchange.payload_dtype)
            state.load(o, lse)
            return self.merge(call, (), state, exchange, explain=explain)

    def all_reduce(
        self, x: Tensor, *, payload_dtype: torch.dtype | None = None, timeout: Timeout = None
    ) -> Tensor:
        """The sum of all ranks' `x`, with the same bits on every rank.

        Equivalent PyTorch::

            sum(x_of_rank.to(payload_dtype).float() for x_of_rank in all_gathered_x).to(x.dtype)

        Ranks are added left to right in float32, whatever route the message takes: one round to
        every rank for small messages, slices and then an all-gather for large ones.

        Args:
            x: a tensor of a floating dtype, of the same shape and dtype on every rank.
            payload_dtype: dtype of what ranks send: float32, or bfloat16, which rounds each rank's
                part and the sum; by default bfloat16 where x is. Ignored in a world of one.
            timeout: seconds in which the call returns or raises, by default the communicator's.

        Returns:
            A new tensor with x's dtype and shape.

        Raises:
            ValueError: x is not floating, requires a gradient, or there is no such payload_dtype.
                Nothing was sent.
            ExchangeError: a rank was lost, stalled, or called with other arguments.
        """
        if torch.compiler.is_compiling():
            check_no_gradient("all_reduce", "x", x)
            operator = torch.ops.tree_attention.all_reduce
            total: Tensor = operator(self.name, x, payload_dtype=payload_dtype, timeout=timeout)
            return total
        with self.begin("all_reduce", timeout) as call:
            payload = payload_of_sum(x, payload_dtype)
            if self.world_size == 1:
                return x.clone(memory_format=torch.contiguous_format)
            signature = (
                ("shape", tuple(x.shape)),
                ("dtype", x.dtype),
                ("payload_dtype", payload),
                ("device", x.device.type),
            )
            return self._collect(call, signature, x, self._collectives.all_reduce, payload)

    def all_gather(
        self, x: Tensor, counts: Sequence[int], dim: int = -1, *, timeout: Timeout = None
    ) -> Tensor:
        """All ranks' `x`, concatenated along `dim` in rank order, on every rank.

        Equivalent PyTorch::

            torch.cat(all_gathered_x, dim)

        Args:
            x: a tensor of any dtype and strides, of the same dtype and shape on every rank but for
                its size in `dim`.
            counts: that size on every rank, in rank order, maybe zero; the same on every rank.
            dim: the dimension along which ranks' tensors differ and are concatenated.
            timeout: as in `all_reduce`.

        Returns:
            A new tensor.

        Raises:
            ValueError: counts or dim do not describe x, or x requires a gradient. Nothing was sent.
            ExchangeError: as in `all_reduce`.
        """
        if torch.compiler.is_compiling():
            check_no_gradient("all_gather", "x", x)
            operator = torch.ops.tree_attention.all_gather
            gathered: Tensor = operator(self.name, x, counts, dim, timeout=timeout)
            return gathered
        with self.begin("all_gather", timeout) as call:
            counts, dim = check_gather(x, counts, dim, self.rank, self.world_size)
            if self.world_size == 1:
                return x.clone(memory_format=torch.contiguous_format)
            signature = (
                ("shape without dim", (*x.shape[:dim], *x.shape[dim + 1 :])),
                ("dim", dim),
                ("counts", counts),
                ("dtype", x.dtype),
                ("device", x.device.type),
            )
            return self._collect(call, signature, x, self._collectives.all_gather, counts, dim)

    def _collect(
        self, call: Call, signature: Signature, x: Tensor, run: Callable[..., Tensor], *how: object
    ) -> Tensor:
        """`run` for all ranks' `x`, as `call`."""
        self._note_size(x.nbytes)
        link, shape, dtype, device = self.link, x.shape, x.dtype, x.device  # a door keeps no x
        return call.run(
            signature,
            lambda deadline: run(link, x, *how, deadline),
            device,
            door=lambda deadline: run(
                link, torch.empty(shape, dtype=dtype, device=device), *how, deadline
            ),
        )

    def give_back(self) -> None:
        self._num_small_calls += 1
        if self._num_small_calls <= _MAX_SMALL_CALLS or self._session is None:
            return
        states, sums, link = self._buffers.prepared, self._collectives.prepared, self.link
        held = states.arena.host_bytes + sums.arena.host_bytes + link.staged_bytes
        if held > MAX_KEPT_BYTES:
            states.free_host()
            sums.free_host()
            link.free_staged()

    def _note_size(self, num_bytes: int) -> None:
        """Notes the size of this rank's message in the call under way, for `give_back`."""
        if num_bytes * self.world_size > _LARGE_BYTES:
            self._num_small_calls = -1  # as this one ends

    # The methods below serve other collective functions too, and lend them memory.

    def gather(self, x: Tensor, counts: tuple[int, ...], dim: int, deadline: float) -> Tensor:
        """`all_gather`, inside a call."""
        self._note_size(x.nbytes)
        return self._collectives.all_gather(self.link, x, counts, dim, deadline)

    def state(
        self,
        shape: torch.Size | tuple[int, ...],
        device: torch.device,
        payload_dtype: torch.dtype = torch.float32,
    ) -> State:
        """The send buffer of an `o` of `shape`, valid until the next exchange."""
        state = self._buffers.get(torch.Size(shape), payload_dtype, device)
        self._note_size(state.send.nbytes)
        return state

    def lend(
        self,
        shape: torch.Size | tuple[int, ...],
        device: torch.device,
        payload_dtype: torch.dtype = torch.float32,
    ) -> AbstractContextManager[State]:
        """Such a buffer for a door, whatever is in it, maybe the next call's state."""
        return self._buffers.lend(torch.Size(shape), payload_dtype, device)

    def outputs(
        self, layout: StateLayout, options: ExchangeOptions, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """New tensors for an exchange to write into."""
        batch, num_heads, seqlen_q = layout.shape
        if options.head_sharded:
            num_heads = share(num_heads, self.world_size, self.rank)
        shape = (batch, num_heads, seqlen_q)
        o = torch.empty((*shape, layout.head_dim), dtype=options.out_dtype, device=device)
        return o, torch.empty(shape, dtype=torch.float32, device=device)

    def merge(
        self,
        call: Call,
        signature: Signature,
        state: State,
        options: ExchangeOptions,
        queries: Sequence[Tensor] = (),
        *,
        explain: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Merges all ranks' `state` as `call`; the fields of `signature` must be equal on all."""
        layout, device = state.layout, state.device
        outputs = self.outputs(layout, options, device)

        def exchange(state: State, outputs: tuple[Tensor, Tensor], deadline: float) -> None:
            prepared = state.prepared.get(options)
            if prepared is None:
                prepared = state.prepared[options] = self._resources.prepare(state, options)
            prepared(deadline, *outputs)

        def again(deadline: float) -> None:
            with self.lend((*layout.shape, layout.head_dim), device, layout.dtype) as there:
                exchange(there, self.outputs(layout, options, device), deadline)

        call.run(
            (*signature, *self.fields(layout, options, device)),
            lambda deadline: exchange(state, outputs, deadline),
            device,
            door=again,
            queries=queries,
        )
        if explain and self.rank == 0 and layout.num_bytes:
            # After the call: it is the caller's stream, which may be closed.
            print(self._resources.explanation(layout, device, options), flush=True)
        return outputs

    def fields(
        self, layout: StateLayout, options: ExchangeOptions, device: torch.device
    ) -> Signature:
        """Fields that ranks must have in common to exchange states."""
        return (
            ("strategy", options.strategy),
            ("batch, num_heads_q, seqlen_q, head_dim", (*layout.shape, layout.head_dim)),
            ("out_dtype", options.out_dtype),
            ("payload_dtype", options.payload_dtype),
            ("head_sharded", options.head_sharded),
            ("device", device.type),
            ("result of a test merge, as this processor rounds it,", merge_digest(device)),
        )


_communicators: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()
_making = threading.Lock()


def _free_lock() -> None:
    """In a forked child, where the thread that held the lock does not exist."""
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_free_lock)


def get_communicator(group: dist.ProcessGroup | Communicator | None = None) -> Communicator:
    """The communicator of `group`, by default the world: made at first use, kept with the group."""
    if isinstance(group, Communicator):
        return group
    group = resolve_group(group)
    if group is None:
        return Communicator()
    with _making:  # or two threads would make two, and ranks count them
        comm = _communicators.get(group)
        if comm is None:
            comm = _communicators[group] = Communicator(group)
        return comm
