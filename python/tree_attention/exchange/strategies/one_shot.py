# SPDX-License-Identifier: BSD-3-Clause
"""Every rank stores its state into every GPU's memory, and one kernel waits and merges.

For ranks of one host whose GPUs reach one another (csrc/cuda/one_shot has the kernel's protocol).
"""

import time

import torch
from torch import Tensor

from ..notes import Gather
from ..transport.process_group import Link
from ..transport.symmetric_memory import (
    ALIGNMENT,
    MAX_WORLD_SIZE,
    SLOT_BYTES,
    SymmetricMemory,
    connect,
)
from . import Context, Exchange, StateLayout, Strategy, Topology, all_gather

HEAD_DIM_MULTIPLE = ALIGNMENT // 2


def refusal(layout: StateLayout) -> str:
    if layout.head_dim % HEAD_DIM_MULTIPLE:
        return f"head_dim {layout.head_dim} is no multiple of {HEAD_DIM_MULTIPLE}"
    num_bytes = layout.num_rows * layout.head_dim * layout.dtype.itemsize
    num_bytes += -(-4 * layout.num_rows // ALIGNMENT) * ALIGNMENT  # of lse
    if num_bytes > SLOT_BYTES:
        return f"a state of {num_bytes} bytes is larger than {SLOT_BYTES}"
    return ""


def set_up(
    link: Link, device: torch.device, topology: Topology, gather: Gather, deadline: float
) -> SymmetricMemory | str:
    if device.type != "cuda":
        return f"tensors are on the {device.type}, not in the memory of a GPU"
    if link.world_size > MAX_WORLD_SIZE:
        return f"{link.world_size} ranks are more than {MAX_WORLD_SIZE}"
    obstacle = ""
    if not torch.cuda.is_available():
        obstacle = "there is no CUDA device"
    elif not torch._C._dispatch_has_kernel_for_dispatch_key("tree_attention::one_shot", "CUDA"):
        obstacle = "the extension is built without CUDA"
    return connect(link.group, device, topology, obstacle, gather, deadline)


def prepare(context: Context) -> Exchange:
    link, state, memory = context.link, context.state, context.resource
    assert memory is not None
    if memory.device != state.device:
        raise RuntimeError(f"one_shot was set up on {memory.device}, not on {state.device}")

    def exchange(deadline: float, o: Tensor, lse: Tensor) -> None:
        memory.check()
        memory.run((state.o, state.lse), (o, lse), deadline - time.monotonic())
        link.num_operations += 1
        link.bytes_sent += (link.world_size - 1) * state.layout.num_bytes

    return exchange


STRATEGY = Strategy(prepare, all_gather.traffic, set_up=set_up, refusal=refusal)
