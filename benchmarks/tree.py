# SPDX-License-Identifier: BSD-3-Clause
"""Decoding with the cache split over ranks: every exchange strategy beside the ring.

torchrun --nproc-per-node 2 benchmarks/tree.py                  # --device cuda: a GPU for each rank
"""

import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness.accuracy import Float64Check
from benchmarks.harness.measure import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    InputArena,
    Load,
    decode_set,
    load_warnings,
    peak_memory_of,
    pin_threads,
    time_in_step,
)
from benchmarks.harness.program import add_device, check_device, parser_of_cases, run_cases, shown
from benchmarks.harness.ranks import (
    CPU,
    Ranks,
    available_strategies,
    choice_of,
    hosts_of,
    joined_device,
    links_of,
    others_share,
    round_trips,
    slowest_rank,
)
from benchmarks.harness.report import Column, Report, columns_of, environment
from benchmarks.harness.shapes import DTYPES
from tree_attention import BlockCyclic, lean_decode, ring_decode, tree_decode
from tree_attention.baselines import MANIFEST_BYTES
from tree_attention.exchange import Communicator
from tree_attention.exchange.transport.buffers import StateLayout
from tree_attention.reference.accuracy import digest

AUTO, RING, LOCAL = "auto", "ring", "local attention only"


@dataclass(frozen=True)
class ShardedCase:
    """One query token per sequence over `length` keys, spread block-cyclically over the ranks."""

    length: int
    batch: int = 1
    dtype: str = "bf16"
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128

    @property
    def name(self) -> str:
        heads = f"{self.heads[0]}/{self.heads[1]}"
        return f"{self.dtype} {heads} d{self.head_dim} B={self.batch} {self.length}"

    def kv_shape(self, num_keys: int) -> tuple[int, int, int, int]:
        return self.batch, self.heads[1], num_keys, self.head_dim

    @property
    def state_layout(self) -> StateLayout:
        """Layout of the state that a rank contributes to a call."""
        return StateLayout((self.batch, self.heads[0], 1), self.head_dim, torch.float32)

    def kv_bytes(self, num_keys: int) -> int:
        return 2 * DTYPES[self.dtype].itemsize * math.prod(self.kv_shape(num_keys))


def quick_cases() -> list[ShardedCase]:
    return [
        ShardedCase(300, dtype="fp32", heads=(4, 2), head_dim=32),
        ShardedCase(65, 3, "bf16", (2, 1), 64),
    ]


def standard_cases() -> list[ShardedCase]:
    return [
        ShardedCase(4096),
        ShardedCase(16384),
        ShardedCase(65536),
        ShardedCase(16384, batch=4),
        ShardedCase(8192, batch=16),
    ]


def full_cases() -> list[ShardedCase]:
    more = [ShardedCase(262144), ShardedCase(16384, dtype="fp32"), ShardedCase(16384, dtype="fp16")]
    return (
        standard_cases()
        + more
        + [ShardedCase(65536, heads=(8, 1)), ShardedCase(16384, head_dim=64)]
    )


def fill(case: ShardedCase, layout: BlockCyclic, rank: int, k: Tensor, v: Tensor) -> None:
    """The keys and values of `rank`: from a seed of its own, so that any rank can make them."""
    generator = torch.Generator().manual_seed(1 + rank)
    assert k.shape == case.kv_shape(layout.count(rank, case.length))
    for x in (k, v):  # drawn on the host, so that they are the same on any device
        x.copy_(torch.empty(x.shape, dtype=x.dtype).normal_(generator=generator))


def run_case(case: ShardedCase, arena: InputArena, seconds: float, ranks: Ranks) -> dict[str, Any]:
    """Times one case on all ranks; the row is the same on every rank."""
    layout, dtype = BlockCyclic(ranks.size), DTYPES[case.dtype]
    num_keys = layout.count(ranks.rank, case.length)
    shape = case.kv_shape(num_keys)
    num_sets = InputArena.num_sets(case.kv_bytes(case.length))
    sets = [
        (arena.view(2 * i, shape, dtype), arena.view(2 * i + 1, shape, dtype))
        for i in range(num_sets)
    ]
    fill(case, layout, ranks.rank, *sets[0])
    for k, v in sets[1:]:
        k.copy_(sets[0][0])
        v.copy_(sets[0][1])
    generator = torch.Generator().manual_seed(0)
    q = 3.0 * torch.randn(case.batch, case.heads[0], 1, case.head_dim, generator=generator)
    q, device = q.to(arena.device, dtype), arena.device

    names = (*available_strategies(Communicator(), device), AUTO)
    options: dict[str, dict[str, Any]] = {method: {"strategy": method} for method in names}
    # One communicator for each: changing the strategy would compare signatures again.
    comms = {method: Communicator() for method in (*options, RING)}
    functions: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
        method: partial(decode_set, tree_decode, q, sets, group=comms[method], **options[method])
        for method in options
    }
    functions[RING] = partial(decode_set, ring_decode, q, sets, group=comms[RING])

    peaks = {name: peak_memory_of(partial(f, 0), device.type) for name, f in functions.items()}
    begin = time.perf_counter()
    bytes_sent = {}
    for name, function in functions.items():
        before = comms[name].bytes_sent
        function(0)
        bytes_sent[name] = comms[name].bytes_sent - before
    a_round = time.perf_counter() - begin
    rounds = ranks.from_root(lambda: min(max(int(seconds / a_round), MIN_ROUNDS), MAX_ROUNDS))
    with Load() as load:
        # Every call ends with an exchange, which keeps the ranks in step without a barrier.
        samples = time_in_step(functions, num_sets=num_sets, rounds=rounds)
    local = {LOCAL: partial(decode_set, lean_decode, q, sets)}
    samples |= time_in_step(local, num_sets=num_sets, rounds=rounds)

    def verify() -> dict[str, dict[str, float]]:
        # All keys on this rank, in the order of their owners: attention does not mind the order.
        k_all = torch.empty(case.kv_shape(case.length), dtype=dtype)
        v_all = torch.empty_like(k_all)
        begin = 0
        for rank in range(ranks.size):
            count = layout.count(rank, case.length)
            part = [torch.empty(case.kv_shape(count), dtype=dtype) for _ in range(2)]
            fill(case, layout, rank, part[0], part[1])
            k_all[:, :, begin : begin + count] = part[0]
            v_all[:, :, begin : begin + count] = part[1]
            begin += count
        check = Float64Check(q.cpu(), k_all, v_all, None)
        accuracies = {name: check.accuracy(*results[name]) for name in functions}
        return {name: asdict(a) | {"right": a.right} for name, a in accuracies.items()}

    results = {name: [x.cpu() for x in samples[name].result] for name in functions}
    accuracy = ranks.from_root(verify)
    digests = ranks.gather({name: digest(result) for name, result in results.items()})
    agree = {name: len({d[name] for d in digests}) == 1 for name in functions}
    slowest = {name: slowest_rank(ranks, sample) for name, sample in samples.items()}
    return {
        "name": case.name,
        "case": asdict(case),
        "world_size": ranks.size,
        "times": {name: sample.to_json() for name, sample in slowest.items()},
        "bytes_per_rank": {name: max(ranks.gather(n)) for name, n in bytes_sent.items()},
        "peak_memory": {name: most(ranks.gather(peak)) for name, peak in peaks.items()},
        "accuracy": accuracy,
        "ranks_agree": agree,
        "auto": told_choice(case, comms[AUTO], device) if ranks.size > 1 else None,
        "other_load": others_share(ranks, load),
        "wrong": not all(agree[name] and accuracy[name]["right"] for name in functions),
    }


def told_choice(case: ShardedCase, comm: Communicator, device: torch.device = CPU) -> str:
    choice = choice_of(comm, case.state_layout, device)
    size = f"{case.state_layout.num_bytes:,} bytes over {comm.topology}"
    return f"auto takes {choice.strategy} for {size}: {choice.reason}"


def most(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def run(
    cases: Sequence[ShardedCase],
    progress: Progress,
    *,
    seconds: float,
    local_rank: int,
    device: torch.device = CPU,
) -> Report:
    ranks = Ranks()
    cpus = pin_threads(first=local_rank * torch.get_num_threads())
    layout = BlockCyclic(ranks.size)
    arena = InputArena(
        max(
            case.kv_bytes(layout.count(ranks.rank, case.length))
            * InputArena.num_sets(case.kv_bytes(case.length))
            for case in cases
        ),
        device,
    )
    with torch.inference_mode():
        rows = [run_case(case, arena, seconds, ranks) for case in shown(progress, cases)]
    summary = [world_of(ranks)] if ranks.size > 1 else []
    summary += [f"{row['name']}: {row['auto']}" for row in rows if row["auto"]]
    pinned = ranks.gather(cpus)
    header = environment(
        **{
            "ranks": ranks.size,
            "process group": dist.get_backend() if dist.is_initialized() else "none",
            "pinned to CPUs, by rank": pinned if all(pinned) else "not pinned",
        }
    )
    warnings = [] if all(pinned) else ["the threads could not be pinned; two may share a core"]
    if ranks.size == 1:
        warnings.append(
            "one rank exchanges nothing: torchrun --nproc-per-node 2 benchmarks/tree.py"
        )
    return Report(
        name=f"tree_{ranks.size}",
        title=f"Decoding over {ranks.size} rank{'s' if ranks.size > 1 else ''}",
        notes=NOTES,
        environment=header,
        rows=rows,
        columns=columns(rows),
        warnings=warnings + load_warnings([row["other_load"] for row in rows]),
        summary=summary,
    )


def world_of(ranks: Ranks) -> str:
    """Where the ranks are and what connects them; collective."""
    comm = Communicator()
    comm.agree((("call", "tree"),))  # which finds the nodes
    links = links_of(comm.topology, round_trips(), dist.get_backend())
    return f"{comm.topology}: {hosts_of(ranks.gather(platform.node()))}; {links}"


NOTES = (
    "A row is named dtype, query/kv heads, head_dim, batch, keys of all ranks together, spread "
    "block-cyclically. Each call is timed on every rank and the slowest counts; medians of "
    "alternating calls. Inputs are cold.",
    "Within a node, strategies exchange in shared memory; rings and all-reduces go through the "
    "process group everywhere.",
    "auto is tree_decode's default.",
    "Bytes are what one rank sends per call, counted where they are sent. With p ranks, r = batch "
    "* query heads and d = head_dim: all_gather (p-1) * 4r(d+1); three_allreduce, of which Gloo "
    "makes rings of 2(p-1) steps, 2(p-1)/p * 4r(d+2); ring K and V of every shard but the next "
    f"rank's, and (p-1) * {MANIFEST_BYTES} for their sizes.",
    "Peak is by how much resident memory grew on the worst rank in the first call.",
    "error is the largest of o over all rows, relative to the row's largest magnitude, against "
    "float64. A row is right when that is at most twice plain PyTorch's plus one rounding and all "
    "ranks hold the same bits.",
)


def columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    lines = [(row, name) for row in rows for name in row["times"]]

    def median(row: dict[str, Any], name: str) -> float:
        return row["times"][name]["median_us"]

    def check(row: dict[str, Any], name: str) -> str:
        if name == LOCAL:
            return "-"
        right = row["ranks_agree"][name] and row["accuracy"][name]["right"]
        return "yes" if right else "WRONG"

    def mebibytes(count: int | None) -> str:
        return "-" if count is None else f"{count / 2**20:.1f}"

    def error(row: dict[str, Any], name: str) -> str:
        return "-" if name == LOCAL else f"{row['accuracy'][name]['o_error']:.1e}"

    return columns_of(
        lines,
        {
            "case": lambda row, name: row["name"],
            "method": lambda row, name: name,
            "us": lambda row, name: f"{median(row, name):,.1f}",
            "ring /this": lambda row, name: f"{median(row, RING) / median(row, name):.1f}",
            "bytes sent": lambda row, name: f"{row['bytes_per_rank'].get(name, 0):,}",
            "peak MiB": lambda row, name: mebibytes(row["peak_memory"].get(name)),
            "error": error,
            "right": check,
        },
    )


def main(arguments: list[str]) -> int:
    parser = parser_of_cases("Times decoding over ranks by every strategy, and checks it.")
    add_device(parser)
    parsed = parser.parse_args(arguments)
    check_device(parser, parsed.device)
    with joined_device(parsed.device) as (world, device):
        run_on_ranks = partial(
            run,
            seconds=0.05 if parsed.quick else parsed.seconds,
            local_rank=world.local_rank,
            device=device,
        )
        return run_cases(parsed, world, (quick_cases, standard_cases, full_cases), run_on_ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
