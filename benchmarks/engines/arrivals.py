# SPDX-License-Identifier: BSD-3-Clause
"""Short requests at random times to vLLM with our attention: none is lost, and memory stays.

    benchmarks/engines/setup vllm                                            # once
    sudo .venv/bin/python -m benchmarks.engines.arrivals --out benchmarks/results

On one emulated host and on two, with a processor each. Needs root for the emulated hosts.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..emulation.network import unsupported
from ..harness.program import add_out, finish, progress_bar
from ..harness.report import ROOT, Report, columns_of, environment
from .__main__ import ENVIRONMENTS, KEEP_MEMORY
from .servers import Failed, emulated_servers

LINK = "0.1ms,10gbit"
MODEL = ROOT / "examples" / "passkey-llama"
ARMS = {"one host": 1, "two hosts, TP 2": 2}
LINES = 10  # of each arm's table
LENGTHS = (4, 200)  # tokens of the shortest and the longest prompt
NUM_PROMPTS = 64
TOKENS = 8
FLAT = 1 << 20  # bytes by which a thousand answers may enlarge all processes together

NOTES = (
    "Each request is a prompt of 4 to 200 tokens, of 64 that there are, and gets 8 new tokens. The "
    "times between arrivals are drawn from an exponential distribution. The model is "
    "examples/passkey-llama in float32, and prefixes are not kept.",
    "Lost: an error, or an answer without a token. Other tokens: not those of the same prompt "
    "alone, before.",
    "Memory is the resident memory of all processes of the engine when so many requests were "
    "answered. After the second line of an engine it must grow by less than 1 MiB for a thousand "
    "requests.",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines.arrivals", description=__doc__.split("\n\n")[0]
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
    return finish(report_of(rows, parsed.rate), parsed.out)


def run(name: str, parsed: argparse.Namespace) -> Any:
    """Yields a row for each tenth of the requests."""
    variables = {
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
        servers.start([command(ARMS[name], host) for host in range(ARMS[name])], variables)
        for line in servers.lines_of_client("arrivals", spec):
            found = json.loads(line)
            if found["answered"]:  # the first line is of the prompts alone
                yield {"engine": name, "resident_bytes": sum(servers.memory("VmRSS")), **found}


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


def growth(rows: list[dict[str, Any]]) -> float:
    """Bytes that a thousand answers take, by least squares behind the first line."""
    memory = {row["answered"]: row["resident_bytes"] for row in rows[1:]}
    if len(memory) < 2:
        return 0.0
    return 1000 * statistics.linear_regression([*memory], [*memory.values()]).slope


def report_of(rows: list[dict[str, Any]], rate: float) -> Report:
    measured = [row for row in rows if "reason" not in row]
    for row in rows:
        row["name"] = f"{row['engine']}, {row.get('answered', 0)} answered"
        row["wrong"] = "reason" in row or row["lost"] + row["other"] > 0
    warnings = [f"{row['name']}: {row['reason']}" for row in rows if "reason" in row]
    for engine in dict.fromkeys(row["engine"] for row in measured):
        own = [row for row in measured if row["engine"] == engine]
        if (bytes_of_thousand := growth(own)) > FLAT:
            own[-1]["wrong"] = True
            warnings.append(
                f"{engine}: memory grows by {bytes_of_thousand / 2**20:.1f} MiB for 1,000 requests"
            )
    return Report(
        name="arrivals",
        title=f"Short requests at random times to vLLM, {rate:g} in a second",
        notes=NOTES,
        environment=environment(),
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
