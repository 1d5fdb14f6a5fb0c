# SPDX-License-Identifier: BSD-3-Clause
"""A process group prepared for exchanges: `all_merge_states` and the buffers behind it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import merge_states
from .agreement.call import DEFAULT_TIMEOUT, Calls
from .agreement.self_test import merge_digest
from .agreement.signatures import Signature
from .auto.prepare import prepare
from .options import (
    ExchangeOptions,
    check_gather,
    check_no_gradient,
    check_options,
    check_state,
    payload_of_sum,
)
from .transport.buffers import State, StateBuffers, StateLayout, share
from .transport.gathers import Gathers
from .transport.sums import Sums


class Communicator(Calls):
    """A process group that merges partial states.

        o, lse = comm.send_state((batch, num_heads_q, seqlen_q, head_dim), q.device)
        lean_decode(q, k_local, v_local, key_ranges, out=(o, lse))
        o, lse = comm.all_merge_states(o, lse, out_dtype=q.dtype)    # the same bits on every rank

    Calls are collective: the same calls in the same order on every rank. After a rank was lost or
    stalled, every further call raises at once and the group can be used no more.

    A process group serves one thread at a time: a call raises ExchangeError, and sends nothing,
    while one of another thread is under way, or between that thread's `send_state` and its merge.
    Ranks compare the names of the calling threads, so that threads which enter in different orders
    are an error: threads that call together have the same name on all ranks, and no two threads of
    a process have the same. A forked child cannot use the groups of its parent.

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

    by_name: ClassVar[WeakValueDictionary[str, Communicator]] = WeakValueDictionary()
    _numbers: ClassVar = count(1)

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        *,
        nodes: Sequence[object] | None = None,
    ) -> None:
        super().__init__(group, timeout, nodes=nodes)
        # Doors have memory of their own: one is used while the next call's state is in the buffer.
        self._buffers, self._doors = StateBuffers(), StateBuffers()
        self._sums, self._gathers = Sums(), Gathers()
        self.name = f"communicator {next(self._numbers)}"
        self.by_name[self.name] = self

    def send_state(
        self,
        shape: tuple[int, int, int, int],
        device: torch.device | str = "cpu",
        payload_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """Views `(o, lse)` of the send buffer, for the kernel to write into.

        `o` has `shape` `[batch, num_heads_q, seqlen_q, head_dim]`, with the head_dim of `v`, and
        the payload's dtype; `lse [batch, num_heads_q, seqlen_q]` is float32. The next exchange
        overwrites both.
        """
        with self.turn("send_state"):
            self._refuse_views_of_others("send_state")  # also in a world of one
            self._abandon_loaded_state()
            if not isinstance(device, torch.device) or device.type != "cpu":
                device = torch.empty(0, device=device).device  # with an index, as the merge sees it
            state = self.state(shape, device, payload_dtype)
            self._loading = threading.current_thread()
            return state.o, state.lse

    def all_merge_states(
        self,
        o: Tensor,
        lse: Tensor,
        *,
        strategy: str = "auto",
        out_dtype: torch.dtype | None = None,
        payload_dtype: torch.dtype = torch.float32,
        head_sharded: bool = False,
        explain: bool = False,
        timeout: float | timedelta | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`tree_attention.all_merge_states` over this communicator.

        An `(o, lse)` that `send_state` gave is not copied.
        """
        op = "all_merge_states"
        with self.turn(op):
            with self.before_call():
                seconds = self.seconds_of(op, timeout)
                check_options(op, strategy, payload_dtype, head_sharded, out_dtype)
                check_state(op, o, lse)
                dtype = o.dtype if out_dtype is None else out_dtype
                if self._session is None:
                    self._loading = None
                    return merge_states(o[None], lse[None], out_dtype=dtype)
                state = self.state(o.shape, o.device, payload_dtype)
                if not state.holds(o, lse):
                    state.load(o, lse)
                options = ExchangeOptions(strategy, dtype, payload_dtype, head_sharded)
            self._loading = None
            return self.merge(op, (), state, options, seconds, explain=explain)

    def all_reduce(
        self,
        x: Tensor,
        *,
        payload_dtype: torch.dtype | None = None,
        timeout: float | timedelta | None = None,
    ) -> Tensor:
        """The sum of all ranks' `x`, with the same bits on every rank.

        Equivalent PyTorch::

            sum(x_of_rank.to(payload_dtype).float() for x_of_rank in all_gathered_x).to(x.dtype)

        Ranks are added left to right in float32, whatever route the message takes: one round to
        every rank for small messages, slices and then an all-gather for large ones.

        Args:
            x: a tensor of a floating dtype, of the same shape and dtype on every rank.
            payload_dtype: dtype of what ranks send: float32, or bfloat16, which rounds each rank's
                part and the sum. By default bfloat16 where x is, else float32. Ignored in a world
                of one.
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
            total: Tensor = torch.ops.tree_attention.all_reduce(
                x, self.name, payload_dtype=payload_dtype, timeout=timeout
            )
            return total
        with self.turn("all_reduce"):
            with self.before_call():
                seconds = self.seconds_of("all_reduce", timeout)
                payload = payload_of_sum(x, payload_dtype)
            if self._session is None:
                return x.clone(memory_format=torch.contiguous_format)
            result = torch.empty_like(x, memory_format=torch.contiguous_format)

            shape, dtype, device = x.shape, x.dtype, x.device  # as a door shall not keep x

            def again(deadline: float) -> None:
                nothing = torch.empty(shape, dtype=dtype, device=device)
                self._sums.run(self.link, nothing, payload, torch.empty_like(nothing), deadline)

            signature = (
                ("shape", tuple(x.shape)),
                ("dtype", x.dtype),
                ("payload_dtype", payload),
                ("device", x.device.type),
            )
            self.call(
                "all_reduce",
                signature,
                lambda deadline: self._sums.run(self.link, x, payload, result, deadline),
                seconds,
                device,
                door=again,
            )
            return result

    def all_gather(
        self,
        x: Tensor,
        counts: Sequence[int],
        dim: int = -1,
        *,
        timeout: float | timedelta | None = None,
    ) -> Tensor:
        """All ranks' `x`, concatenated along `dim` in rank order, on every rank.

        Equivalent PyTorch::

            torch.cat(all_gathered_x, dim)

        Args:
            x: a tensor of any dtype and strides, of the same dtype and shape on every rank but for
                its size in `dim`.
            counts: that size on every rank, in rank order, maybe zero; the same on every rank.
            dim: the dimension along which ranks' tensors differ and are concatenated.
            timeout: seconds in which the call returns or raises, by default the communicator's.

        Returns:
            A new tensor.

        Raises:
            ValueError: counts or dim do not describe x, or x requires a gradient. Nothing was sent.
            ExchangeError: a rank was lost, stalled, or called with other arguments.
        """
        if torch.compiler.is_compiling():
            check_no_gradient("all_gather", "x", x)
            gathered: Tensor = torch.ops.tree_attention.all_gather(
                x, self.name, counts, dim, timeout=timeout
            )
            return gathered
        with self.turn("all_gather"):
            with self.before_call():
                seconds = self.seconds_of("all_gather", timeout)
                counts, dim = check_gather(x, counts, dim, self.rank, self.world_size)
                if self._session is None:
                    return x.clone(memory_format=torch.contiguous_format)
            shape, dtype, device = x.shape, x.dtype, x.device  # as a door shall not keep x

            def again(deadline: float) -> None:
                nothing = torch.empty(shape, dtype=dtype, device=device)
                self.gather(nothing, counts, dim, deadline)

            signature = (
                ("shape without dim", (*x.shape[:dim], *x.shape[dim + 1 :])),
                ("dim", dim),
                ("counts", counts),
                ("dtype", x.dtype),
                ("device", x.device.type),
            )
            return self.call(
                "all_gather",
                signature,
                lambda deadline: self.gather(x, counts, dim, deadline),
                seconds,
                device,
                door=again,
            )

    # What follows serves calls other than those above too, and lends them memory.

    def gather(self, x: Tensor, counts: tuple[int, ...], dim: int, deadline: float) -> Tensor:
        """What `all_gather` returns, inside a call."""
        result = x.new_empty((*x.shape[:dim], sum(counts), *x.shape[dim + 1 :]))
        self._gathers.run(self.link, x, counts, dim, result, deadline)
        return result

    def state(
        self,
        shape: torch.Size | tuple[int, ...],
        device: torch.device,
        payload_dtype: torch.dtype = torch.float32,
    ) -> State:
        """The send buffer of an `o` of `shape`, valid until the next exchange."""
        return self._buffers.get(torch.Size(shape), payload_dtype, device)

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
        op: str,
        signature: Signature,
        state: State,
        options: ExchangeOptions,
        seconds: float,
        queries: Sequence[Tensor] = (),
        *,
        explain: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The merge of all ranks' `state`, as one call of `op` with the fields of `signature`."""
        layout, device = state.layout, state.device
        with self.before_call():
            outputs = self.outputs(layout, options, device)

        def again(deadline: float) -> None:
            shape = torch.Size((*layout.shape, layout.head_dim))
            nothing = self._doors.get(shape, layout.dtype, device)
            self.exchange(nothing, options, self.outputs(layout, options, device), deadline)

        self.call(
            op,
            (*signature, *self.fields(layout, options, device)),
            lambda deadline: self.exchange(state, options, outputs, deadline, explain=explain),
            seconds,
            device,
            door=again,
            queries=queries,
        )
        return outputs

    def fields(
        self, layout: StateLayout, options: ExchangeOptions, device: torch.device
    ) -> Signature:
        """What ranks must have in common to exchange states."""
        return (
            ("strategy", options.strategy),
            ("batch, num_heads_q, seqlen_q, head_dim", (*layout.shape, layout.head_dim)),
            ("out_dtype", options.out_dtype),
            ("payload_dtype", options.payload_dtype),
            ("head_sharded", options.head_sharded),
            ("device", device.type),
            ("result of a test merge, as this processor rounds it,", merge_digest(device)),
        )

    def exchange(
        self,
        state: State,
        options: ExchangeOptions,
        outputs: tuple[Tensor, Tensor],
        deadline: float,
        *,
        explain: bool = False,
    ) -> None:
        """Merges `state` with those of all ranks, inside a call."""
        prepared = state.prepared.get(options)
        if prepared is None or explain:
            prepared = state.prepared[options] = prepare(
                state, options, self.link, self.topology, self._resources, self._costs, explain
            )
        prepared(deadline, *outputs)
