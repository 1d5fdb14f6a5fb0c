# SPDX-License-Identifier: BSD-3-Clause
"""The memory of an exchange: how states are laid out for kernel, network and merge, and buffers
that stay where they are."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_MAX_PREPARED = 64
# So much of the host's memory a communicator keeps for good: the messages of a state of 14 MiB over
# two ranks. Beyond it all is freed soon after calls that needed it (`Communicator._free_memory`).
MAX_KEPT_BYTES = 64 << 20
# A message ends in the id of the call, which its link writes and reads (`messages.Messages`).
CALL_ID_BYTES = 8
# The lse after an o of 16-bit values, and every further state in a row, begins at such an address.
_ALIGNMENT = 4


@dataclass(frozen=True)
class StateLayout:
    """Place of a state's rows in a buffer: first o, then lse, so that vectors of o are aligned."""

    shape: tuple[int, ...]  # of lse, `[batch, num_heads_q, seqlen_q]` or a slice of it
    head_dim: int
    dtype: torch.dtype  # of o; lse is always float32

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape)

    @property
    def o_bytes(self) -> int:
        size = self.num_rows * self.head_dim * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    @property
    def num_bytes(self) -> int:
        return self.o_bytes + 4 * self.num_rows

    @property
    def message_bytes(self) -> int:
        """Size in bytes of a message with such a state, its call id included."""
        return self.num_bytes + CALL_ID_BYTES

    def views(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Views `o` and `lse` of the bytes `[..., at least num_bytes]` of one state or of many."""
        rows = (*memory.shape[:-1], *self.shape)
        if self.num_bytes == 0:  # a view of no bytes may have any strides
            o = memory.new_empty((*rows, self.head_dim), dtype=self.dtype)
            return o, memory.new_empty(rows, dtype=torch.float32)
        o_size = self.num_rows * self.head_dim * self.dtype.itemsize
        o = memory[..., :o_size].view(self.dtype)
        lse = memory[..., self.o_bytes : self.num_bytes].view(torch.float32)
        return o.view(*rows, self.head_dim), lse.view(rows)


@dataclass(frozen=True)
class Slices:
    """A state cut into one slice for each of some ranks: runs of rows, or of heads.

    `count` rows or heads are cut as `torch.tensor_split` cuts: the first `count % num_slices`
    slices have one more than the others, and the others are padded to the same size.
    """

    layout: StateLayout  # of one padded slice, its shape `[batch, size, ...]`
    num_slices: int
    count: int

    @staticmethod
    def of(layout: StateLayout, num_slices: int, by_head: bool = False) -> "Slices":
        batch, count, *rest = layout.shape if by_head else (1, layout.num_rows)
        shape = (batch, -(-count // num_slices), *rest)
        return Slices(replace(layout, shape=shape), num_slices, count)

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the messages of all padded slices."""
        return self.num_slices * self.layout.message_bytes

    def to(self, dtype: torch.dtype) -> "Slices":
        """The same slices with another dtype of o."""
        return replace(self, layout=replace(self.layout, dtype=dtype))

    def rows_of(self, memory: Tensor) -> Tensor:
        """`memory` as one message for each slice."""
        return memory.view(self.num_slices, self.layout.message_bytes)

    def pairs(self, memory: Tensor, state: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Pairs of equally shaped views, the first of `memory`'s slices and the second of `state`,
        which together cover the state `(o, lse)`."""
        result = []
        size, num_long = self.count // self.num_slices, self.count % self.num_slices
        split = num_long * (size + 1)
        for slices, whole in zip(self.layout.views(memory), state, strict=True):
            # [batch, count, ...]; rows of all sequences and heads are one run.
            whole = whole.view(self.layout.shape[0], self.count, *slices.shape[3:])
            if num_long:
                place = whole[:, :split].unflatten(1, (num_long, size + 1))
                result.append((slices[:num_long].transpose(0, 1), place))
            if size:
                place = whole[:, split:].unflatten(1, (self.num_slices - num_long, size))
                result.append((slices[num_long:, :, :size].transpose(0, 1), place))
        return result


def share(count: int, num_slices: int, index: int) -> int:
    """Number of `count` things that slice `index` has, as `torch.tensor_split` divides them."""
    return count // num_slices + (index < count % num_slices)


class Arena:
    """Named memory that stays for the next call.

    A device's never moves and is never freed, because captured graphs may hold its addresses.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, torch.device], Tensor] = {}
        self._outgrown: list[Tensor] = []  # of devices
        self.num_outgrown = 0
        self.host_bytes = 0

    def bytes(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        """The first bytes of a block, which every user of the name shares."""
        block = self._blocks.get((name, device))
        if block is None or block.numel() < num_bytes:
            capacity = num_bytes
            if block is not None:
                self.num_outgrown += 1
                if device.type != "cpu":
                    self._outgrown.append(block)
                # Doubling bounds the outgrown memory by the memory in use.
                capacity = max(num_bytes, 2 * block.numel())
            if device.type == "cpu":
                self.host_bytes += capacity - (0 if block is None else block.numel())
            with torch.inference_mode(False):  # or nobody could write to it outside of it
                # Zeros, because padding travels too.
                block = torch.zeros(capacity, dtype=torch.uint8, device=device)
            self._blocks[name, device] = block
        return block[:num_bytes]

    def free_host(self) -> None:
        """Gives the host's memory back, except blocks that a view still uses."""
        self._blocks = {key: x for key, x in self._blocks.items() if key[1].type != "cpu"}
        self.host_bytes = 0


class Prepared(Generic[T]):
    """Objects made once for each kind of call, and the memory that all of them share."""

    def __init__(self, forget: Callable[[T], object] = lambda made: None) -> None:
        """`forget` breaks the circles of an object, so that its memory goes with its last use."""
        self.arena = Arena()
        self._made: dict[Hashable, T] = {}
        self._num_outgrown = 0  # when they were made
        self._forget = forget

    def get(self, kind: Hashable, make: Callable[[], T]) -> T:
        arena = self.arena
        made = self._made.get(kind) if self._num_outgrown == arena.num_outgrown else None
        if made is None:
            # Views that are made in inference mode cannot be written to outside of it.
            with torch.inference_mode(False):
                made = make()
            if len(self._made) >= _MAX_PREPARED or self._num_outgrown != arena.num_outgrown:
                self._clear()  # their views may be of outgrown memory, which they keep
                self._num_outgrown = arena.num_outgrown
            self._made[kind] = made
        return made

    def free_host(self) -> None:
        """Forgets what was prepared, and gives the host's memory back."""
        self._clear()
        self.arena.free_host()

    def _clear(self) -> None:
        for made in self._made.values():
            self._forget(made)
        self._made.clear()


@dataclass(frozen=True)
class State:
    """This rank's state in its send buffer, and the exchanges that were prepared for it."""

    layout: StateLayout
    device: torch.device
    send: Tensor  # the message
    o: Tensor  # [batch, num_heads_q, seqlen_q, head_dim], a view of send
    lse: Tensor  # float32 [batch, num_heads_q, seqlen_q], a view of send
    arena: Arena
    # What was prepared for it: exchanges by their options, rings by the kind of their calls.
    prepared: dict[Any, Any] = field(default_factory=dict)

    def load(self, o: Tensor, lse: Tensor) -> None:
        """Copies a state into the send buffer. The state may be other views of that buffer."""
        begin = self.send.data_ptr()
        end = begin + self.send.untyped_storage().nbytes()
        if any(begin <= x.data_ptr() < end for x in (o, lse)):
            o, lse = o.clone(), lse.clone()
        self.o.copy_(o)
        self.lse.copy_(lse)

    def buffer(self, name: str, num_bytes: int) -> Tensor:
        return self.arena.bytes(name, num_bytes, self.device)

    def parts(self, num_parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room for `num_parts` such states: messages `[num_parts, ...]` and views of o and lse."""
        num_bytes = self.layout.message_bytes
        memory = self.buffer("parts", num_parts * num_bytes).view(num_parts, num_bytes)
        return memory, *self.layout.views(memory)


class StateBuffers:
    """States of any shape, in memory that they share."""

    def __init__(self) -> None:
        # What is prepared for a state has it, and the state has what is prepared for it.
        self.prepared: Prepared[State] = Prepared(lambda state: state.prepared.clear())

    def get(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> State:
        """The state of an `o` of `shape` and `dtype`."""
        return self.prepared.get((shape, dtype, device), lambda: self._make(shape, dtype, device))

    def _make(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> State:
        layout, arena = StateLayout(tuple(shape[:-1]), shape[-1], dtype), self.prepared.arena
        # Views that are made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            send = arena.bytes("send", layout.message_bytes, device)
            return State(layout, device, send, *layout.views(send), arena)


def host_memory(num_bytes: int) -> Tensor:
    """New bytes of host memory, page-locked where there is a device to copy to."""
    with torch.inference_mode(False):  # or nobody could write to it outside of it
        pin = torch.cuda.is_available()
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
