# SPDX-License-Identifier: BSD-3-Clause
"""Every rank stores its state into every GPU's memory, and one kernel does the rest
(csrc/cuda/one_shot.cuh): for ranks of one host whose GPUs reach one another."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from .link import Link
from .one_shot_memory import ALIGNMENT, MAX_WORLD_SIZE, SLOT_BYTES
from .state import Message
from .strategy import Exchange, Setting

HEAD_DIM_MULTIPLE = ALIGNMENT // 2


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
