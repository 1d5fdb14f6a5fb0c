# SPDX-License-Identifier: BSD-3-Clause
"""Every rank stores its state into every GPU's memory, and one kernel does the rest
(csrc/cuda/one_shot.cuh): for ranks of one node whose GPUs reach one another."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from .link import Link
from .state import Message
from .strategy import Exchange, Setting

# Those of csrc/cuda/one_shot.cuh.
MAX_WORLD_SIZE = 16
ALIGNMENT = 16  # bytes, of every row, also of results with 16 bits
HEAD_DIM_MULTIPLE = ALIGNMENT // 2
_MAX_BLOCKS = 32
_FLAG_BYTES = 8 * 2 * _MAX_BLOCKS * MAX_WORLD_SIZE
_TIMEOUT, _ABORTED, _ERRORS = 0, 1, 2  # words of host memory
_REASONS = {
    1: "did not come in time",
    2: "exchanged a state of another size",
    3: "was waited for when this rank was aborted",
}
# Beyond, ranks should rather merge a part each. Memory that captured graphs hold never grows.
SLOT_BYTES = 2 << 20


class Memory:
    """What a rank has for the exchange, on the device and on the host; made once.

    Launches of a rank are ordered by its stream, or by whoever uses several.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[int],
        device: torch.device,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """`addresses`: of all ranks' buffers of `buffer_bytes`, zeros at first, as this device sees
        them."""
        self.rank, self.device, self.slot_bytes = rank, device, slot_bytes
        with torch.inference_mode(False):  # or nobody could write to them outside of it
            self._buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
            self._control = torch.zeros(4, dtype=torch.int32, device=device)
            self._host = torch.zeros(
                _ERRORS + MAX_WORLD_SIZE, dtype=torch.int64, pin_memory=device.type == "cuda"
            )
        # Reading and writing them is no operation of torch: a capture does not see it.
        self._words = self._host.numpy()

    @property
    def world_size(self) -> int:
        return self._buffers.numel()

    def run(self, state: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], seconds: float) -> None:
        """Merges all ranks' states into `out`; a rank is waited for so long.

        The limit is that of the last call, also for captured launches that are replayed.
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
        """Ends waits. From any thread."""
        self._words[_ABORTED] = 1


def buffer_bytes(world_size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Of each rank's buffer."""
    return _FLAG_BYTES + 2 * world_size * slot_bytes


def refusal(message: Message, slot_bytes: int = SLOT_BYTES) -> str:
    """Why such a state is not exchanged in this way, or nothing."""
    if message.head_dim % HEAD_DIM_MULTIPLE:
        return f"head_dim {message.head_dim} is no multiple of {HEAD_DIM_MULTIPLE}"
    num_bytes = message.num_rows * message.head_dim * message.dtype.itemsize
    num_bytes += -(-4 * message.num_rows // ALIGNMENT) * ALIGNMENT  # of lse
    if num_bytes > slot_bytes:
        return f"a state of {num_bytes} bytes is larger than {slot_bytes}"
    return ""


def prepare(setting: Setting) -> Exchange:
    link, state, memory = setting.link, setting.state, setting.memory
    assert memory is not None
    if memory.device != state.device:
        raise RuntimeError(f"one_shot was set up on {memory.device}, not on {state.device}")

    def exchange(deadline: float, o: Tensor, lse: Tensor) -> None:
        memory.check()
        memory.run((state.o, state.lse), (o, lse), deadline - time.monotonic())
        link.num_operations += 1
        link.bytes_sent += (link.world_size - 1) * state.send.nbytes

    return exchange


def obstacle(link: Link, device: torch.device) -> str:
    """Why this rank cannot take part, as far as it knows by itself."""
    if device.type != "cuda":
        return f"tensors are on the {device.type}, not in the memory of a GPU"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("tree_attention::one_shot", "CUDA"):
        return "the extension is built without CUDA"
    if link.world_size > MAX_WORLD_SIZE:
        return f"{link.world_size} ranks are more than {MAX_WORLD_SIZE}"
    return ""
