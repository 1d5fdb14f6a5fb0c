# SPDX-License-Identifier: BSD-3-Clause
"""Time of a token on two hosts of unequal speed, by shares: ranks whose operators take longer.

    python benchmarks/unequal.py --out DIR

4 layers in the shape of Llama 3.2 1B over 65,536 cached tokens.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness.llama_model import fill, make_model
from benchmarks.harness.measure import Load
from benchmarks.harness.program import finish, parser_of
from benchmarks.harness.report import Report, columns_of, environment, verdict
from tree_attention import BlockCyclic, hf
from tree_attention.exchange import get_communicator
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.auto_shares import measured_group, shape_in
from tree_attention.planning.unequal import in_numbers
from tree_attention.shares import ModelShares

LAYERS, WARM_UP = 4, 2
EACH_ALONE = "each alone"  # at the same time, with the whole model and cache
CPU = torch.device("cpu")
LEAST_SLEEP = 2e-4  # seconds: a shorter one is not much shorter


@dataclass(frozen=True)
class Case:
    """A line of the table: speeds of the ranks in percent of a core, and the shares."""

    hosts: tuple[int, ...]
    shares: str

    @property
    def is_each_alone(self) -> bool:
        return self.shares == EACH_ALONE

    @property
    def name(self) -> str:
        return f"{' + '.join(f'{x} %' for x in self.hosts)}, {self.shares}"


def cases(slow: int) -> list[Case]:
    return [
        Case((100,), "alone"),
        Case((slow,), "alone"),
        Case((100, slow), EACH_ALONE),
        Case((100, slow), "even"),
        Case((100, slow), "3,1"),
        Case((100, slow), "auto"),
        Case((100, 10), "even"),
        Case((100, 10), "auto"),
        Case((100, 100), EACH_ALONE),
        Case((100, 100), "even"),
        Case((100, 100), "auto"),
    ]


class Slowed(TorchDispatchMode):
    """Each operator of this thread takes as long as on a core of so many percent of the speed: the
    thread sleeps after it, so that it takes nothing of the cores and the memory meanwhile."""

    def __init__(self, percent: int) -> None:
        super().__init__()
        self.more, self.owed = 100 / percent - 1, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        begin = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.owed += self.more * (time.thread_time() - begin)
        if self.owed >= LEAST_SLEEP:
            begin = time.perf_counter()
            time.sleep(self.owed)
            self.owed -= time.perf_counter() - begin
        return result


def speed_of(percent: int) -> AbstractContextManager[Any]:
    return nullcontext() if percent == 100 else Slowed(percent)


def run_case(case: Case, context: int, tokens: int) -> list[dict[str, Any]]:
    """What the ranks of a case measured; fewer tokens where some were left out."""
    with tempfile.TemporaryDirectory() as folder:
        own = {
            "WORLD_SIZE": str(len(case.hosts)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        cores, ranks = sorted(os.sched_getaffinity(0)), []
        for rank, percent in enumerate(case.hosts):
            specification = {
                "percent": percent,
                "core": cores[rank % len(cores)],
                "shares": case.shares,
                "context": context,
                # Ranks that do not wait for each other are to be busy for equally long.
                "tokens": tokens * percent // min(case.hosts) if case.is_each_alone else tokens,
                "out": f"{folder}/{rank}",
                "store": f"{folder}/store",
            }
            command = [sys.executable, __file__, "--rank", json.dumps(specification)]
            ranks.append(subprocess.Popen(command, env=os.environ | own | {"RANK": str(rank)}))
        statuses = [rank.wait() for rank in ranks]
        if any(statuses):
            raise RuntimeError(f"{case.name}: a rank has failed")
        return [json.loads(Path(f"{folder}/{r}").read_text()) for r in range(len(ranks))]


@torch.inference_mode()
def run_rank(given: dict[str, Any]) -> None:
    os.sched_setaffinity(0, {given["core"]})
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(given["store"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model, context = make_model(LAYERS), given["context"]
    result: dict[str, Any] = {"tokens": [], "seconds": [], "taken": given["shares"]}
    group: Any = None
    shares: Any = {"3,1": [3, 1]}.get(given["shares"])
    if given["shares"] == EACH_ALONE:
        group = [dist.new_group([r]) for r in range(size)][rank]
        dist.barrier()
    elif size > 1:
        with speed_of(given["percent"]):
            planned = measured_group(
                "unequal",
                get_communicator(),
                lambda: shape_in(model.config, torch.bfloat16),
                timeout=600.0,
                device=CPU,
                max_length=context,
            )
        if given["shares"] == "auto":
            left_out = planned.unhelpful
            kept = [r for r in range(size) if r not in left_out]
            group = dist.new_group(kept)
            planned = planned.without(left_out)
            shares, result["taken"] = planned.best.given(), f"auto: {in_numbers(planned.best)}"
            if left_out:
                result["taken"] = f"auto: without {', '.join(map(str, left_out))}"
        taken = ModelShares.of("unequal", shares, len(planned.machines))
        result["planned"] = planned.token_seconds(taken)
    if group is None or dist.get_rank(group) >= 0:
        hf.parallelize(model, group=group, shares=shares)
        mesh = hf.mesh(model)
        layout = None
        if mesh.shares.cache is not None:
            layout = BlockCyclic(len(mesh.shares.cache), shares=mesh.shares.cache)
        cache = hf.TreeCache(model.config, mesh.context_group, layout, timeout=600.0)
        fill(cache, model.config, context)
        token = torch.tensor([[7]])
        with speed_of(given["percent"]):
            for i in range(WARM_UP + given["tokens"]):
                begin = time.perf_counter()
                position = torch.tensor([[context + i]])
                logits = model(token, **{CACHE_NAME: cache}, position_ids=position).logits
                token = logits[:, -1:].argmax(dim=-1)
                result["tokens"].append(int(token))
                result["seconds"].append(time.perf_counter() - begin)
    Path(given["out"]).write_text(json.dumps(result))
    dist.barrier()  # a rank that was left out keeps its part of the store until the end
    dist.destroy_process_group()


def measure(chosen: Sequence[Case], context: int, tokens: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for case in chosen:
        with Load() as load:
            ranks = run_case(case, context, tokens)
        taking_part = [rank for rank in ranks if rank["seconds"]]
        each = [rank["seconds"][WARM_UP:] for rank in taking_part]
        times = [max(x) for x in zip(*each)]  # noqa: B905
        if case.is_each_alone:
            times = [1 / sum(1 / statistics.median(x) for x in each)]
        tokens_of_all = [rank["tokens"] for rank in taking_part]
        known = min(map(len, tokens_of_all))
        rows.append(
            {
                "name": case.name,
                "hosts": case.hosts,
                "taken": ranks[0]["taken"],
                "seconds": statistics.median(times),
                "planned": ranks[0].get("planned"),
                "tokens": taking_part[0]["tokens"],
                "wrong": any(x[:known] != tokens_of_all[0][:known] for x in tokens_of_all),
                "other_load": load.others,
                "token": {
                    name: 1e6 * value
                    for name, value in zip(
                        ("p10_us", "median_us", "p90_us"),
                        (min(times), statistics.median(times), max(times)),
                        strict=True,
                    )
                },
            }
        )
        print(f"{case.name}: {1e3 * rows[-1]['seconds']:.0f} ms", file=sys.stderr, flush=True)
    return rows


NOTES = (
    "4 layers in the shape of Llama 3.2 1B with random weights in bfloat16 that are split (T = 1), "
    "and random keys and values of the context in the cache. Each rank is one thread on a core of "
    "its own. ms per token is the median of the slowest rank.",
    "A host of 33 % sleeps after each operator for twice its processor time: a quota of processor "
    "time would stop it in the midst of an operator, for which the other rank waits at each "
    "exchange, and would be spent in waiting too. Real hosts do neither.",
    "planned is the arithmetic of the planner with the speeds that the ranks measured just before. "
    "of the sum of speeds: tokens per second divided by those of the ranks alone, added up. of the "
    "fastest alone: tokens per second divided by those of the host of 100 %. auto leaves a rank "
    "out if a token takes less time without it.",
    "Both ranks share this machine's memory and last cache, as two hosts do not. each alone shows "
    "what that costs: both hosts run the whole model at the same time, each for itself, and ms per "
    "token is what both together need for one token. of both at once divides tokens per second by "
    "theirs: what this machine's memory allows, with nothing split and nothing exchanged.",
    "right: all ranks that took part chose the same tokens.",
)


def report_of(rows: list[dict[str, Any]], context: int) -> Report:
    alone = {row["hosts"][0]: row["seconds"] for row in rows if len(row["hosts"]) == 1}
    at_once = {tuple(row["hosts"]): row["seconds"] for row in rows if row["taken"] == EACH_ALONE}

    def of_sum(row: dict[str, Any]) -> str:
        known = [alone.get(host) for host in row["hosts"]]
        if None in known:
            return "-"
        return f"{1 / row['seconds'] / sum(1 / x for x in known if x):.2f}"

    def of_both(row: dict[str, Any]) -> str:
        known = at_once.get(tuple(row["hosts"]))
        return "-" if known is None else f"{known / row['seconds']:.2f}"

    def of_fastest(row: dict[str, Any]) -> str:
        return f"{alone[100] / row['seconds']:.2f}" if 100 in alone else "-"

    return Report(
        name="unequal",
        title=f"A token on hosts of unequal speed, {context:,} cached tokens",
        notes=NOTES,
        environment=environment(threads=1),
        rows=rows,
        columns=columns_of(
            rows,
            {
                "speeds of hosts, shares": lambda row: row["name"],
                "taken": lambda row: row["taken"],
                "ms per token": lambda row: f"{1e3 * row['seconds']:.0f}",
                "least and most ms": lambda row: (
                    f"{row['token']['p10_us'] / 1e3:.0f}, {row['token']['p90_us'] / 1e3:.0f}"
                ),
                "planned ms": lambda row: f"{1e3 * row['planned']:.0f}" if row["planned"] else "-",
                "of the sum of speeds": of_sum,
                "of both at once": of_both,
                "of the fastest alone": of_fastest,
                "other load": lambda row: (
                    "-" if row["other_load"] is None else f"{row['other_load']:.0%}"
                ),
                "right": verdict,
            },
        ),
    )


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--rank"]:
        run_rank(json.loads(arguments[1]))
        return 0
    parser = parser_of(__doc__, "unequal")
    parser.add_argument("--context", type=int, default=65536, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=12, help="timed tokens (default 12)")
    parser.add_argument("--slow", type=int, default=33, metavar="PERCENT", help="default 33")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cases whose name has one")
    parsed = parser.parse_args(arguments)
    chosen = [
        case
        for case in cases(parsed.slow)
        if parsed.only is None or any(text in case.name for text in parsed.only)
    ]
    rows = measure(chosen, parsed.context, parsed.tokens)
    return finish(report_of(rows, parsed.context), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
