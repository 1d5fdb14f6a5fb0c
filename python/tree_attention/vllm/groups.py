# SPDX-License-Identifier: BSD-3-Clause
"""Collectives of vLLM's groups of processes, by this library's exchange where hosts are several.

vLLM makes a `CpuCommunicator` for each group (tensor, context, pipeline and expert parallelism).
Where the processes of a group share memory, vLLM's own collectives stay. Elsewhere vLLM uses
Gloo, and this module calls the exchanges of a `Communicator` instead: they give the same bits on
all ranks, and each has a deadline.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.logger import init_logger
from vllm.platforms import current_platform

from ..exchange import DEFAULT_TIMEOUT, Communicator

# Timeout of an exchange until the second step of requests. Hosts compile until the end of the first
# step, and one of them may have the compiled graphs from an earlier start already.
STARTING = 600.0

_communicators: list[tuple[Communicator, float]] = []  # made while the engine starts, and a timeout
_in_graphs: list[str] = []  # names of communicators in compiled graphs, and of their groups


def names_in_graphs() -> str:
    """The communicators that graphs compiled in this process may call, for vLLM's cache of them.

    vLLM keeps compiled graphs and loads them by its options and variables, among which the number
    of hosts is none. A graph has this process's exchange in it or another one, and a name.
    """
    return "; ".join(_in_graphs)


def communicator(group: dist.ProcessGroup) -> Communicator:
    """A communicator with vLLM's timeout for its groups of processors, once it serves."""
    config = get_current_vllm_config().parallel_config
    timeout = float(config.cpu_distributed_timeout_seconds or DEFAULT_TIMEOUT)
    made = Communicator(group, max(timeout, STARTING))
    _communicators.append((made, timeout))
    return made


_has_served = False


def step_begins() -> None:
    """Called before each step of requests, maybe several times; from the second step on the longer
    timeout for hosts that compile no longer applies."""
    while _has_served and _communicators:
        made, timeout = _communicators.pop()
        made.timeout = timeout


def step_runs() -> None:
    """Called by the layers in each step of requests."""
    global _has_served
    _has_served = True


class GroupCommunicator(CpuCommunicator):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # The module itself where the processes of the group share no memory.
        self._is_ours = self.dist_module is dist
        if self._is_ours:
            # One communicator per kind of call: alternating kinds would compare signatures each
            # time.
            self._sums, self._gathers = (communicator(self.cpu_group) for _ in range(2))
            _in_graphs.append(f"{self.unique_name}: {self._sums.name}, {self._gathers.name}")
            text = "tree_attention carries the tensors of group %s: %d processes"
            init_logger("vllm.tree_attention").info(text, self.unique_name, self.world_size)
        config = get_current_vllm_config().parallel_config
        if config.nnodes > 1:
            # vLLM tells by the number of devices, one on a CPU, which ranks are on the first host.
            num_processes = config.local_world_size
            type(current_platform).device_count = classmethod(lambda cls: num_processes)

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum over ranks, in place: in rank order and in float32 where it is of floats."""
        if not self._is_ours:
            return super().all_reduce(input_)
        if input_.is_floating_point():
            return input_.copy_(self._sums.all_reduce(input_))
        return input_.copy_(self.all_gather(input_[None], 0).sum(0))

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        if not self._is_ours:
            return super().all_gather(input_, dim)
        return self._gathers.all_gather(input_, [input_.shape[dim]] * self.world_size, dim)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        if not self._is_ours:
            return super().gather(input_, dst, dim)
        gathered = self.all_gather(input_, dim)
        return gathered if self.rank_in_group == dst else None

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        if not self._is_ours:
            return super().reduce_scatter(input_, dim)
        if input_.shape[dim] % self.world_size:
            raise ValueError(
                f"reduce_scatter: the size in dim {dim} must be a multiple of {self.world_size} "
                f"ranks, got {input_.shape[dim]}"
            )
        total = self.all_reduce(input_.clone())
        return total.chunk(self.world_size, dim)[self.rank_in_group].contiguous()
