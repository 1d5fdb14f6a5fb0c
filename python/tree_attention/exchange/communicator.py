# SPDX-License-Identifier: BSD-3-Clause
"""A process group prepared for exchanges: their buffers, and how they are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import merge_states
from .agreement import Disagreement, Note, Signature
from .costs import CostModel, choose, costs_for, measured_costs
from .costs import explain as explain_costs
from .self_test import merge_digest
from .session import Session
from .slices import Slices
from .state import State, StateBuffers
from .strategies import STRATEGIES, check_options
from .strategy import Exchange, Setting
from .topology import Topology, node_name
from .traffic import Case

DEFAULT_TIMEOUT = 30.0

_of_group: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()


class Communicator(Session):
    """A process group that merges partial states.

        o, lse = comm.send_state(batch, num_heads_q, seqlen_q, head_dim, q.device)
        lean_decode(q, k_local, v_local, key_ranges, out=(o, lse))
        o, lse = comm.exchange(o, lse, out_dtype=q.dtype)       # on every rank the same bits

    Calls are collective: the same calls in the same order on every rank, one at a time. After a
    rank was lost or stalled, every further call raises at once and the group can be used no more.

    Args:
        group: the process group, by default the world; a world of one where torch.distributed
            is not initialised.
        timeout: seconds in which a call returns or raises, whatever the group's own timeout.
        nodes: the node of each rank, in rank order, as anything that is equal for ranks of a node.
            By default ranks of one torchrun agent on one host share a node; the environment
            variable TREE_ATTENTION_NODE overrides that for a process.
        costs: constants by which "auto" chooses, by default those of the file that
            TREE_ATTENTION_COSTS names (see `python -m tree_attention calibrate`) if it was measured
            over this backend, else shipped ones. Equal on all ranks.

    Attributes:
        rank, world_size: of this process in the group.
        topology: which ranks share a node. Known, unless given, after the first call.
        failed: None, or why this communicator can no longer be used.
        bytes_sent, seconds: what this rank has sent, and how long its host has waited for it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        nodes: Sequence[object] | None = None,
        costs: CostModel | None = None,
    ) -> None:
        group = _resolve_group(group)
        super().__init__(group, timeout, {"node": node_name()})
        if nodes is not None and len(nodes) != self.world_size:
            raise ValueError(
                f"nodes must name the node of each of {self.world_size} ranks, got {list(nodes)}"
            )
        self._nodes = nodes if nodes is None else Topology.of(nodes).nodes
        self.topology = Topology(self._nodes or (0,) * self.world_size)
        self._costs = measured_costs() if costs is None and group is not None else costs
        self._buffers = StateBuffers()
        self._scratch: dict[tuple[int, torch.device], Tensor] = {}
        self._is_loading = False
        self._obstacles: dict[str, dict[str, str]] = {}  # by kind of device
        self._unavailable: dict[str, str] = {}

    @property
    def bytes_sent(self) -> int:
        return self.link.bytes_sent if self.world_size > 1 else 0

    @property
    def seconds(self) -> float:
        return self.link.seconds if self.world_size > 1 else 0.0

    def state(
        self,
        shape: torch.Size | tuple[int, ...],
        device: torch.device,
        payload_dtype: torch.dtype = torch.float32,
    ) -> State:
        """The message buffer of an `o` of `shape`, valid until the next exchange."""
        return self._buffers.get(torch.Size(shape), payload_dtype, device)

    def scratch(self, index: int, num_bytes: int, device: torch.device) -> Tensor:
        """Bytes to receive into, kept for the next call; growing moves them."""
        buffer = self._scratch.get((index, device))
        if buffer is None or buffer.numel() < num_bytes:
            self._scratch.pop((index, device), None)  # give back before taking more
            with torch.inference_mode(False):
                buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._scratch[index, device] = buffer
        return buffer

    def send_state(
        self,
        batch: int,
        num_heads_q: int,
        seqlen_q: int,
        head_dim: int,
        device: torch.device | str = "cpu",
        payload_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """Views `(o, lse)` of the send buffer, for the kernel to write into.

        `o [batch, num_heads_q, seqlen_q, head_dim]` in the payload's dtype, float32 `lse [batch,
        num_heads_q, seqlen_q]`, with the head_dim of `v`. Undefined after the exchange.
        """
        if self._is_loading:  # the last state never came to its exchange
            self.give_up_call()
        self._is_loading = True
        shape = (batch, num_heads_q, seqlen_q, head_dim)
        state = self.state(shape, torch.device(device), payload_dtype)
        return state.o, state.lse

    def exchange(
        self,
        o: Tensor,
        lse: Tensor,
        strategy: str = "auto",
        out_dtype: torch.dtype | None = None,
        *,
        payload_dtype: torch.dtype = torch.float32,
        head_sharded: bool = False,
        explain: bool = False,
        timeout: float | None = None,
        signature: Signature = (),
    ) -> tuple[Tensor, Tensor]:
        """Merges this rank's state with those of all other ranks.

        Equivalent PyTorch, up to rounding::

            lse = torch.stack(all_gather(lse)).logsumexp(0)
            o = sum((lse_r - lse).exp()[..., None] * o_r for o_r, lse_r in all_gathered_states)

        Args:
            o: `[batch, num_heads_q, seqlen_q, head_dim]`; copied unless it is `send_state`'s.
            lse: float32 `[batch, num_heads_q, seqlen_q]`; `-inf` is empty, whatever its `o`.
            strategy: "auto" or one of `strategies()`.
            out_dtype: of the merged `o`, default `o`'s. Arithmetic is float32.
            payload_dtype: in which each rank's `o` travels: float32, or bfloat16 to halve the
                bytes, where every rank, also its own, sees the rounded copy. lse stays float32.
            head_sharded: return to each rank its heads only, `torch.chunk(o, world_size, 1)[rank]`
                or nothing for the last ranks if there are too few; saves the second phase.
            explain: print on rank 0 what each strategy was predicted to take.
            timeout: seconds, default the communicator's.
            signature: further `(name, value)` pairs that must be equal on all ranks.

        Returns:
            o and the float32 lse on every rank; `(0, -inf)` where all states are empty.

        Raises:
            ValueError: no such strategy, options it has not, or shapes or dtypes break the rules
                above. Nothing was sent; ranks that did send run into their timeout.
            ExchangeError: a rank was lost, stalled, or called with other arguments.
        """
        try:
            check_options(strategy, payload_dtype, head_sharded)
            state = self._load(o, lse, payload_dtype)
        except BaseException:
            self.give_up_call()
            raise
        dtype = o.dtype if out_dtype is None else out_dtype

        def run(deadline: float) -> tuple[Tensor, Tensor]:
            options = (strategy, dtype, head_sharded)
            if explain or options not in state.prepared:
                state.prepared[options] = self._prepare(state, *options, explain)
            o, lse = self._outputs(state, dtype, head_sharded)
            state.prepared[options](deadline, o, lse)
            return o, lse

        if self.world_size == 1:
            return merge_states(state.o[None], state.lse[None], out_dtype=dtype)
        fields = (
            *signature,
            ("strategy", strategy),
            ("batch, num_heads_q, seqlen_q, head_dim", o.shape),
            ("out_dtype", dtype),
            ("payload_dtype", payload_dtype),
            ("head_sharded", head_sharded),
            ("device", o.device.type),
            ("result of a test merge, as this processor rounds it,", merge_digest(o.device)),
        )
        return self.call(
            fields, run, timeout, o.device, {"obstacles": self._own_obstacles(o.device)}
        )

    def backend(self, device: torch.device) -> str:
        """What moves the tensors of `device`, perhaps through the memory of another."""
        return self.link.backend(self.link.transport_device(device))

    def costs(self, device: torch.device) -> CostModel:
        """What "auto" goes by for tensors of `device`."""
        return costs_for(self.backend(device), self._costs)

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Strategies that a rank could not take part in at the last exchange, and why."""
        return self._unavailable

    def give_up_call(self) -> None:
        self._is_loading = False
        super().give_up_call()

    def _constants(self) -> Signature:
        costs = "shipped" if self._costs is None else self._costs.digest
        return ("nodes", self._nodes), ("costs", costs)

    def _learn(self, notes: Sequence[Note]) -> None:
        if self._nodes is None:
            self.topology = Topology.of([note["node"] for note in notes])
        self._unavailable = {
            strategy: f"rank {rank}: {reason}"
            for rank, note in enumerate(notes)
            for strategy, reason in note.get("obstacles", {}).items()
        }

    def _own_obstacles(self, device: torch.device) -> dict[str, str]:
        """The strategies in which this rank cannot take part, and why."""
        if device.type not in self._obstacles:
            reasons = {name: way.obstacle(self.link, device) for name, way in STRATEGIES.items()}
            self._obstacles[device.type] = {name: why for name, why in reasons.items() if why}
        return self._obstacles[device.type]

    def _prepare(
        self,
        state: State,
        strategy: str,
        out_dtype: torch.dtype,
        head_sharded: bool,
        explain: bool,
    ) -> Exchange:
        if state.message.num_bytes == 0:
            return lambda deadline, o, lse: None
        backend = self.backend(state.device)
        case = Case(self.topology, state.message, out_dtype, head_sharded, backend)
        costs = self.costs(state.device)
        if strategy == "auto":
            strategy = choose(case, costs, self._unavailable)
        if strategy in self._unavailable:
            raise Disagreement(f"{strategy} is not available: {self._unavailable[strategy]}")
        if explain and self.rank == 0:
            print(explain_costs(case, costs, strategy, self._unavailable), flush=True)
        setting = Setting(self.link, self.topology, state, out_dtype, head_sharded)
        # Views that are made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            return STRATEGIES[strategy].prepare(setting)

    def _outputs(
        self, state: State, out_dtype: torch.dtype, head_sharded: bool
    ) -> tuple[Tensor, Tensor]:
        """What an exchange is to write into."""
        batch, num_heads, seqlen_q, head_dim = state.o.shape
        if head_sharded:
            num_heads = Slices.of_heads(state.message, self.world_size).count_in(self.rank)
        shape = (batch, num_heads, seqlen_q)
        return state.o.new_empty((*shape, head_dim), dtype=out_dtype), state.lse.new_empty(shape)

    def _load(self, o: Tensor, lse: Tensor, payload_dtype: torch.dtype) -> State:
        """The buffers with this rank's state in them."""
        if o.dim() != 4 or lse.shape != o.shape[:3] or lse.dtype != torch.float32:
            raise ValueError(
                "exchange: o must be [batch, num_heads_q, seqlen_q, head_dim] and lse float32 "
                f"[batch, num_heads_q, seqlen_q], got {list(o.shape)} and {lse.dtype} "
                f"{list(lse.shape)}"
            )
        if torch.is_grad_enabled() and (o.requires_grad or lse.requires_grad):
            raise ValueError(
                "exchange: o and lse must not require a gradient (inference only), got "
                "requires_grad=True; call it under torch.no_grad()"
            )
        state = self.state(o.shape, o.device, payload_dtype)
        if o.data_ptr() != state.o.data_ptr() or lse.data_ptr() != state.lse.data_ptr():
            state.o.copy_(o)
            state.lse.copy_(lse)
        self._is_loading = False
        return state


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
        elif (known := _of_group.get(group)) is not None:
            comm = known
        else:
            comm = _of_group[group] = Communicator(group)
    if timeout is not None:
        comm.timeout = timeout
    return comm


def _resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a process group that this process is in, got {group!r}")
    return group
