# SPDX-License-Identifier: BSD-3-Clause
"""A process group prepared for exchanges: `all_merge_states` and the buffers behind it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import merge_states
from .agreement import Disagreement, Note, Signature
from .choice import Choice, CostTable, choose, explain_choice, measured_costs, unavailable_for
from .link import Link
from .self_test import merge_digest
from .session import Session
from .state import Slices, State, StateBuffers, StateLayout
from .strategies import STRATEGIES, Context, Exchange, Resource, check_options
from .sums import Sums
from .topology import Topology, node_name

T = TypeVar("T")

DEFAULT_TIMEOUT = 30.0
_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ExchangeOptions:
    """What a caller asks of an exchange."""

    strategy: str  # or "auto"
    out_dtype: torch.dtype
    payload_dtype: torch.dtype = torch.float32
    head_sharded: bool = False


class Communicator:
    """A process group that merges partial states.

        o, lse = comm.send_state((batch, num_heads_q, seqlen_q, head_dim), q.device)
        lean_decode(q, k_local, v_local, key_ranges, out=(o, lse))
        o, lse = comm.all_merge_states(o, lse, out_dtype=q.dtype)    # the same bits on every rank

    Calls are collective: the same calls in the same order on every rank, one at a time. After a
    rank was lost or stalled, every further call raises at once and the group can be used no more.

    Args:
        group: the process group, by default the world; a world of one where torch.distributed
            is not initialised.
        timeout: seconds in which a call returns or raises, whatever the group's own timeout.
        nodes: the node of each rank, in rank order, as anything that is equal for ranks of a node.
            By default ranks of one torchrun agent on one host share a node; the environment
            variable TREE_ATTENTION_NODE overrides that for a process.

    Attributes:
        rank, world_size: position of this process in the group, and the number of ranks.
        topology: which ranks share a node. Known, unless given, after the first call.
        timeout: the default timeout of a call in seconds.
        failed: None, or why this communicator can no longer be used.
        bytes_sent, seconds: what this rank has sent, and how long its host has waited for it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        nodes: Sequence[object] | None = None,
    ) -> None:
        group = _resolve_group(group)
        self.rank, self.world_size = (0, 1) if group is None else (group.rank(), group.size())
        if nodes is not None and len(nodes) != self.world_size:
            raise ValueError(
                f"nodes must name the node of each of {self.world_size} ranks, got {list(nodes)}"
            )
        self._nodes = None if nodes is None else Topology.of(nodes).nodes
        self.topology = Topology(self._nodes or (0,) * self.world_size)
        self._timeout = timeout
        self._session: Session | None = None
        self._costs: CostTable | None = None
        if group is not None and self.world_size > 1:
            note = {"node": node_name()}
            self._session = Session(group, timeout, note, self._abort_resources)
            self._costs = measured_costs()
        # What must be equal on all ranks in every call.
        digest = "shipped" if self._costs is None else self._costs.digest
        self._constants: Signature = (("nodes", self._nodes), ("exchange costs", digest))
        self._buffers: defaultdict[int, StateBuffers] = defaultdict(StateBuffers)
        self._sums = Sums()
        self._is_loading = False
        # By kind of device, once it was tried: why strategies are unavailable, and their resources.
        self._unavailable: dict[str, dict[str, str]] = {}
        self._resources: dict[tuple[str, str], Resource] = {}

    @property
    def link(self) -> Link:
        """The operations of the group, of which there are none in a world of one."""
        return self._session_of_several.link

    @property
    def timeout(self) -> float:
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = seconds
        if self._session is not None:
            self._session.timeout = seconds

    @property
    def failed(self) -> str | None:
        return None if self._session is None else self._session.failed

    @property
    def bytes_sent(self) -> int:
        return 0 if self._session is None else self._session.link.bytes_sent

    @property
    def seconds(self) -> float:
        return 0.0 if self._session is None else self._session.link.seconds

    @property
    def _session_of_several(self) -> Session:
        if self._session is None:
            raise ValueError("a world of one rank sends nothing and has no link")
        return self._session

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
        self._abandon_loaded_state()
        self._is_loading = True
        device = torch.empty(0, device=device).device  # with an index, as all_merge_states sees it
        state = self.state(shape, device, payload_dtype)
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
        timeout: float | None = None,
        signature: Signature = (),
    ) -> tuple[Tensor, Tensor]:
        """`tree_attention.all_merge_states` over this communicator.

        An `(o, lse)` that `send_state` gave is not copied. `signature` adds `(name, value)` pairs
        that must be equal on all ranks.
        """
        with self.before_call():
            check_options(strategy, payload_dtype, head_sharded)
            _check_state(o, lse, out_dtype)
            dtype = o.dtype if out_dtype is None else out_dtype
            if self._session is None:
                return merge_states(o[None], lse[None], out_dtype=dtype)
            state = self.state(o.shape, o.device, payload_dtype)
            if o.data_ptr() != state.o.data_ptr() or lse.data_ptr() != state.lse.data_ptr():
                state.load(o, lse)
            options = ExchangeOptions(strategy, dtype, payload_dtype, head_sharded)
            outputs = self.outputs(state.layout, options, o.device)
        self._is_loading = False
        self.call(
            (*signature, *self.fields(state.layout, options, o.device)),
            lambda deadline: self.exchange(state, options, outputs, deadline, explain=explain),
            timeout,
            o.device,
        )
        return outputs

    def all_reduce(
        self,
        x: Tensor,
        *,
        payload_dtype: torch.dtype | None = None,
        timeout: float | None = None,
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
        with self.before_call():
            payload = self._sums.check(x, payload_dtype)
        if self._session is None:
            return x.clone()
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        signature = (
            ("call", "all_reduce"),
            ("shape", tuple(x.shape)),
            ("dtype", x.dtype),
            ("payload_dtype", payload),
            ("device", x.device.type),
        )
        self.call(
            signature,
            lambda deadline: self._sums.run(self.link, x, payload, result, deadline),
            timeout,
            x.device,
        )
        return result

    def agree(self, signature: Signature, timeout: float | None = None) -> None:
        """Raises ExchangeError on every rank, naming rank and field, unless all are equal."""
        if self._session is not None:
            session = self._session
            self._abandon_loaded_state()
            fields = (*signature, *self._constants)
            session.before_deadline(
                lambda deadline: self._learn(session.compare(fields, deadline)), timeout
            )

    def abort(self, reason: str = "no reason given") -> None:
        """Ends the call under way, which raises ExchangeError, and refuses further ones.

        From any thread, any number of times. Other ranks fail when they wait for this one, and at
        their deadlines otherwise. Over NCCL, what was queued ends with the group's watchdog.
        """
        if self._session is not None:
            self._session.fail(f"aborted: {reason}")

    def check(self) -> None:
        """Raises ExchangeError if an exchange is known to have failed. Waits for nothing.

        With "one_shot" GPUs wait for each other without the host, whose next call or check has the
        error; until then there is NaN for o and lse, also from replayed graphs.
        """
        if self._session is not None:
            self._session.before_deadline(lambda deadline: self._check_resources(), None)

    # What follows is for decoding functions that exchange in ways of their own.

    def call(
        self,
        signature: Signature,
        run: Callable[[float], T],
        timeout: float | None = None,
        device: torch.device | None = None,
    ) -> T:
        """`run(deadline)` once all ranks are known to run the same; any error in it is final.

        `signature` names the kind of `device`. The first call with tensors of a kind of device
        tests how messages are delivered there, and sets up the strategies that need it.
        """
        session = self._session_of_several
        self._abandon_loaded_state()

        def agree_and_run(deadline: float) -> T:
            notes = session.agree((*signature, *self._constants), deadline)
            if notes is not None:
                self._learn(notes)
                if device is not None and device.type not in self._unavailable:
                    self._prepare_device(session, device, deadline)
            return run(deadline)

        return session.before_deadline(agree_and_run, timeout)

    def unavailable(self, device: torch.device) -> Mapping[str, str]:
        """Strategies that cannot be used with tensors of `device`, and why; known after a call."""
        return self._unavailable.get(device.type, {})

    def abandon_call(self) -> None:
        """To be told by a rank that stopped on the way to a call (see `Session.abandon`)."""
        self._is_loading = False
        if self._session is not None:
            self._session.abandon()

    @contextmanager
    def before_call(self) -> Iterator[None]:
        """For what a rank does on the way to a call, which it abandons if that raises."""
        try:
            yield
        except BaseException:
            self.abandon_call()
            raise

    def state(
        self,
        shape: torch.Size | tuple[int, ...],
        device: torch.device,
        payload_dtype: torch.dtype = torch.float32,
        part: int = 0,
    ) -> State:
        """The send buffer of an `o` of `shape`, valid until the next exchange.

        Buffers of other parts are in other memory, so that several may be in use.
        """
        return self._buffers[part].get(torch.Size(shape), payload_dtype, device)

    def outputs(
        self, layout: StateLayout, options: ExchangeOptions, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """New tensors for an exchange to write into."""
        batch, num_heads, seqlen_q = layout.shape
        if options.head_sharded:
            num_heads = Slices.of_heads(layout, self.world_size).count_in(self.rank)
        shape = (batch, num_heads, seqlen_q)
        o = torch.empty((*shape, layout.head_dim), dtype=options.out_dtype, device=device)
        return o, torch.empty(shape, dtype=torch.float32, device=device)

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
        if explain or options not in state.prepared:
            state.prepared[options] = self._prepare(state, options, explain)
        state.prepared[options](deadline, *outputs)

    def _prepare(self, state: State, options: ExchangeOptions, explain: bool) -> Exchange:
        layout = state.layout
        if layout.num_bytes == 0:
            return lambda deadline, o, lse: None
        unavailable = unavailable_for(layout, self.unavailable(state.device))
        if options.strategy != "auto":
            choice = Choice(options.strategy, "asked for")
        else:
            choice = choose(
                layout,
                self.topology,
                self.link.backend(state.device),
                head_sharded=options.head_sharded,
                costs=self._costs,
                unavailable=unavailable,
            )
        name = choice.strategy
        if name in unavailable:
            raise Disagreement(f"{name} is not available: {unavailable[name]}")
        if explain and self.rank == 0:
            text = explain_choice(
                choice, layout, self.topology, options.out_dtype, options.head_sharded
            )
            print(text, flush=True)
        context = Context(
            self.link,
            self.topology,
            state,
            options.out_dtype,
            options.head_sharded,
            self._resources.get((name, state.device.type)),
        )
        # Views that are made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            return STRATEGIES[name].prepare(context)

    def _prepare_device(self, session: Session, device: torch.device, deadline: float) -> None:
        session.test_delivery(device, deadline)

        def gather(step: str, note: Note) -> Sequence[Note]:
            return session.compare((("step", step),), deadline, note)

        unavailable = {}
        for name, strategy in STRATEGIES.items():
            if strategy.set_up is None:
                continue
            found = strategy.set_up(session.link, device, self.topology, gather, deadline)
            if isinstance(found, str):
                unavailable[name] = found
            else:
                self._resources[name, device.type] = found
        self._unavailable[device.type] = unavailable

    def _learn(self, notes: Sequence[Note]) -> None:
        if self._nodes is None:
            self.topology = Topology.of([note["node"] for note in notes])

    def _abandon_loaded_state(self) -> None:
        if self._is_loading:  # a state of send_state never came to its exchange
            self.abandon_call()

    def _check_resources(self) -> None:
        for resource in self._resources.values():
            resource.check()

    def _abort_resources(self) -> None:
        for resource in list(self._resources.values()):
            resource.abort()


def all_merge_states(
    o: Tensor,
    lse: Tensor,
    group: dist.ProcessGroup | Communicator | None = None,
    *,
    strategy: str = "auto",
    out_dtype: torch.dtype | None = None,
    payload_dtype: torch.dtype = torch.float32,
    head_sharded: bool = False,
    timeout: float | None = None,
) -> tuple[Tensor, Tensor]:
    """An all-reduce of partial attention states whose operation is `merge_states`.

    Equivalent PyTorch, up to rounding::

        lse = torch.stack(all_gathered_lse).logsumexp(0)
        o = sum((lse_r - lse).exp()[..., None] * o_r for o_r, lse_r in all_gathered_states)

    Collective: every rank calls with its own state of the same queries over its own keys.

    Args:
        o: `[batch, num_heads_q, seqlen_q, head_dim]`, float32, bfloat16 or float16, any strides.
        lse: float32 `[batch, num_heads_q, seqlen_q]`, natural logarithm, any strides; `-inf` for a
            row without keys on this rank, whatever its `o`.
        group: a process group or a `Communicator`, default the world. Without torch.distributed
            this is a world of one.
        strategy: "auto" or one of `strategies()`.
        out_dtype: dtype of the merged `o`, default that of `o`. Arithmetic is float32.
        payload_dtype: dtype in which each rank's `o` travels: float32, or bfloat16 to halve the
            bytes, where every rank, also its own, sees the rounded copy. lse stays float32.
            Ignored in a world of one.
        head_sharded: return to each rank its heads only, those that
            `torch.tensor_split(o, world_size, dim=1)[rank]` names, maybe none.
        timeout: seconds in which the call returns or raises, 30 unless the communicator says
            otherwise.

    Returns:
        New tensors: the merged o and the float32 lse, with the same bits on every rank, and those
        of `merge_states` of the ranks' states for all strategies but "three_allreduce" and
        "max_then_sum"; `(0, -inf)` for a row that has no keys on any rank.

    Raises:
        ValueError: no such strategy, options it has not, or shapes or dtypes break the rules
            above. Nothing was sent; ranks whose arguments were right run into their timeout.
        ExchangeError: a rank was lost, stalled, or called with other arguments.

    Source: Tree Attention (arXiv:2408.04093), section 5.
    """
    return get_communicator(group).all_merge_states(
        o,
        lse,
        strategy=strategy,
        out_dtype=out_dtype,
        payload_dtype=payload_dtype,
        head_sharded=head_sharded,
        timeout=timeout,
    )


_communicators: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()


def get_communicator(
    group: dist.ProcessGroup | Communicator | None = None, timeout: float | None = None
) -> Communicator:
    """The communicator of `group` (default the world), made at first use and kept with the group.

    `timeout`, if given, becomes its default.
    """
    if isinstance(group, Communicator):
        comm = group
    else:
        group = _resolve_group(group)
        if group is None:
            comm = Communicator()
        elif (known := _communicators.get(group)) is not None:
            comm = known
        else:
            comm = _communicators[group] = Communicator(group)
    if timeout is not None:
        comm.timeout = timeout
    return comm


def _resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "group must be a process group that this process is in or a Communicator, got "
            f"{group!r}"
        )
    return group


def _check_state(o: Tensor, lse: Tensor, out_dtype: torch.dtype | None) -> None:
    shapes = f"{o.dtype} {list(o.shape)} and {lse.dtype} {list(lse.shape)}"
    if o.dim() != 4 or lse.shape != o.shape[:3] or lse.dtype != torch.float32:
        raise ValueError(
            "all_merge_states: o must be [batch, num_heads_q, seqlen_q, head_dim] and lse float32 "
            f"[batch, num_heads_q, seqlen_q], got {shapes}"
        )
    if o.shape[3] == 0:
        raise ValueError(f"all_merge_states: head_dim must be at least 1, got {shapes}")
    if o.device != lse.device:
        raise ValueError(
            f"all_merge_states: o and lse must be on one device, got {o.device} and {lse.device}"
        )
    for name, dtype in (("o", o.dtype), ("out_dtype", out_dtype or o.dtype)):
        if dtype not in _STATE_DTYPES:
            raise ValueError(
                f"all_merge_states: {name} must be float32, bfloat16 or float16, got {dtype}"
            )
    if torch.is_grad_enabled() and (o.requires_grad or lse.requires_grad):
        raise ValueError(
            "all_merge_states: o and lse must not require a gradient (inference only), got "
            "requires_grad=True; call it under torch.no_grad()"
        )
