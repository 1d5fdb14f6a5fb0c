# SPDX-License-Identifier: BSD-3-Clause
"""A process group with collective calls: all ranks agree on each call, and it ends in time.

`get_communicator` makes a communicator at first use and keeps it with the group.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import ClassVar, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from .._numbers import DEFAULT_TIMEOUT
from ..index import merge_topk
from ..ops import merge_states
from ..options import check_values
from .agreement.group_lock import GroupLock, NoLock, lock_of
from .agreement.queries import Queries, warn_of_rounding
from .agreement.self_test import merge_digest
from .agreement.session import Session
from .agreement.signatures import CALLER
from .auto.choose import COSTS_VARIABLE, measured_costs
from .auto.setup import Resources
from .notes import ExchangeError, Note, OtherCall, Signature, sentence
from .options import (
    ExchangeOptions,
    MergeOptions,
    Timeout,
    check_choice,
    check_gather,
    check_no_gradient,
    check_state,
    check_timeout,
    num_own_heads,
    payload_of_sum,
    resolve_group,
)
from .transport.buffers import MAX_KEPT_BYTES, State, StateBuffers, StateLayout
from .transport.collectives import Collectives
from .transport.direct import shared_memory, sockets
from .transport.messages import SAME_CALL
from .transport.process_group import Link
from .transport.topology import Topology, node_name

T = TypeVar("T")

# A call in which the messages of all ranks have more bytes is large. Host memory beyond
# `MAX_KEPT_BYTES` stays while large calls follow one another, as in a prompt's layers: each would
# take twice as long with fresh memory.
_LARGE_BYTES = MAX_KEPT_BYTES // 8
# So many small calls may be between two large ones; after one more the memory is freed.
_MAX_SMALL_CALLS = 1


class Communicator:
    """A process group that merges partial states.

    For example::

        import torch
        from tree_attention import Communicator, lean_decode

        comm = Communicator()  # under torchrun, after init_process_group: all ranks of the job
        q = torch.randn(1, 8, 1, 64, dtype=torch.bfloat16)
        k, v = torch.randn(2, 1, 2, 100, 64, dtype=torch.bfloat16)  # the keys that this rank holds
        o, lse = lean_decode(q, k, v, out_dtype=torch.float32)
        o, lse = comm.all_merge_states(o, lse, out_dtype=q.dtype)  # the same bits on every rank
        print(o.dtype, lse.dtype, comm.world_size)  # torch.bfloat16 torch.float32 1

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
        self.timeout = check_timeout("Communicator", timeout)
        group = resolve_group(group)
        self.rank, self.world_size = (0, 1) if group is None else (group.rank(), group.size())
        # False for a group of one rank that the caller made among others.
        self._is_of_no_group = group is None or (self.world_size == 1 and group is dist.group.WORLD)
        if nodes is not None and len(nodes) != self.world_size:
            raise ValueError(
                f"Communicator: nodes must name the node of each of {self.world_size} ranks, got "
                f"{list(nodes)}"
            )
        self._nodes = None if nodes is None else Topology.of(nodes).nodes
        self.topology = Topology(self._nodes or (0,) * self.world_size)
        self._resources = Resources()
        self._lock: GroupLock = NoLock()
        self._session: Session | None = None  # in a world of one, which sends nothing
        if group is not None and self.world_size > 1:
            self._lock = lock_of(group)
            # Without this: a forked child counts a session, of which its parent knows nothing.
            self._lock.check_process("Communicator")
            self._resources.costs = measured_costs()  # before the session, which ranks count
            note = {"node": node_name()}
            self._session = Session(group, note, self._resources.abort, self.timeout)
        # Fields that must be equal on all ranks in every call.
        costs = self._resources.costs
        table = "none" if costs is None else costs.digest
        self._constants: Signature = (("nodes", self._nodes), (f"table of {COSTS_VARIABLE}", table))
        self._meets_on_host = False
        self._queries = Queries()
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

    def all_merge_topk(
        self,
        scores: Tensor,
        slots: Tensor,
        *,
        topk: int,
        index_dtype: torch.dtype | None = None,
        timeout: Timeout = None,
    ) -> tuple[Tensor, Tensor]:
        """`tree_attention.all_merge_topk` over this communicator."""
        op = "all_merge_topk"
        with self.begin(op, timeout) as call:
            topk = check_choice(op, scores, slots, topk, index_dtype)
            if self.world_size == 1:
                return merge_topk(scores[None], slots[None], topk=topk)
            entries = torch.stack((scores.view(torch.int32), slots))[None]
            counts = (1,) * self.world_size
            gathered = call.run(
                (
                    ("topk", topk),
                    ("index_dtype", index_dtype),
                    ("shape of scores", tuple(scores.shape)),
                    ("device", scores.device.type),
                ),
                lambda deadline: self.gather(entries, counts, 0, deadline),
                scores.device,
            )
            return merge_topk(gathered[:, 0].view(torch.float32), gathered[:, 1], topk=topk)

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
            ValueError: x is not floating, or there is no such payload_dtype. Nothing was sent.
            RuntimeError: x requires a gradient. Nothing was sent.
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
            ValueError: counts or dim do not describe x. Nothing was sent.
            RuntimeError: x requires a gradient. Nothing was sent.
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

    @property
    def link(self) -> Link:
        """Operations of the group. A world of one has none."""
        return self._require_session().link

    def _require_session(self) -> Session:
        if self._session is None:
            raise ValueError("Communicator: a world of one rank sends nothing and has no link")
        return self._session

    @property
    def failed(self) -> str | None:
        return None if self._session is None else self._session.failed

    @property
    def bytes_sent(self) -> int:
        return 0 if self._session is None else self.link.bytes_sent

    @property
    def seconds(self) -> float:
        return 0.0 if self._session is None else self.link.seconds

    def begin(self, op: str, timeout: Timeout = None) -> "Call":
        """Every collective call of `op` begins so: `with comm.begin(op) as call: ... call.run`.

        No other thread may use the group inside. An error before `call.run` abandons the call, so
        that this rank's next one does not meet the others' of this step.
        """
        return Call(self, op, timeout)

    @contextmanager
    def turn(self, op: str, name: str | None = None) -> Iterator[None]:
        """Surrounds calls of one caller, between which no other thread may use the group.

        Equivalent PyTorch: none. It is a lock of this process, which sends nothing.

            with comm.turn("step", name="server"):  # in any thread, on every rank
                o, lse = tree_attention.all_merge_states(o, lse, comm)

        Ranks compare the names of their callers, so that no thread's call meets another one's.
        Threads of a server have names that mean nothing ("AnyIO worker thread", or numbers that
        differ by rank): `name` stands for them. Callers of one name make their calls in the same
        order on every rank, one after another. It holds for all communicators of the group, and
        inside another turn of the thread the outer one's name stays.

        Args:
            op: what is done, for the error of a thread that calls meanwhile.
            name: what ranks compare in place of the thread's name, the same on all ranks. A call
                under another name than the last one's is compared through the store first.

        Raises:
            ValueError: name is no string, or empty.
            ExchangeError: another thread uses the group, or the group is of a forked process's
                parent.
        """
        self._lock.acquire(op, name)
        try:
            yield
        finally:
            self._lock.release()

    def agree(
        self,
        signature: Signature,
        timeout: Timeout = None,
        op: str = "agree",
        note: Note | None = None,
    ) -> list[Note]:
        """The notes of all ranks, in rank order, which may differ.

        Raises ExchangeError on every rank, naming rank and field, unless the signatures are equal.
        """
        with self.begin(op, timeout) as call:
            return call.compare(signature, note)

    def meet_on_host(self) -> None:
        """Lets states of all devices travel to the host and be merged there, if some ranks have
        a GPU and some have none. All ranks call it between the same two calls; it stays so."""
        self._meets_on_host = True

    def meeting_device(self, device: torch.device) -> torch.device:
        """The device on which a tensor of `device` is merged with the tensors of other ranks."""
        return torch.device("cpu") if self._meets_on_host else device

    def abort(self, reason: str = "no reason given") -> None:
        """Ends the call under way, which raises ExchangeError, and refuses further ones.

        From any thread, any number of times. Other ranks fail when they wait for this one, and at
        their deadlines otherwise. Over NCCL, what was queued ends with the group's watchdog. In a
        forked child it raises ExchangeError, and the parent goes on.
        """
        self._lock.check_process("abort")  # or it would close the parent's connections
        if self._session is not None:
            self._session.fail(f"aborted: {reason}")

    def check(self) -> None:
        """Raises ExchangeError if an exchange is known to have failed. Waits for nothing.

        With "one_shot" GPUs wait for each other without the host, whose next call or check has the
        error; until then there is NaN for o and lse, also from replayed graphs.
        """
        self._lock.check_process("check")
        if self._session is not None:
            self._session.before_deadline(lambda deadline: self._resources.check(), self.timeout)

    def seconds_of(self, op: str, timeout: Timeout) -> float:
        """The seconds that an argument `timeout` of `op` stands for."""
        return self.timeout if timeout is None else check_timeout(op, timeout)

    def check_group(self, made_by: str) -> None:
        """Raises ExchangeError where the group of `made_by` is destroyed, or was not yet made."""
        reason = None
        if self._session is not None:
            if not self.link.is_group_alive():
                reason = f"its process group of {self.world_size} ranks was destroyed"
        elif self._is_of_no_group and dist.is_initialized() and dist.get_world_size() > 1:
            reason = "it was made before init_process_group, for this rank alone, and now there "
            reason += f"are {dist.get_world_size()} ranks"
        if reason is not None:
            raise ExchangeError(f"{made_by}: {reason}; call {made_by} again")

    def unavailable(self, device: torch.device) -> Mapping[str, str]:
        """Strategies that cannot be used with tensors of `device`, and why; known after a call."""
        return self._resources.unavailable(device)

    # The methods below serve other collective functions too.

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

    def outputs(
        self, op: str, layout: StateLayout, options: ExchangeOptions, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """New tensors for an exchange of `op` to write into."""
        batch, num_heads, seqlen_q = layout.shape
        num_heads = num_own_heads(op, num_heads, options.head_sharded, self.rank, self.world_size)
        shape = (batch, num_heads, seqlen_q)
        o = torch.empty((*shape, layout.head_dim), dtype=options.out_dtype, device=device)
        return o, torch.empty(shape, dtype=torch.float32, device=device)

    def merge(
        self,
        call: "Call",
        signature: Signature,
        state: State,
        options: ExchangeOptions,
        queries: Sequence[Tensor] = (),
        *,
        explain: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Merges all ranks' `state` as `call`; the fields of `signature` must be equal on all."""
        layout, device = state.layout, state.device
        check_values(call.op, "o and lse", state.send)
        if (host := self.meeting_device(device)) != device:
            there = self.state((*layout.shape, layout.head_dim), host, options.payload_dtype)
            there.send.copy_(state.send)
            queries = [x.to(host) for x in queries]
            merged = self.merge(call, signature, there, options, queries, explain=explain)
            o, lse = (x.to(device) for x in merged)
            return o, lse
        outputs = self.outputs(call.op, layout, options, device)

        def exchange(deadline: float) -> None:
            prepared = state.prepared.get(options)
            if prepared is None:
                prepared = state.prepared[options] = self._resources.prepare(state, options)
            prepared(deadline, *outputs)

        call.run(
            (*signature, *self.fields(layout, options, device)), exchange, device, queries=queries
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

    def abandon_call(self) -> None:
        """Records that this rank raised before the messages of a call (`Session.abandon`)."""
        if self._session is not None:
            self._session.abandon()

    def _set_up(self, session: Session, device: torch.device, deadline: float) -> None:
        """Collective: makes what calls with tensors of this kind of device need."""
        link = session.link

        def gather(step: str, note: Note) -> list[Note]:
            return session.compare((("step", step),), deadline, note)

        if link.transport_device(device).type == "cpu" and link.shared_memory is None:
            link.shared_memory = memory = shared_memory.connect(self.rank, self.topology, gather)
            # The same on all ranks: either all nodes have such memory or none.
            if isinstance(memory, str) or self.topology.num_nodes > 1:
                near = () if isinstance(memory, str) else memory
                others = [r for r in range(self.world_size) if r != self.rank and r not in near]
                link.sockets = sockets.connect(self.rank, others, gather, deadline)
            link.forget_ids_round()
        session.test_delivery(device, deadline)
        self._resources.set_up(link, device, self.topology, gather, deadline)

    def _learn(self, notes: Sequence[Note]) -> None:
        if self._nodes is None:
            self.topology = Topology.of([str(note.get("node")) for note in notes])

    def _collect(
        self,
        call: "Call",
        signature: Signature,
        x: Tensor,
        run: Callable[..., Tensor],
        *how: object,
    ) -> Tensor:
        """`run` for all ranks' `x`, as `call`."""
        self._note_size(x.nbytes)
        return call.run(signature, lambda deadline: run(self.link, x, *how, deadline), x.device)

    def _free_memory(self) -> None:
        """Frees memory that is too much to keep, at the end of each call."""
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
        """Notes the size of this rank's message in the call under way, for `_free_memory`."""
        if num_bytes * self.world_size > _LARGE_BYTES:
            self._num_small_calls = -1  # as this one ends


class Call(AbstractContextManager["Call"]):
    """One collective call, in which no other thread may use the group.

    An error before `run` abandons it. `run` returns or raises within `seconds`. It is a class
    because every call enters one, and a generator takes three times as long.
    """

    def __init__(self, comm: Communicator, op: str, timeout: Timeout) -> None:
        self.comm, self.op, self._timeout = comm, op, timeout

    def __enter__(self) -> "Call":
        if self.comm._session is None:
            self.comm.check_group("Communicator")
        self.comm._lock.acquire(self.op)
        self._is_before_run = True
        try:
            self.seconds = self.comm.seconds_of(self.op, self._timeout)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._is_before_run:
            self.comm.abandon_call()
        try:
            self.comm._free_memory()
        finally:
            self.comm._lock.release()

    def run(
        self,
        signature: Signature,
        run: Callable[[float], T],
        device: torch.device | None = None,
        *,
        is_repeatable: bool = True,
        queries: Sequence[Tensor] = (),
    ) -> T:
        """`run(deadline)` once all ranks are known to run the same; any error in it is final.

        `signature` names the kind of `device`. The first call with tensors of a kind of device
        tests how messages are delivered there, and sets up the strategies that need it.

        `is_repeatable`: the signature determines the messages of `run`, up to
        `Link.check_call_id` where it comes to that. Then an equal next call goes straight to them,
        and a rank that makes another one sends them once more, which wakes its peers (`Replay`).
        `queries` have the same values on every rank, which is checked for tensors on the host.
        """
        comm, session, whole = self.comm, self.comm._require_session(), self._whole(signature)
        link = session.link
        # Values of a caller's own kinds are compared, and written, before the call begins: what
        # their methods raise inside it would end the communicator.
        is_agreed = whole == session.agreed
        texts = session.texts if is_agreed else _texts(whole)
        self._is_before_run = False

        def agree_and_run(deadline: float) -> T:
            if not is_agreed:
                comm._learn(session.agree(texts, deadline))
                session.agreed, session.texts = whole, texts
                if device is not None and not comm._resources.are_known(device):
                    comm._set_up(session, device, deadline)
                link.replay.record(is_repeatable)
                if not is_repeatable:
                    session.agreed = None
            link.call_id = call_id = comm._queries.call_id(queries)
            with suppress(OtherCall):
                result = run(deadline)
                link.replay.is_recording = False
                if link.call_id == call_id:
                    return result
            comm._queries.settle(session, texts, queries, deadline)
            link.call_id = SAME_CALL
            return run(deadline)

        were_compared = comm._queries.are_compared
        result = session.before_deadline(agree_and_run, self.seconds)
        if comm._queries.are_compared != were_compared:
            warn_of_rounding()
        return result

    def compare(self, signature: Signature, note: Note | None = None) -> list[Note]:
        """`Communicator.agree`, as this call."""
        session, whole = self.comm._session, _texts(self._whole(signature))
        self._is_before_run = False
        if session is None:
            return [note or {}]

        def announce_and_compare(deadline: float) -> list[Note]:
            session.announce_change(deadline)
            return session.compare(whole, deadline, note)

        notes = session.before_deadline(announce_and_compare, self.seconds)
        self.comm._learn(notes)
        return notes

    def _whole(self, signature: Signature) -> Signature:
        """All that must be equal on all ranks."""
        comm = self.comm
        return (
            ("call", self.op),
            # Without this: ranks take messages of other threads for theirs.
            (CALLER, comm._lock.name),
            *signature,
            *comm._constants,
        )


def _texts(signature: Signature) -> Signature:
    """The signature as ranks publish it."""
    return tuple((name, str(value)) for name, value in signature)


def on_every_rank(
    op: str,
    comm: Communicator,
    timeout: float,
    run: Callable[[], tuple[Signature, T]],
    note_of: Callable[[T], Note] = lambda result: {},
) -> tuple[T, list[Note]]:
    """The result of `run`, if it raised on no rank and gave the same signature on all, and the
    notes that `note_of` makes of the results of all ranks, in rank order."""
    try:
        signature, result = run()
        note = note_of(result)
    except Exception as error:
        with suppress(ExchangeError):  # the others have it from this rank, and this one its own
            comm.agree((("outcome", sentence(error)),), timeout, op)
        raise
    notes = comm.agree((("outcome", "success"), *signature), timeout, op, note)
    return result, notes


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
