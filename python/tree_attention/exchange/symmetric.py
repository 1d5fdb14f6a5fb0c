# SPDX-License-Identifier: BSD-3-Clause
"""Memory that the GPUs of a node share, from `torch.distributed._symmetric_memory`, whose interface
may change: whatever goes wrong with it is a reason to exchange in another way, and no error."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import merge_states
from . import one_shot
from .agreement import Note, call_before
from .topology import Topology

# All ranks call it together; it gives every rank what each of them says.
Gather = Callable[[str, Note], Sequence[Note]]

# Torch lets ranks share a GPU only where this is set.
OVERLAPPING_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
# In which GPUs of a node find each other, or do not.
_CONNECT_SECONDS = 10.0
_TEST_SECONDS = 5.0
_NUM_TEST_ROWS, _TEST_HEAD_DIM = 300, 64


def connect(
    group: dist.ProcessGroup,
    device: torch.device,
    topology: Topology,
    obstacle: str,
    gather: Gather,
    deadline: float,
) -> one_shot.Memory | str:
    """On all ranks alike: memory for `one_shot` that was tried out, or why there is none.

    `obstacle` is what this rank knows by itself.
    """
    rank, world_size = group.rank(), group.size()
    if topology.num_nodes > 1:
        return f"ranks are on {topology.num_nodes} nodes"

    def attempt(name: str, step: Callable[[], Any]) -> tuple[Any, str]:
        result, note = None, {}
        try:
            # In a thread, as it waits for others; what it leaves of the time is for other ways.
            now = time.monotonic()
            limit = now + min(_CONNECT_SECONDS, (deadline - now) / 2)
            result = call_before(limit, on_device(step))
        except Exception as error:  # of any kind: torch promises nothing
            first_line = (str(error) or repr(error)).splitlines()[0]
            note = {"reason": f"{name}: {first_line}"}
        notes = gather(f"one_shot, {name}", note)
        return result, first_reason(notes)

    def first_reason(notes: Sequence[Note]) -> str:
        reasons = (note.get("reason") for note in notes)
        return next((f"rank {r}: {reason}" for r, reason in enumerate(reasons) if reason), "")

    def on_device(step: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            # Both are a thread's own.
            with torch.cuda.device(device), torch.inference_mode(False):
                return step()

        return run

    note = {"reason": obstacle}
    if not obstacle:
        note["gpu"] = str(torch.cuda.get_device_properties(device).uuid)
        note["may share"] = os.environ.get(OVERLAPPING_VARIABLE, "")
    notes = gather("one_shot, devices", note)
    if reason := first_reason(notes):
        return reason
    if len({note["gpu"] for note in notes}) < world_size and not all(
        note["may share"] for note in notes
    ):
        return "ranks share a GPU"
    buffer, reason = attempt("allocation", lambda: _allocate(world_size, device))
    if reason:
        return reason
    handle, reason = attempt("rendezvous", lambda: _rendezvous(buffer, group))
    if reason:
        return reason
    memory = one_shot.Memory(rank, handle.buffer_ptrs, device, keep=(buffer, handle))
    _, reason = attempt("test", lambda: _try_out(memory))
    return reason or memory


def _allocate(world_size: int, device: torch.device) -> Tensor:
    from torch.distributed import _symmetric_memory

    num_bytes = one_shot.buffer_bytes(world_size)
    buffer: Tensor = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    buffer.zero_()
    torch.cuda.synchronize(device)  # before any other rank writes
    return buffer


def _rendezvous(buffer: Tensor, group: dist.ProcessGroup) -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(buffer, group.group_name)


def _try_out(memory: one_shot.Memory) -> None:
    """Exchanges in both parities, and compares with a merge of what the ranks must have sent."""
    torch.cuda.synchronize(memory.device)  # it was made on another thread's stream
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
