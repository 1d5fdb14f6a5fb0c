# SPDX-License-Identifier: BSD-3-Clause
import torch.distributed


class CpuCommunicator:
    shares_memory = False  # which a test sets

    def __init__(
        self, cpu_group, device=None, device_group=None, unique_name="", use_all2all=False
    ):
        self.cpu_group, self.device_group = cpu_group, device_group
        self.unique_name = unique_name
        self.world_size, self.rank_in_group = cpu_group.size(), cpu_group.rank()
        self.dist_module = "shared memory" if self.shares_memory else torch.distributed

    def all_reduce(self, input_):
        return "vLLM's"

    def all_gather(self, input_, dim=-1):
        return "vLLM's"

    def gather(self, input_, dst=0, dim=-1):
        return "vLLM's"

    def reduce_scatter(self, input_, dim=-1):
        return "vLLM's"
