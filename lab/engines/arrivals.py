# SPDX-License-Identifier: BSD-3-Clause
"""Short requests at random times to vLLM: ours loses none, and keeps its memory as vLLM does.

    benchmarks/engines/setup vllm                                            # once
    sudo .venv/bin/python -m lab.engines.arrivals --out benchmarks/results

vLLM by itself on one emulated host, and with our attention and exchange on one and on two, with a
processor each. Needs root for the emulated hosts.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.__main__ import ENVIRONMENTS, KEEP_MEMORY
from benchmarks.harness.program import add_out, finish, progress_bar
from benchmarks.harness.report import ROOT, Report, columns_of, environment

from ..emulation.network import unsupported
from .servers import Failed, emulated_servers, releases

LINK = "0.1ms,10gbit"
MODEL = ROOT / "examples" / "passkey-llama"
# Whether our plug-in is on, and the number of hosts.
ARMS = {"vllm, one host": (0, 1), "ours, one host": (1, 1), "ours, two hosts, TP 2": (1, 2)}
LINES = 10  # of each arm's table
LENGTHS = (4, 200)  # tokens of the shortest and the longest prompt
NUM_PROMPTS = 64
TOKENS = 8
RIVAL = "vllm, one host"
FLAT = 4 << 20  # bytes by which a host may grow more than the rival's in a thousand answers

NOTES = (
    "Each request is a prompt of 4 to 200 tokens, of 64 that there are, and gets 8 new tokens. The "
    "times between arrivals are drawn from an exponential distribution. The model is "
    "examples/passkey-llama in float32, and prefixes are not kept.",
    "Lost: an error, or an answer without a token. Other tokens: not those of the same prompt "
    "alone, before.",
    "Memory is the resident memory of all processes of the engine when so many requests were "
    "answered, of which the model needs 4 MB. From the first line to the last that of a host must "
    "not grow by 4 MiB more in a thousand requests than that of vllm by itself, which grows until "
    "it has met all shapes of a step.",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.engines.arrivals", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--requests", type=int, default=10000, help="of an engine (default 10000)")
    parser.add_argument("--rate", type=float, default=20.0, help="in a second (default 20)")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=[*ARMS], metavar="ARM")
    parser.add_argument("--environment", type=Path, default=ENVIRONMENTS / "vllm", metavar="DIR")
    add_out(parser, "arrivals")
    parsed = parser.parse_args()
    if parsed.requests % LINES:
        parser.error(f"--requests must be a multiple of {LINES}, got {parsed.requests}")
    if (why := unsupported()) is not None:
        parser.error(why)
    rows: list[dict[str, Any]] = []
    with progress_bar(True) as progress:
        task = progress.add_task("", total=len(parsed.only) * LINES)
        for name in parsed.only:
            progress.update(task, description=name)
            try:
                for row in run(name, parsed):
                    rows.append(row)
                    progress.advance(task)
            except Failed as failure:
                rows.append({"engine": name, "reason": str(failure)})
    report = report_of(rows, parsed.rate, vllm=releases(parsed.environment))
    return finish(report, parsed.out)


def run(name: str, parsed: argparse.Namespace) -> Any:
    """Yields a row for each tenth of the requests."""
    plug_in, hosts = ARMS[name]
    variables = {
        "TREE_ATTENTION_VLLM": str(plug_in),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "GLIBC_TUNABLES": KEEP_MEMORY,
    }
    spec = {
        "prompts": prompts(),
        "requests": parsed.requests,
        "rate": parsed.rate,
        "tokens": TOKENS,
        "every": parsed.requests // LINES,
    }
    with emulated_servers(LINK, parsed.environment) as servers:
        servers.start([command(hosts, host) for host in range(hosts)], variables)
        for line in servers.lines_of_client("arrivals", spec):
            found = json.loads(line)
            if found["answered"]:  # the first line is of the prompts alone
                memory = servers.memory("VmRSS")
                yield {"engine": name, "resident_bytes": sum(memory.values()), **found}


def prompts() -> list[list[int]]:
    source = random.Random(0)
    vocabulary = range(json.loads((MODEL / "config.json").read_text())["vocab_size"])
    return [source.choices(vocabulary, k=source.randint(*LENGTHS)) for _ in range(NUM_PROMPTS)]


def command(hosts: int, host: int) -> list[str]:
    found = ["-m", "tree_attention.vllm", "serve", str(MODEL), "--served-model-name", "m"]
    found += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    found += ["--no-enable-prefix-caching", "--skip-tokenizer-init"]
    if hosts > 1:
        found += ["--tensor-parallel-size", str(hosts), "--nnodes", str(hosts)]
        found += ["--node-rank", str(host), "--master-addr", "host0"]
        found += ["--headless"] if host else []
    return found


def growth(rows: Sequence[Mapping[str, Any]]) -> float:
    """Bytes by which a host grows in a thousand answers, from the first line to the last."""
    first, last = rows[0], rows[-1]
    if first is last:
        return 0.0
    _, hosts = ARMS[first["engine"]]
    answered = last["answered"] - first["answered"]
    return (last["resident_bytes"] - first["resident_bytes"]) * 1000 / (hosts * answered)


def report_of(rows: list[dict[str, Any]], rate: float, **versions: str) -> Report:
    measured = [row for row in rows if "reason" not in row]
    for row in rows:
        row["name"] = f"{row['engine']}, {row.get('answered', 0)} answered"
        row["wrong"] = "reason" in row or row["lost"] + row["other"] > 0
    warnings = [f"{row['name']}: {row['reason']}" for row in rows if "reason" in row]
    warnings += [f"{row['name']}: {why}" for row in measured for why in row["reasons"]]
    growths = {
        name: growth([row for row in measured if row["engine"] == name])
        for name in dict.fromkeys(row["engine"] for row in measured)
    }
    for name, found in growths.items():
        if found > max(0.0, growths.get(RIVAL, 0.0)) + FLAT:
            [*_, last] = (row for row in measured if row["engine"] == name)
            last["wrong"] = True
            warnings.append(
                f"{name}: a host grows by {found / 2**20:.1f} MiB in 1,000 requests, "
                f"vllm's by {growths.get(RIVAL, 0.0) / 2**20:.1f}"
            )
    return Report(
        name="arrivals",
        title=f"Short requests at random times to vLLM, {rate:g} in a second",
        notes=NOTES,
        environment=environment(**versions),
        rows=rows,
        columns=columns_of(measured, COLUMNS),
        warnings=warnings,
    )


def _milliseconds(key: str) -> Any:
    def column(row: Mapping[str, Any]) -> str:
        median, *_, largest = (1e3 * f(row[key]) for f in (statistics.median, max))
        return f"{median:.0f}, {largest:.0f}"

    return column


COLUMNS = {
    "engine": lambda row: row["engine"],
    "answered": lambda row: f"{row['answered']:,}",
    "lost": lambda row: str(row["lost"]),
    "other tokens": lambda row: str(row["other"]),
    "first token ms (median, largest)": _milliseconds("first_token_seconds"),
    "last token ms (median, largest)": _milliseconds("last_token_seconds"),
    "memory MiB": lambda row: f"{row['resident_bytes'] / 2**20:.0f}",
    "right": lambda row: "WRONG" if row["wrong"] else "yes",
}


if __name__ == "__main__":
    sys.exit(main())
