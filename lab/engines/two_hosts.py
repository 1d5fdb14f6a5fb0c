# SPDX-License-Identifier: BSD-3-Clause
"""vLLM on two emulated hosts: its own attention over Gloo, and ours over our exchange.

    benchmarks/engines/setup vllm                                            # once
    sudo .venv/bin/python -m lab.engines.two_hosts --out benchmarks/results

Each host has a processor of its own. Needs root for the emulated hosts.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.engines.__main__ import ENVIRONMENTS, KEEP_MEMORY
from benchmarks.engines.serving import LAYERS, VOCABULARY, make_checkpoint
from benchmarks.harness.program import add_out, finish, progress_bar
from benchmarks.harness.report import ROOT, Report, columns_of, environment

from ..emulation.network import unsupported
from .servers import Failed, emulated_servers, releases

LINKS = ("0.1ms,10gbit", "1ms,1gbit")
SPACE_GIB = 1


@dataclass(frozen=True)
class Arm:
    """An engine, and the options that make it."""

    plug_in: bool
    hosts: int = 2
    context_ranks: int = 1


ARMS = {
    "vllm, one host": Arm(False, hosts=1),
    "vllm, two hosts": Arm(False),
    "ours, two hosts": Arm(True),
    "ours, two hosts, DCP 2": Arm(True, context_ranks=2),
}
RIVAL, ONE = "vllm, two hosts", "vllm, one host"

NOTES = (
    "The model is a quarter of Llama 3.2 1B with one key head, which vLLM asks for where contexts "
    f"are split: {LAYERS} of 16 layers and a quarter of the vocabulary, random weights in "
    "bfloat16. Hosts are network namespaces with a processor each, joined by a link of the delay "
    "in one direction and the rate that are named; the processors share the memory of one "
    "machine. Two hosts are tensor parallelism 2; vllm is the engine as it is shipped, whose "
    "tensors go by Gloo.",
    "First request: the seconds to the first token of the engine's first request, of 300 tokens. "
    "First token: the same of a later one, alone. Between tokens: the median gap of a request "
    "alone, and of the streams of several at once. In brackets: the time of vllm on two hosts over "
    "this one, and of one host over this one.",
    "Same tokens: the share of the new tokens before the first that differs from vllm on one host; "
    "none at all is WRONG.",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.engines.two_hosts", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--links", nargs="+", default=LINKS, metavar="DELAY,RATE")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=[*ARMS], metavar="ARM")
    parser.add_argument("--context", type=int, default=2048, help="of a prompt (default 2048)")
    parser.add_argument("--batch", type=int, default=8, help="streams at once (default 8)")
    parser.add_argument("--tokens", type=int, default=33, help="new ones of a request (default 33)")
    parser.add_argument("--environment", type=Path, default=ENVIRONMENTS / "vllm", metavar="DIR")
    parser.add_argument(
        "--checkpoints", type=Path, default=ROOT / ".cache" / "engines", metavar="DIR"
    )
    add_out(parser, "two_hosts")
    parsed = parser.parse_args()
    if (why := unsupported()) is not None:
        parser.error(why)
    model = make_checkpoint(parsed.checkpoints, 1)
    rows: list[dict[str, Any]] = []
    with progress_bar(True) as progress:
        arms = [(link, name) for link in parsed.links for name in parsed.only]
        task = progress.add_task("engines", total=len(arms))
        for link, name in arms:
            progress.update(task, description=f"{link}: {name}")
            rows.append({"link": link, "engine": name, **run(ARMS[name], link, model, parsed)})
            progress.advance(task)
    report = report_of(rows, vllm=releases(parsed.environment))
    return finish(report, parsed.out, width=150)


def run(arm: Arm, link: str, model: Path, parsed: argparse.Namespace) -> dict[str, Any]:
    """The figures of one engine, which is started for them, or the reason why there are none."""
    batches = [
        [prompt(300, 1)],  # the first request
        [prompt(parsed.context, 0)],
        [prompt(256, request) for request in range(parsed.batch)],
    ]
    variables = {
        "TREE_ATTENTION_VLLM": str(int(arm.plug_in)),
        "VLLM_CPU_KVCACHE_SPACE": str(SPACE_GIB),
        "HF_HUB_OFFLINE": "1",
        "GLIBC_TUNABLES": KEEP_MEMORY,
    }
    commands = [command(arm, host, model, parsed) for host in range(arm.hosts)]
    spec = {"batches": batches, "tokens": parsed.tokens}
    try:
        with emulated_servers(link, parsed.environment) as servers:
            servers.start(commands, variables)
            *_, output = servers.lines_of_client("client", spec)
            peak = max(servers.memory("VmHWM").values())
    except Failed as failure:
        return {"reason": str(failure)}
    first, alone, streams = json.loads(output)
    return {
        "first_request_seconds": first[0]["seconds"][0],
        "first_token_seconds": alone[0]["seconds"][0],
        "token_seconds": gap(alone),
        "stream_seconds": gap(streams),
        "peak_resident_bytes": peak,
        "tokens": alone[0]["tokens"],
    }


def prompt(length: int, request: int) -> list[int]:
    return random.Random(f"{length}/{request}").choices(range(VOCABULARY), k=length)


def command(arm: Arm, host: int, model: Path, parsed: argparse.Namespace) -> list[str]:
    """`serve` of the library's own module, which also starts a vLLM without the plug-in."""
    found = ["-m", "tree_attention.vllm", "serve", str(model), "--served-model-name", "m"]
    found += ["--dtype", "bfloat16", "--skip-tokenizer-init", "--no-enable-prefix-caching"]
    found += ["--max-model-len", str(parsed.context + parsed.tokens + 64)]
    if arm.hosts > 1:
        found += ["--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", str(host)]
        found += ["--master-addr", "host0", *(["--headless"] if host else [])]
        found += ["--decode-context-parallel-size", str(arm.context_ranks)]
    return found


def gap(streams: Sequence[dict[str, Any]]) -> float:
    """The median gap between tokens of all streams."""
    gaps = [b - a for stream in streams for a, b in pairwise(stream["seconds"])]
    return statistics.median(gaps)


def report_of(rows: list[dict[str, Any]], **versions: str) -> Report:
    found = {(row["link"], row["engine"]): row for row in rows if "reason" not in row}
    for row in found.values():
        one = found.get((row["link"], ONE))
        if one is not None and one is not row:
            differ = [a != b for a, b in zip(row["tokens"], one["tokens"], strict=True)]
            row["same_tokens"] = (differ.index(True) if any(differ) else len(differ)) / len(differ)
    for row in rows:
        row["name"] = f"{row['link']}, {row['engine']}"
        row["wrong"] = row.get("same_tokens") == 0
    return Report(
        name="two_hosts",
        title=f"vLLM on two emulated hosts, {LAYERS} layers of a 1B-shaped Llama",
        notes=NOTES,
        environment=environment(**versions),
        rows=rows,
        columns=columns_of([(row, found) for row in found.values()], COLUMNS),
        warnings=[f"{row['name']}: {row['reason']}" for row in rows if "reason" in row],
    )


def _time(key: str, text: str, factor: float) -> Any:
    def column(row: dict[str, Any], found: dict[tuple[str, str], dict[str, Any]]) -> str:
        others = (found.get((row["link"], name)) for name in (RIVAL, ONE))
        ratios = [f"{other[key] / row[key]:.2f}" if other else "-" for other in others]
        return f"{text.format(factor * row[key])} ({', '.join(ratios)})"

    return column


COLUMNS = {
    "link": lambda row, _: row["link"],
    "engine": lambda row, _: row["engine"],
    "first request s": lambda row, _: f"{row['first_request_seconds']:.2f}",
    "first token s": _time("first_token_seconds", "{:.2f}", 1),
    "between tokens ms": _time("token_seconds", "{:.1f}", 1e3),
    "between tokens of streams ms": _time("stream_seconds", "{:.1f}", 1e3),
    "GiB of a process": lambda row, _: f"{row['peak_resident_bytes'] / (1 << 30):.2f}",
    "same tokens": lambda row, _: (
        f"{100 * row['same_tokens']:.0f} %" if "same_tokens" in row else "-"
    ),
    "right": lambda row, _: "WRONG" if row["wrong"] else "yes",
}


if __name__ == "__main__":
    sys.exit(main())
