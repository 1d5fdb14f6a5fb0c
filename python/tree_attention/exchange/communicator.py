# SPDX-License-Identifier: BSD-3-Clause
"""A process group prepared for exchanges: their buffers, and how they are chosen."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import merge_states
from .agreement import Note, Signature
from .chunks import Attention, Chunks, Forecast
from .costs import CostModel, measured_costs
from .overlap import Overlap
from .selection import Selection
from .self_test import merge_digest
from .session import Session
from .slices import Slices
from .state import State, StateBuffers
from .strategies import check_options
from .strategy import Options
from .topology import Topology, node_name

DEFAULT_TIMEOUT = 30.0


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
        group = resolve_group(group)
        world_size = 1 if group is None else group.size()
        if nodes is not None and len(nodes) != world_size:
            raise ValueError(
                f"nodes must name the node of each of {world_size} ranks, got {list(nodes)}"
            )
        if costs is None and group is not None:
            costs = measured_costs()
        super().__init__(group, timeout, {"node": node_name()})  # which ranks count
        self._nodes = nodes if nodes is None else Topology.of(nodes).nodes
        self.topology = Topology(self._nodes or (0,) * self.world_size)
        if group is not None:
            self._selection = Selection(self.link, costs)
        self._buffers = StateBuffers()
        self._chunk_buffers: defaultdict[int, StateBuffers] = defaultdict(StateBuffers)
        self._overlaps: dict[torch.device, Overlap] = {}
        self._is_overlapped = False  # the call that was agreed upon last
        self._attention_seconds = 0.0  # of the rank that takes longest
        self._scratch: dict[tuple[int, torch.device], Tensor] = {}
        self._is_loading = False

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
        device = torch.empty(0, device=device).device  # with an index, as exchange sees it
        state = self.state(shape, device, payload_dtype)
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
        with self.before_call():
            check_options(strategy, payload_dtype, head_sharded)
            state = self._load(o, lse, payload_dtype)
            dtype = o.dtype if out_dtype is None else out_dtype
            if self.world_size == 1:
                return merge_states(state.o[None], state.lse[None], out_dtype=dtype)
            options = Options(strategy, dtype, payload_dtype, head_sharded)
            outputs = self._outputs(state, options)
            fields = (*signature, *self._fields(state, options))
            note = {"obstacles": self._selection.obstacles(o.device)}
        self.call(
            fields,
            lambda deadline: self._exchange(state, options, outputs, deadline, explain),
            timeout,
            o.device,
            note,
        )
        return outputs

    def attend(
        self,
        attention: Attention,
        shape: tuple[int, int, int, int],
        device: torch.device,
        options: Options,
        *,
        overlap: bool | None = None,
        explain: bool = False,
        timeout: float | None = None,
        signature: Signature = (),
    ) -> tuple[Tensor, Tensor]:
        """Merges the state that `attention` computes with those of all other ranks.

        As `exchange`, in a world of several ranks and of an `o` of `shape`. Computed chunks are
        exchanged while others compute if `overlap` says so, by default where that is predicted to
        be faster. From the second call on: the first one compares signatures when all is computed,
        so that nothing was sent if `attention` raises. Each exchange has the whole timeout.
        """
        if self._is_loading:
            self.give_up_call()
        chunks = attention.chunks
        with self.before_call():
            state = self.state(shape, device, options.payload_dtype)
            outputs = self._outputs(state, options)
            fields = (*signature, ("overlap", overlap), *self._fields(state, options))
            is_new = fields != self._agreed
            is_overlapped = self._is_overlapped and not is_new and not explain
            if is_overlapped and attention.is_chunked:
                parts = [self._chunk(state, chunks, outputs, i) for i in range(len(chunks))]
            elif attention.is_chunked:
                for i in range(len(chunks)):
                    attention.run(i, (chunks.part(state.o, i), chunks.part(state.lse, i)))
            else:
                attention.run(None, (state.o, state.lse))
            note = {"obstacles": self._selection.obstacles(device), "attention": attention.seconds}
        if is_overlapped and attention.is_chunked:
            self._attend_overlapped(attention, parts, options, timeout)
            return outputs

        def run(deadline: float) -> None:
            if is_new or explain:
                self._is_overlapped = self._decide(state, chunks, options, overlap, explain)
            if not self._is_overlapped:
                self._exchange(state, options, outputs, deadline, explain)
                return
            for i in range(len(chunks)):
                part, merged = self._chunk(state, chunks, outputs, i)
                part.load(chunks.part(state.o, i), chunks.part(state.lse, i))
                self._exchange(part, options, merged, deadline, explain and i == 0)
                deadline = time.monotonic() + (self.timeout if timeout is None else timeout)

        self.call(fields, run, timeout, device, note)
        return outputs

    def _attend_overlapped(
        self,
        attention: Attention,
        parts: Sequence[tuple[State, tuple[Tensor, Tensor]]],
        options: Options,
        timeout: float | None,
    ) -> None:
        device = parts[0][0].device
        num_computed = 0

        def compute(i: int, part: State) -> None:
            nonlocal num_computed
            attention.run(i, (part.o, part.lse))
            num_computed += 1

        def exchange(part: State, merged: tuple[Tensor, Tensor]) -> None:
            self._until_deadline(partial(self._exchange, part, options, merged), timeout)

        def stop(error: BaseException) -> None:
            if num_computed == 0:
                self.give_up_call()
            else:  # the other ranks wait for the chunks that never come
                self._fail(f"interrupted by {error!r}")

        if device not in self._overlaps:
            host_waits = self.link.transport_device(device).type == "cpu"
            self._overlaps[device] = Overlap(device, host_waits)
        self._overlaps[device].run(
            [partial(compute, i, part) for i, (part, _) in enumerate(parts)],
            [partial(exchange, *part) for part in parts],
            stop,
        )

    def _chunk(
        self, state: State, chunks: Chunks, outputs: tuple[Tensor, Tensor], index: int
    ) -> tuple[State, tuple[Tensor, Tensor]]:
        """The buffers of a chunk, in memory of their own, and where its result belongs."""
        shape = chunks.part(state.o, index).shape
        part = self._chunk_buffers[index].get(shape, state.o.dtype, state.device)
        o, lse = (chunks.part(x, index) for x in outputs)
        return part, (o, lse)

    def _decide(
        self, state: State, chunks: Chunks, options: Options, overlap: bool | None, explain: bool
    ) -> bool:
        """Whether ranks exchange chunk by chunk: by numbers that all of them have."""
        if len(chunks) == 1 or (options.head_sharded and chunks.axis == 1):
            return False
        if overlap is not None and not explain:
            return overlap
        whole, chunk = (
            self._selection.seconds(message, state.device, self.topology, options)
            for message in (state.message, chunks.longest(state.message))
        )
        forecast = Forecast(len(chunks), self._attention_seconds, whole, chunk)
        chosen = forecast.pays(state.device) if overlap is None else overlap
        if explain and self.rank == 0:
            print(f"{forecast}: {'overlapped' if chosen else 'one exchange'}", flush=True)
        return chosen

    def _fields(self, state: State, options: Options) -> Signature:
        device = state.device
        return (
            ("strategy", options.strategy),
            ("batch, num_heads_q, seqlen_q, head_dim", state.o.shape),
            ("out_dtype", options.out_dtype),
            ("payload_dtype", options.payload_dtype),
            ("head_sharded", options.head_sharded),
            ("device", device.type),
            ("result of a test merge, as this processor rounds it,", merge_digest(device)),
        )

    def backend(self, device: torch.device) -> str:
        """What moves the tensors of `device`, perhaps through the memory of another."""
        return self._selection.backend(device)

    def costs(self, device: torch.device) -> CostModel:
        """What "auto" goes by for tensors of `device`."""
        return self._selection.costs(device)

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Strategies that a rank could not take part in at the last exchange, and why."""
        return self._selection.unavailable if self.world_size > 1 else {}

    def give_up_call(self) -> None:
        self._is_loading = False
        super().give_up_call()

    def _constants(self) -> Signature:
        return ("nodes", self._nodes), ("costs", self._selection.constants)

    def _learn(self, notes: Sequence[Note]) -> None:
        if self._nodes is None:
            self.topology = Topology.of([note["node"] for note in notes])
        if any("obstacles" not in note for note in notes):
            return  # not of an exchange
        self._selection.learn([note["obstacles"] for note in notes])
        self._attention_seconds = max(note.get("attention", 0.0) for note in notes)

    def check(self) -> None:
        """Raises ExchangeError if an exchange is known to have failed. Waits for nothing.

        With "one_shot" GPUs wait for each other without the host, whose next call or check has the
        error; until then there is NaN for o and lse, also from replayed graphs.
        """
        if self.world_size > 1:
            self._until_deadline(lambda deadline: self._selection.check(), None)

    def _fail(self, reason: str, patience: float = 0.0) -> None:
        self._selection.abort()
        super()._fail(reason, patience)

    def _test_delivery(self, device: torch.device, deadline: float) -> None:
        super()._test_delivery(device, deadline)
        if device.type != "cuda":
            return

        def gather(step: str, note: Note) -> Sequence[Note]:
            return self._agreement.reach((("step", step),), deadline, note)

        self._selection.share_memory(device, self.topology, gather, deadline)

    def _exchange(
        self,
        state: State,
        options: Options,
        outputs: tuple[Tensor, Tensor],
        deadline: float,
        explain: bool = False,
    ) -> None:
        if explain or options not in state.prepared:
            state.prepared[options] = self._selection.prepare(
                state, self.topology, options, explain
            )
        state.prepared[options](deadline, *outputs)

    def _outputs(self, state: State, options: Options) -> tuple[Tensor, Tensor]:
        """What an exchange is to write into."""
        batch, num_heads, seqlen_q, head_dim = state.o.shape
        if options.head_sharded:
            num_heads = Slices.of_heads(state.message, self.world_size).count_in(self.rank)
        shape = (batch, num_heads, seqlen_q)
        o = state.o.new_empty((*shape, head_dim), dtype=options.out_dtype)
        return o, state.lse.new_empty(shape)

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
            state.load(o, lse)
        self._is_loading = False
        return state


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a process group that this process is in, got {group!r}")
    return group
