# SPDX-License-Identifier: BSD-3-Clause
"""What bench_cluster.py runs on every host: one rank, which times exchanges and rings.

The attention of a shard is not computed: states come from a formula, so that results can be checked
without the keys, and computing takes as long as it is told to, asleep. What travels is real.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import tree_attention.decode as tree_module
import tree_attention.ring as ring_module
import tree_attention.ring_pass_q as ring_pass_q_module
from tree_attention.exchange import Communicator, strategies
from tree_attention.exchange.calibration import fit, measure
from tree_attention.exchange.costs import default_costs

RINGS = {
    "ring": ring_module.ring_decode,
    "ring, passing queries": ring_pass_q_module.ring_pass_q_decode,
}
NUM_HEADS, NUM_HEADS_KV, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
_WARM_UP = 1
_MIN_ROUNDS, _MAX_ROUNDS = 5, 30
# Between two calls, for the ranks to go to sleep and wake up together.
_PAUSE = 0.003


class PretendedAttention:
    """Stands for `lean_decode`: a state that depends on the query and on whose keys these are."""

    def __init__(self, seconds_per_key: float) -> None:
        self._seconds_per_key = seconds_per_key

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        o, lse = options["out"]
        if key_ranges is None:  # or it is the rings' check of arguments, without keys
            owner = k[0, 0, 0, 0].item()
            torch.mul(q, owner + 1.0, out=o)
            lse.fill_(owner / 4.0)
            # A part of the heads takes a part of the time.
            num_keys = q.shape[0] * k.shape[2] * k.shape[1] / NUM_HEADS_KV
            if self._seconds_per_key:
                time.sleep(self._seconds_per_key * num_keys)
        return o, lse


def merged(q: Tensor, world_size: int) -> tuple[Tensor, Tensor]:
    """What all ranks together make of it."""
    lse = torch.arange(world_size) / 4.0
    factor = (torch.softmax(lse.double(), 0) * torch.arange(1, world_size + 1)).sum()
    return q.float() * factor.float(), lse.logsumexp(0).expand(q.shape[:3])


def time_calls(call: Callable[[], Any], seconds: float) -> list[tuple[float, float]]:
    """(start, end) of calls that all ranks begin at agreed times: hosts of one machine share its
    clock."""
    begin = time.monotonic()
    for _ in range(_WARM_UP):
        call()
    interval = 1.3 * _largest((time.monotonic() - begin) / _WARM_UP) + _PAUSE
    rounds = min(max(int(seconds / interval), _MIN_ROUNDS), _MAX_ROUNDS)
    first = _largest(time.monotonic()) + 0.02
    times = []
    for i in range(rounds):
        time.sleep(max(0.0, first + i * interval - time.monotonic()))
        start = time.monotonic()
        call()
        times.append((start, time.monotonic()))
    return times


def run_case(case: dict[str, Any], world_size: int, rank: int, seconds: float) -> dict[str, Any]:
    batch, keys = case["batch"], case["keys"]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, NUM_HEADS, 1, HEAD_DIM, generator=generator).to(DTYPE)
    k, v = torch.full((2, batch, NUM_HEADS_KV, keys, HEAD_DIM), rank, dtype=DTYPE)
    result: dict[str, Any] = {}
    expected = merged(q, world_size)
    attention = PretendedAttention(case["seconds_per_key"])
    with ExitStack() as stack:
        for module in (tree_module, ring_module, ring_pass_q_module):
            stack.enter_context(mock.patch.object(module, "lean_decode", attention))
        for way in case["ways"]:
            comm = Communicator()  # its own, as changing the call would compare signatures again

            def call(way: str = way, comm: Communicator = comm) -> tuple[Tensor, Tensor]:
                if way in RINGS:
                    return RINGS[way](q, k, v, group=comm)
                return tree_module.tree_decode(q, k, v, group=comm, strategy=way)

            o, lse = call()
            counted = [comm.bytes_sent, comm.link.num_operations, _wire_bytes()]
            call()
            counts = [comm.bytes_sent, comm.link.num_operations, _wire_bytes()]
            times = time_calls(call, seconds)
            right = torch.allclose(o.float(), expected[0], rtol=2**-7, atol=1e-6)
            right = right and torch.allclose(lse, expected[1], atol=1e-5)
            mine = [after - before for before, after in zip(counted, counts, strict=True)]
            every: list[Any] = [None] * world_size
            dist.all_gather_object(every, (times, mine, right))
            result[way] = {
                # From the last rank's start to the last rank's end.
                "seconds": [
                    round(max(end for _, end in ranks) - max(start for start, _ in ranks), 7)
                    for ranks in zip(*(times for times, _, _ in every), strict=True)
                ],
                "bytes": max(counts[0] for _, counts, _ in every),
                "rounds": max(counts[1] for _, counts, _ in every),
                "wire_bytes": max(counts[2] for _, counts, _ in every),
                "right": all(right for _, _, right in every),
            }
    return result


def _largest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def _wire_bytes() -> int:
    """What this host has sent, with all headers and acknowledgements."""
    lines = (line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    return sum(int(f.split()[8]) for name, f in lines if name.strip() in ("net0", "node0"))


def main(specification: Path, out: Path) -> None:
    spec = json.loads(specification.read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    result: dict[str, Any] = {}
    if spec["calibrate"]:
        samples = measure(Communicator(), torch.device("cpu"), spec["seconds"] / 4)
        if rank == 0:
            fit(samples, default_costs("gloo")).save(out.with_suffix(".costs.json"))
    with torch.inference_mode():
        result["cases"] = [run_case(c, world_size, rank, spec["seconds"]) for c in spec["cases"]]
    if rank == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert set(RINGS).isdisjoint(strategies())
    main(Path(sys.argv[1]), Path(sys.argv[2]))
