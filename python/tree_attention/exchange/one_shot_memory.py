# SPDX-License-Identifier: BSD-3-Clause
"""What a rank has for `one_shot`: addresses of all ranks' buffers, counters, and words that host
and device share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Those of csrc/cuda/one_shot.cuh.
MAX_WORLD_SIZE = 16
ALIGNMENT = 16  # bytes, of every row, also of results with 16 bits
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
