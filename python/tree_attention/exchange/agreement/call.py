# SPDX-License-Identifier: BSD-3-Clause
"""The calls of a process group: in turn, agreed upon by all ranks, and ended in time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..auto.choose import measured_costs
from ..auto.setup import Resources
from ..notes import ExchangeError, Note, OtherCall, Signature, sentence
from ..options import Timeout, check_timeout, resolve_group
from ..transport.direct import shared_memory, sockets
from ..transport.messages import SAME
from ..transport.process_group import Link
from ..transport.topology import Topology, node_name
from .one_thread import NoTurns, Turn, turn_of
from .queries import Queries, warn_of_rounding
from .session import Door, Session
from .signatures import CALLER

T = TypeVar("T")

DEFAULT_TIMEOUT = 30.0


class Calls:
    """A process group whose ranks make the same calls, of any kind: a `Communicator` without the
    exchanges. It agrees on them and bounds them in time."""

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
        # Rather than of a group of one rank that the caller made among others.
        self._is_of_no_group = group is None or (self.world_size == 1 and group is dist.group.WORLD)
        if nodes is not None and len(nodes) != self.world_size:
            raise ValueError(
                f"Communicator: nodes must name the node of each of {self.world_size} ranks, got "
                f"{list(nodes)}"
            )
        self._nodes = None if nodes is None else Topology.of(nodes).nodes
        self.topology = Topology(self._nodes or (0,) * self.world_size)
        self._resources = Resources()
        self._turn: Turn = NoTurns()
        self._session: Session | None = None  # in a world of one, which sends nothing
        if group is not None and self.world_size > 1:
            self._turn = turn_of(group)
            self._turn.check_process("Communicator")  # whose session the parent would count
            self._resources.costs = measured_costs()  # before the session, which ranks count
            note = {"node": node_name()}
            self._session = Session(group, note, self._resources.abort, self.timeout)
        # What must be equal on all ranks in every call.
        costs = self._resources.costs
        digest = "shipped" if costs is None else costs.digest
        self._constants: Signature = (("nodes", self._nodes), ("exchange costs", digest))
        self._queries = Queries()
        # Whether the messages of the last call that ranks agreed upon are in the host's memory.
        self._is_on_host = False

    @property
    def link(self) -> Link:
        """Operations of the group, of which there are none in a world of one."""
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
        """The one way into a collective call of `op`: `with comm.begin(op) as call: ... call.run`.

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
        self._turn.take(op, name)
        try:
            yield
        finally:
            self._turn.give_back()

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

    def abort(self, reason: str = "no reason given") -> None:
        """Ends the call under way, which raises ExchangeError, and refuses further ones.

        From any thread, any number of times. Other ranks fail when they wait for this one, and at
        their deadlines otherwise. Over NCCL, what was queued ends with the group's watchdog. In a
        forked child it raises ExchangeError, and the parent goes on.
        """
        self._turn.check_process("abort")  # or it would close the parent's connections
        if self._session is not None:
            self._session.fail(f"aborted: {reason}")

    def check(self) -> None:
        """Raises ExchangeError if an exchange is known to have failed. Waits for nothing.

        With "one_shot" GPUs wait for each other without the host, whose next call or check has the
        error; until then there is NaN for o and lse, also from replayed graphs.
        """
        self._turn.check_process("check")
        if self._session is not None:
            self._session.before_deadline(lambda deadline: self._resources.check(), self.timeout)

    def give_back(self) -> None:
        """Frees memory that is too much to keep, at the end of each call."""

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

    def abandon_call(self) -> None:
        """Notes that this rank stopped on the way to a call (see `Session.abandon`)."""
        if self._session is not None:
            self._session.abandon()

    def _set_up(self, session: Session, device: torch.device, deadline: float) -> None:
        """Collective: makes what calls with tensors of this kind of device need."""
        link = session.link

        def gather(step: str, note: Note) -> list[Note]:
            return session.compare((("step", step),), deadline, note)

        if self._is_on_host and link.shared_memory is None:
            link.shared_memory = memory = shared_memory.connect(self.rank, self.topology, gather)
            # The same on all ranks: either all nodes have such memory or none.
            if isinstance(memory, str) or self.topology.num_nodes > 1:
                near = () if isinstance(memory, str) else memory
                others = [r for r in range(self.world_size) if r != self.rank and r not in near]
                link.sockets = sockets.connect(self.rank, others, gather, deadline)
        session.test_delivery(device, deadline)
        self._resources.set_up(link, device, self.topology, gather, deadline)

    def _learn(self, notes: Sequence[Note]) -> None:
        if self._nodes is None:
            self.topology = Topology.of([str(note.get("node")) for note in notes])


class Call(AbstractContextManager["Call"]):
    """One collective call on its way: other threads stay out, and an error on the way abandons it.

    It has `seconds`, in which `run` returns or raises. A class, because every call enters one, and
    generators take three times as long.
    """

    def __init__(self, comm: Calls, op: str, timeout: Timeout) -> None:
        self.comm, self.op, self._timeout = comm, op, timeout

    def __enter__(self) -> "Call":
        if self.comm._session is None:
            self.comm.check_group("Communicator")
        self.comm._turn.take(self.op)
        self._is_on_the_way = True
        try:
            self.seconds = self.comm.seconds_of(self.op, self._timeout)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._is_on_the_way:
            self.comm.abandon_call()
        try:
            self.comm.give_back()
        finally:
            self.comm._turn.give_back()

    def run(
        self,
        signature: Signature,
        run: Callable[[float], T],
        device: torch.device | None = None,
        *,
        door: Door | None = None,
        queries: Sequence[Tensor] = (),
    ) -> T:
        """`run(deadline)` once all ranks are known to run the same; any error in it is final.

        `signature` names the kind of `device`. The first call with tensors of a kind of device
        tests how messages are delivered there, and sets up the strategies that need it.

        `door` sends and receives what `run` does, up to the first message that shows every rank the
        seals of all. It runs after this call, for ranks that repeat it when this one does not.
        Without a door the next call compares signatures, even if it is the same. `queries` have the
        same values on every rank, which host tensors have to prove.
        """
        comm, session, whole = self.comm, self.comm._require_session(), self._whole(signature)
        link = session.link
        # Values of a caller's own kinds are compared, and written, before the call begins: what
        # their methods raise inside it would end the communicator.
        is_agreed = whole == session.agreed
        texts = session.texts if is_agreed else _texts(whole)
        self._is_on_the_way = False

        def agree_and_run(deadline: float) -> T:
            if not is_agreed:
                comm._learn(session.agree(texts, deadline))
                session.agreed, session.texts = whole, texts
                comm._is_on_host = device is None or link.transport_device(device).type == "cpu"
                if device is not None and not comm._resources.are_known(device):
                    comm._set_up(session, device, deadline)
            session.door = door if comm._is_on_host else None
            if door is None:
                session.agreed = None
            link.seal = seal = comm._queries.seal(queries)
            with suppress(OtherCall):
                result = run(deadline)
                if link.seal == seal:
                    return result
            comm._queries.settle(session, texts, queries, deadline)
            link.seal = SAME
            return run(deadline)

        were_compared = comm._queries.are_compared
        result = session.before_deadline(agree_and_run, self.seconds)
        if comm._queries.are_compared != were_compared:
            warn_of_rounding()
        return result

    def compare(self, signature: Signature, note: Note | None = None) -> list[Note]:
        """`Calls.agree`, as this call."""
        session, whole = self.comm._session, _texts(self._whole(signature))
        self._is_on_the_way = False
        if session is None:
            return [note or {}]

        def knock_and_compare(deadline: float) -> list[Note]:
            session.knock(deadline)
            return session.compare(whole, deadline, note)

        notes = session.before_deadline(knock_and_compare, self.seconds)
        self.comm._learn(notes)
        return notes

    def _whole(self, signature: Signature) -> Signature:
        """All that must be equal on all ranks."""
        comm = self.comm
        return (
            ("call", self.op),
            (CALLER, comm._turn.name),
            *signature,
            *comm._constants,
        )


def _texts(signature: Signature) -> Signature:
    """The signature as ranks publish it."""
    return tuple((name, str(value)) for name, value in signature)


def on_every_rank(
    op: str,
    comm: Calls,
    timeout: float,
    run: Callable[[], tuple[Signature, T]],
    note_of: Callable[[T], Note] = lambda result: {},
) -> tuple[T, list[Note]]:
    """The result of `run`, if it raised on no rank and gave the same signature on all, and the
    notes that `note_of` makes of the results of all ranks, in rank order."""
    try:
        signature, result = run()
    except Exception as error:
        with suppress(ExchangeError):  # the others have it from this rank, and this one its own
            comm.agree((("outcome", sentence(error)),), timeout, op)
        raise
    notes = comm.agree((("outcome", "success"), *signature), timeout, op, note_of(result))
    return result, notes
