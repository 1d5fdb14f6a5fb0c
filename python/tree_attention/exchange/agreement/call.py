# SPDX-License-Identifier: BSD-3-Clause
"""The calls of a process group: in turn, agreed upon by all ranks, and ended in time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..auto.choose import CostTable, measured_costs
from ..auto.setup import Resources
from ..errors import ExchangeError, OtherCall
from ..notes import Note, Signature
from ..options import check_timeout, resolve_group
from ..transport.messages import SAME
from ..transport.process_group import Link
from ..transport.topology import Topology, node_name
from .one_thread import Turn, turn_of
from .queries import Queries
from .session import Door, Session

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
        self._turn = Turn() if group is None else turn_of(group)
        self.rank, self.world_size = (0, 1) if group is None else (group.rank(), group.size())
        if nodes is not None and len(nodes) != self.world_size:
            raise ValueError(
                f"Communicator: nodes must name the node of each of {self.world_size} ranks, got "
                f"{list(nodes)}"
            )
        self._nodes = None if nodes is None else Topology.of(nodes).nodes
        self.topology = Topology(self._nodes or (0,) * self.world_size)
        self._resources = Resources()
        self._session: Session | None = None
        self._costs: CostTable | None = None
        if group is not None and self.world_size > 1:
            self._turn.check_process("Communicator")  # whose session the parent would count
            self._costs = measured_costs()  # before the session, which ranks count
            note = {"node": node_name()}
            self._session = Session(group, note, self._resources.abort, self.timeout)
        # What must be equal on all ranks in every call.
        digest = "shipped" if self._costs is None else self._costs.digest
        self._constants: Signature = (("nodes", self._nodes), ("exchange costs", digest))
        self._queries = Queries()
        # Whether the messages of the last call that ranks agreed upon are in the host's memory.
        self._is_on_host = False
        # The thread that has the views of a send_state whose exchange is still to come.
        self._loading: threading.Thread | None = None

    @property
    def link(self) -> Link:
        """The operations of the group, of which there are none in a world of one."""
        return self._session_of_several.link

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
            raise ValueError("Communicator: a world of one rank sends nothing and has no link")
        return self._session

    def agree(
        self,
        signature: Signature,
        timeout: float | timedelta | None = None,
        op: str = "agree",
        note: Note | None = None,
    ) -> list[Note]:
        """Raises ExchangeError on every rank, naming rank and field, unless all are equal.

        Returns:
            The notes of all ranks, which may differ, in rank order.
        """
        if self._session is None:
            return [note or {}]
        session = self._session
        with self.turn(op):
            with self.before_call():
                seconds = self.seconds_of(op, timeout)
            self._abandon_loaded_state()
            whole = self._whole(op, signature)

            def knock_and_compare(deadline: float) -> list[Note]:
                session.knock(deadline)
                return session.compare(whole, deadline, note)

            notes = session.before_deadline(knock_and_compare, seconds)
            self._learn(notes)
            return notes

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
            self._session.before_deadline(lambda deadline: self._resources.check(), self.timeout)

    def turn(self, op: str, name: str | None = None) -> AbstractContextManager[None]:
        """Surrounds `op`, in which no other thread may use the group (see `Turn.take`).

        In a world of one, which sends nothing, threads need no turn.
        """
        return nullcontext() if self._session is None else _InTurn(self, op, name)

    def _take_turn(self, op: str, name: str | None) -> None:
        self._turn.take(op, name)
        try:
            self._refuse_views_of_others(op)
        except BaseException:
            self._turn.give_back()
            raise

    def _refuse_views_of_others(self, op: str) -> None:
        loading, caller = self._loading, threading.current_thread()
        if loading is not None and loading is not caller and loading.is_alive():
            raise ExchangeError(
                f"{op}: thread {caller.name!r} called while thread {loading.name!r} has the views "
                "of send_state, which this call would overwrite; give each thread a process group "
                "of its own"
            )

    def seconds_of(self, op: str, timeout: float | timedelta | None) -> float:
        """The seconds that an argument `timeout` of `op` stands for."""
        return self.timeout if timeout is None else check_timeout(op, timeout)

    def call(
        self,
        op: str,
        signature: Signature,
        run: Callable[[float], T],
        seconds: float | None = None,
        device: torch.device | None = None,
        *,
        door: Door | None = None,
        queries: Sequence[Tensor] = (),
    ) -> T:
        """`run(deadline)` once all ranks are known to run the same; any error in it is final.

        `signature` names the kind of `device`. The first call with tensors of a kind of device
        tests how messages are delivered there, and sets up the strategies that need it.

        Args:
            door: sends and receives what `run` does, up to the first message that shows every rank
                the seals of all. It runs after this call, for ranks that repeat it when this one
                does not. Without a door the next call compares signatures, even if it is the same.
            queries: tensors with the same values on every rank, which host tensors have to prove.
        """
        session, link = self._session_of_several, self.link

        def agree_and_run(deadline: float) -> T:
            whole = self._whole(op, signature)
            notes = session.agree(whole, deadline)
            if notes is not None:
                self._learn(notes)
                self._is_on_host = device is None or link.transport_device(device).type == "cpu"
                if device is not None and not self._resources.are_known(device):
                    if self._is_on_host and link.shared_memory is None:
                        session.share_memory(self.topology, deadline)
                    session.test_delivery(device, deadline)
                    gather = session.gather(deadline)
                    self._resources.set_up(link, device, self.topology, gather, deadline)
            session.leave_open(door if self._is_on_host else None, is_repeatable=door is not None)
            link.seal = seal = self._queries.seal(queries)
            with suppress(OtherCall):
                result = run(deadline)
                if link.seal == seal:
                    return result
            notes = session.compare(whole, deadline, self._queries.note(queries))
            self._queries.check(notes)
            # They differ by rounding, and from now on they are not compared.
            link.seal = SAME
            return run(deadline)

        with self.turn(op):
            self._abandon_loaded_state()
            return session.before_deadline(agree_and_run, seconds or self.timeout)

    def unavailable(self, device: torch.device) -> Mapping[str, str]:
        """Strategies that cannot be used with tensors of `device`, and why; known after a call."""
        return self._resources.unavailable(device)

    def abandon_call(self) -> None:
        """Notes that this rank stopped on the way to a call (see `Session.abandon`)."""
        self._loading = None
        if self._session is not None:
            self._session.abandon()

    def before_call(self) -> AbstractContextManager[None]:
        """Surrounds what this rank does on the way to a call; an error there abandons the call."""
        return _BeforeCall(self)

    def _whole(self, op: str, signature: Signature) -> Signature:
        """All that must be equal on all ranks in a call of `op`."""
        return (
            ("call", op),
            ("name of the calling thread", self._turn.name),
            *signature,
            *self._constants,
        )

    def _learn(self, notes: Sequence[Note]) -> None:
        if self._nodes is None:
            self.topology = Topology.of([str(note.get("node")) for note in notes])

    def _abandon_loaded_state(self) -> None:
        if self._loading is not None:  # a state of send_state never came to its exchange
            self.abandon_call()


# Classes, because every call enters several, and generators take three times as long.


class _InTurn(AbstractContextManager[None]):
    def __init__(self, calls: Calls, op: str, name: str | None) -> None:
        self._calls, self._op, self._name = calls, op, name

    def __enter__(self) -> None:
        self._calls._take_turn(self._op, self._name)

    def __exit__(self, *error: object) -> None:
        self._calls._turn.give_back()


class _BeforeCall(AbstractContextManager[None]):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._calls.abandon_call()
