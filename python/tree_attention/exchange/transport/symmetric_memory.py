# SPDX-License-Identifier: BSD-3-Clause
"""Memory that the GPUs of a node share, for the strategy `one_shot`.

It comes from `torch.distributed._symmetric_memory`, whose interface may change: whatever goes wrong
with it is a reason to choose another strategy, and no error.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops import merge_states
from ..notes import Gather, Note, first_reason, sentence
from .deadlines import call_before, remaining
from .topology import Topology

T = TypeVar("T")

# The numbers of csrc/cuda/one_shot/one_shot.cuh.
MAX_WORLD_SIZE = 16
ALIGNMENT = 16  # of every row in bytes, also of results with 16 bits
_MAX_BLOCKS = 32
_FLAG_BYTES = 8 * 2 * _MAX_BLOCKS * MAX_WORLD_SIZE
_TIMEOUT, _ABORTED, _ERRORS = 0, 1, 2  # words of host memory
_REASONS = {
    1: "did not come in time",
    2: "exchanged a state of another size",
    3: "was waited for when this rank was aborted",
}
# Larger states are merged faster in slices. Memory that captured graphs hold never grows.
SLOT_BYTES = 2 << 20

# Torch lets ranks share a GPU only where this is set.
OVERLAPPING_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
# Seconds in which the GPUs of a node must have found each other, and have exchanged a test.
_CONNECT_SECONDS = 10.0
_TEST_SECONDS = 5.0
_NUM_TEST_ROWS, _TEST_HEAD_DIM = 300, 64

# Never given back: kernels of other ranks and captured graphs may use it after a communicator is
# gone, and torch would give it out again as memory that the ranks have shown each other already.
_kept: list[object] = []


class SymmetricMemory:
    """Addresses of all ranks' buffers, counters, and words that host and device share; made once.

    Launches of a rank are ordered by its stream, or by whoever uses several.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[int],
        device: torch.device,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """`addresses`: where this device sees each rank's buffer of `buffer_bytes` zeros."""
        self.rank, self.world_size = rank, len(addresses)
        self.slot_bytes = slot_bytes
        with torch.inference_mode(False):  # or nobody could write to them outside of it
            self._buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
            self.device = self._buffers.device  # with its index
            self._control = torch.zeros(4, dtype=torch.int32, device=device)
            self._host = torch.zeros(
                _ERRORS + MAX_WORLD_SIZE,
                dtype=torch.int64,
                device="cpu",
                pin_memory=device.type == "cuda",
            )
        # Reading and writing them is no operation of torch: a capture does not see it.
        self._words = self._host.numpy()

    def run(self, state: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], seconds: float) -> None:
        """Merges all ranks' states into `out`, waiting `seconds` for a rank at most.

        The last call's limit holds, also for captured launches that are replayed.
        """
        self._words[_TIMEOUT] = max(0, int(1e9 * seconds))
        torch.ops.tree_attention.one_shot(
            *state, self._buffers, self._control, self._host, self.rank, self.slot_bytes, *out
        )

    def check(self) -> None:
        """Raises RuntimeError if a launch is known to have failed. Waits for nothing."""
        errors = self._words[_ERRORS : _ERRORS + self.world_size].tolist()
        found = [f"rank {rank} {_REASONS[error]}" for rank, error in enumerate(errors) if error]
        if found:
            raise RuntimeError(f"one_shot: {', '.join(found)}; outputs of that call are NaN")

    def abort(self) -> None:
        """Ends waits on the device. From any thread."""
        self._words[_ABORTED] = 1


def buffer_bytes(world_size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Size in bytes of one rank's buffer."""
    return _FLAG_BYTES + 2 * world_size * slot_bytes


def connect(
    group: dist.ProcessGroup,
    device: torch.device,
    topology: Topology,
    obstacle: str,
    gather: Gather,
    deadline: float,
) -> SymmetricMemory | str:
    """Memory for `one_shot` that was tried out, or why there is none, the same on all ranks.

    `obstacle` is why this rank cannot take part as far as it knows by itself, or nothing.
    """
    world_size = group.size()
    if topology.num_nodes > 1:
        return f"ranks are on {topology.num_nodes} nodes"

    def everywhere(name: str, step: Callable[[float], T]) -> T | str:
        """Return `step(limit)` if it succeeds everywhere, or the reason why it does not."""
        note: Note = {}
        now = time.monotonic()
        # The rest of the time is left for other strategies.
        limit = now + min(_CONNECT_SECONDS, (deadline - now) / 2)

        def run() -> T:
            # Both are a thread's own.
            with torch.cuda.device(device), torch.inference_mode(False):
                return step(limit)

        try:
            result = call_before(limit, run, who="torch")  # which waits for others
        except Exception as error:  # of any kind: torch promises nothing
            note = {"reason": f"{name}: {sentence(error)}"}
        return first_reason(gather(f"one_shot, {name}", note)) or result

    note = {"reason": obstacle}
    if not obstacle:
        note["host"] = socket.gethostname()
        note["gpu"] = str(torch.cuda.get_device_properties(device).uuid)
        note["may share"] = os.environ.get(OVERLAPPING_VARIABLE, "")
    notes = gather("one_shot, devices", note)
    if reason := first_reason(notes):
        return reason
    # Torch sends file descriptors through sockets of a host and waits for them without end.
    if (num_hosts := len({note["host"] for note in notes})) > 1:
        return f"ranks are on {num_hosts} hosts"
    num_gpus = len({note["gpu"] for note in notes})
    if num_gpus < world_size and not all(note["may share"] for note in notes):
        return "ranks share a GPU"
    buffer = everywhere("allocation", lambda limit: _allocate(world_size, device))
    if isinstance(buffer, str):
        return buffer
    memory = everywhere("rendezvous", lambda limit: _rendezvous(buffer, group, limit))
    if isinstance(memory, str):
        return memory
    return everywhere("test", lambda limit: _try_out(memory))


def _allocate(world_size: int, device: torch.device) -> Tensor:
    from torch.distributed import _symmetric_memory

    num_bytes = buffer_bytes(world_size)
    buffer: Tensor = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    _kept.append(buffer)
    buffer.zero_()
    torch.cuda.synchronize(device)  # before any other rank writes
    return buffer


def _rendezvous(buffer: Tensor, group: dist.ProcessGroup, limit: float) -> SymmetricMemory:
    from torch.distributed import _symmetric_memory

    store = group.get_group_store()
    usual = store.timeout  # type: ignore[attr-defined]
    # Torch waits in the store for a rank that has failed in here, and keeps interpreter and store.
    store.set_timeout(remaining(limit))
    try:
        handle = _symmetric_memory.rendezvous(buffer, group.group_name)
    finally:
        store.set_timeout(usual)
    addresses, rank = list(handle.buffer_ptrs), group.rank()
    # Torch reports the base of the driver allocation, which may hold several buffers.
    if addresses[rank] != buffer.data_ptr():
        raise RuntimeError("the buffer does not begin where the memory does")
    if len(addresses) != group.size() or not all(addresses):
        raise RuntimeError("GPUs do not reach one another's memory")
    memory = SymmetricMemory(rank, addresses, buffer.device)
    _kept.append((handle, memory))
    return memory


def _try_out(memory: SymmetricMemory) -> SymmetricMemory:
    """Exchanges in both parities, and compares with a merge of what the ranks must have sent."""
    generator = torch.Generator().manual_seed(0)
    shape = (memory.world_size, _NUM_TEST_ROWS)
    o = torch.randn(*shape, _TEST_HEAD_DIM, generator=generator).to(memory.device)
    lse = torch.randn(shape, generator=generator).to(memory.device)
    for _ in range(3):
        expected = merge_states(o, lse)
        out = torch.empty_like(o[0]), torch.empty_like(lse[0])
        memory.run((o[memory.rank], lse[memory.rank]), out, _TEST_SECONDS)
        torch.cuda.synchronize(memory.device)
        memory.check()
        if not all(torch.equal(a, b) for a, b in zip(out, expected, strict=True)):
            raise RuntimeError("the result of a test exchange is wrong")
        o, lse = o.flip(1) / 2, lse.flip(1) / 2
    return memory
