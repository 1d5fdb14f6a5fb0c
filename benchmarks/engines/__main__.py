# SPDX-License-Identifier: BSD-3-Clause
"""Whole generations by this library and by other inference engines, in turn, on two threads.

    benchmarks/engines/setup vllm                    # also openvino, llama_cpp: once
    python -m benchmarks.engines --out benchmarks/results
    python -m benchmarks.engines --out benchmarks/results --only 65536/ours 65536/vllm
    python -m benchmarks.engines --out benchmarks/results --layers 16 --only 4096/ours_int8

What was measured before and is in DIR stays there until it is measured again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import torch

from ..harness import measure
from ..harness.program import add_out, finish, progress_bar
from ..harness.report import ROOT, Report, columns_of, environment, write
from . import checkpoint
from .drivers.timing import THREADS

ENVIRONMENTS = ROOT / "benchmarks" / "engines" / ".environments"
CONTEXTS = (4096, 16384, 65536, 131072)
# The report for each number of layers: with all of them the head is a small part of the weights.
REPORTS = {checkpoint.LAYERS: "engines", 16: "engines_weights"}
PROBE_BYTES = 1 << 30
GIB = 1 << 30
# Freed memory is kept: else every large tensor of a prompt is pages that the system has to clear.
KEEP_MEMORY = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184"


@dataclass(frozen=True)
class Engine:
    """An engine to start: the module in `drivers`, its form, and the environment that it needs."""

    driver: str
    form: str
    environment: str | None = None  # None: that of this program
    variables: dict[str, str] = field(default_factory=dict)
    wide: str | None = None  # the same engine with weights of 16 bits, if its own are quantised


VLLM = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
ENGINES = {
    "ours": Engine("huggingface", "ours"),
    "ours_compiled": Engine("huggingface", "compiled"),
    "huggingface": Engine("huggingface", "static"),
    "vllm": Engine("vllm", "default", "vllm", VLLM),
    "openvino": Engine("openvino", "bf16", "openvino"),
    "llama_cpp": Engine("llama_cpp", "f16", "llama_cpp"),
    "llama_cpp_flash": Engine("llama_cpp", "f16-flash", "llama_cpp"),
    "llama_cpp_bf16_flash": Engine("llama_cpp", "bf16-flash", "llama_cpp"),
    "ours_int8": Engine("huggingface", "int8", wide="ours"),
    "vllm_w8a8": Engine("vllm", "w8a8", "vllm", VLLM, wide="vllm"),
    "openvino_int8": Engine("openvino", "int8", "openvino", wide="openvino"),
    "llama_cpp_q8_0": Engine("llama_cpp", "q8_0-flash", "llama_cpp", wide="llama_cpp_flash"),
    "ours_int4": Engine("huggingface", "int4", wide="ours"),
    "openvino_int4": Engine("openvino", "int4", "openvino", wide="openvino"),
    "llama_cpp_q4_0": Engine("llama_cpp", "q4_0-flash", "llama_cpp", wide="llama_cpp_flash"),
}
REFERENCE, RIVAL = "huggingface", "vllm"
# The first new token of these must be one of so many that the reference finds likeliest. Logits of
# 4 bits correlate with it by 0.7 only where 16 layers are random, so that any rank may be right.
JUDGED, WITHIN = ("ours", "ours_compiled", "ours_int8"), 10
NAMES = [f"{context}/{engine}" for context in CONTEXTS for engine in ENGINES]

NOTES = (
    "The model has the shape of Llama 3.2 1B with {layers} of 16 layers and random "
    "weights in bfloat16; the prompt is random tokens, read from an empty cache. All engines have "
    "the same checkpoint, the same two cores, a process of their own, their own defaults and a "
    "malloc that keeps freed memory; each generates from shorter prompts first, untimed. The "
    "engines take turns. ours_compiled is ours with the model's forward compiled by torch.compile, "
    "as vLLM's is by default.",
    "llama_cpp has the weights in float16, llama_cpp_bf16_flash in bfloat16; flash is with its "
    "flash attention.",
    "Decode is the mean time between new tokens, of the faster round; the other rounds are in "
    "brackets. Prefill is the prompt's tokens over the time to the first new token, likewise. "
    "Loading and compiling are not in them.",
    "Weights GB: what the engine loads, in its own format, of which each token reads all, as the "
    "embedding is the head too. % read: these, and keys and values, over decode, as a share of the "
    "bandwidth of a probe that reads memory on the same cores just before each run.",
    "GiB: the largest resident memory of the process, with what loading took. Same tokens: how "
    "many of the first new tokens are those of HuggingFace; bfloat16 rounds differently where "
    "sums are cut differently. Rank: of the first new token among the 100 that HuggingFace finds "
    f"likeliest. Beyond {WITHIN} ours is WRONG, but for 4 bits.",
)
NOTES_OF_WEIGHTS = (
    "Quantised weights are compared with the same engine's of 16 bits in rate / 16 bits: new "
    "tokens a second over those of its row. They change the tokens of a random model, those of 4 "
    "bits even the first; weights_dtype.md has the accuracy of ours.",
    "ours_int8, vllm_w8a8 and openvino_int8 have a scale for each output, ours_int4 and "
    "openvino_int4 one for each 128 inputs, and OpenVINO zero points too; llama.cpp has a scale "
    "for each 32 inputs. The embedding, which is the head, stays in bfloat16 in ours and in vLLM "
    "and is in 8 bits in OpenVINO; llama.cpp's quantiser writes it in Q8_0, and in Q6_K beside "
    "Q4_0. Activations stay in bfloat16 in ours and in OpenVINO; vLLM and llama.cpp round them to "
    "8 bits. llama.cpp multiplies quantised weights without AMX, as its product with AMX ended the "
    "process.",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="CONTEXT/ENGINE")
    parser.add_argument(
        "--layers",
        type=int,
        choices=REPORTS,
        default=checkpoint.LAYERS,
        help="of the model: 16 of them are another report, engines_weights (default 4)",
    )
    parser.add_argument("--rounds", type=int, default=2, help="of the engines (default 2)")
    parser.add_argument("--tokens", type=int, default=17, help="new tokens (default 17)")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="where the model is or will be written, 1 to 13 GB (default .cache/NAME)",
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=ENVIRONMENTS,
        metavar="DIR",
        help="what engines/setup made, one folder for each engine",
    )
    add_out(parser, "engines or engines_weights")
    parsed = parser.parse_args()
    report, layers = REPORTS[parsed.layers], parsed.layers
    parsed.checkpoint = parsed.checkpoint or ROOT / ".cache" / report
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < THREADS:
        parser.error(f"needs {THREADS} processors, has {len(cpus)}")
    rows = {} if parsed.out is None else rows_before(parsed.out / f"{report}.json")
    with progress_bar(True) as progress:
        task = progress.add_task("checkpoint", total=parsed.rounds * len(parsed.only))
        checkpoint.make(parsed.checkpoint, layers)
        for context in CONTEXTS:
            chosen = [name for name in parsed.only if name.startswith(f"{context}/")]
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
            for _ in range(parsed.rounds):
                for name in chosen:
                    progress.update(task, description=name)
                    runs[name].append(run(name, parsed, cpus[:THREADS]))
                    rows[name] = row_of(name, runs[name], layers)
                    if parsed.out is not None:  # after each, as the whole takes long
                        write(report_of(rows, cpus, layers), parsed.out)
                    progress.advance(task)
    return finish(report_of(rows, cpus, layers), None, width=170)


def rows_before(path: Path) -> dict[str, Any]:
    return {r["name"]: r for r in json.loads(path.read_text())["rows"]} if path.exists() else {}


def run(name: str, parsed: argparse.Namespace, cpus: Sequence[int]) -> dict[str, Any]:
    """One generation in a process of its own: its result, or the reason why there is none."""
    context, engine = name.split("/")
    spec, bandwidth = ENGINES[engine], read_bandwidth()
    python = sys.executable
    variables = {**on(cpus), **spec.variables}
    inherited = dict(os.environ)
    if spec.environment is not None:
        python = str(parsed.environments / spec.environment / "bin" / "python")
        if not Path(python).exists():
            return {"reason": f"not installed: benchmarks/engines/setup {spec.environment}"}
        inherited.pop("PYTHONPATH", None)  # which may lead to an extension for another torch
    command = [python, "-m", f"benchmarks.engines.drivers.{spec.driver}", str(parsed.checkpoint)]
    command += [spec.form, context, str(parsed.tokens)]
    done = subprocess.run(
        command, cwd=ROOT, env=inherited | variables, capture_output=True, text=True
    )
    if done.returncode:
        return {"reason": reason_of(done)}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "read_bandwidth": bandwidth}


def reason_of(failed: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in failed.stderr.splitlines() if line.strip()] or ["no message"]
    return f"ended with status {failed.returncode}: {lines[-1].strip()[:160]}"


def on(cpus: Sequence[int]) -> dict[str, str]:
    """The variables with which a process computes on these processors, with a thread on each."""
    return {
        "OMP_NUM_THREADS": str(len(cpus)),
        "OMP_PROC_BIND": "close",
        "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in cpus),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "HF_HUB_OFFLINE": "1",
        "GLIBC_TUNABLES": KEEP_MEMORY,
    }


def read_bandwidth() -> float:
    """Bytes per second that the threads read; leaves this process free to run anywhere."""
    torch.set_num_threads(THREADS)
    allowed = os.sched_getaffinity(0)
    measure.pin_threads()
    memory = torch.ones(PROBE_BYTES, dtype=torch.uint8)
    functions = {"read": lambda _: measure.read_memory(memory)}
    samples = measure.time_alternating(functions, num_sets=1)
    os.sched_setaffinity(0, allowed)
    return PROBE_BYTES / samples["read"].median


def row_of(name: str, runs: Sequence[dict[str, Any]], layers: int) -> dict[str, Any]:
    context, engine = name.split("/")
    row: dict[str, Any] = {"name": name, "context": int(context), "engine": engine, "wrong": False}
    finished = [r for r in runs if "reason" not in r]
    if len(finished) < len(runs):
        return row | {"reason": next(r["reason"] for r in runs if "reason" in r)}
    steps = [[b - a for a, b in pairwise(r["seconds"])] for r in finished]
    num_bytes = finished[0]["weights_bytes"] + checkpoint.kv_bytes(int(context), layers)
    token_seconds = [statistics.mean(s) for s in steps]
    shares = [
        num_bytes / seconds / r["read_bandwidth"]
        for seconds, r in zip(token_seconds, finished, strict=True)
    ]
    return row | {
        "version": finished[0]["engine"],
        "token_seconds": token_seconds,
        "prefill_seconds": [r["seconds"][0] for r in finished],
        "read_share": max(shares),
        "peak_resident_bytes": max(r["peak_resident_bytes"] for r in finished),
        "weights_bytes": finished[0]["weights_bytes"],
        "tokens": finished[0]["tokens"],
        "runs": runs,
    }


def report_of(rows: dict[str, Any], cpus: Sequence[int], layers: int) -> Report:
    ordered = [judged(rows[name], rows) for name in NAMES if name in rows]
    lines = [(row, rows) for row in ordered if "reason" not in row]
    versions = {row["engine"]: row["version"] for row, _ in lines}
    notes = [text.format(layers=layers) for text in NOTES]
    if any(ENGINES[row["engine"]].wide for row in ordered):
        notes += NOTES_OF_WEIGHTS
    columns = columns_of(lines, COLUMNS)
    return Report(
        name=REPORTS[layers],
        is_read_back=True,
        title=f"Generation by inference engines, {layers} layers of a 1B-shaped Llama",
        notes=notes,
        environment=environment(**{"CPUs of the engines": list(cpus[:THREADS]), **versions}),
        rows=ordered,
        columns=[column for column in columns if {*column.values} != {"-"}],
        warnings=[f"{row['name']}: {row['reason']}" for row in ordered if "reason" in row],
    )


def judged(row: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """The row with what its tokens are beside the reference's, where that was measured."""
    reference = rows.get(f"{row['context']}/{REFERENCE}", {})
    if "tokens" not in row or "tokens" not in reference:
        return row
    pairs = zip(row["tokens"], reference["tokens"], strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    likeliest = reference["runs"][0].get("likeliest", reference["tokens"][:1])
    rank = likeliest.index(row["tokens"][0]) + 1 if row["tokens"][0] in likeliest else None
    wrong = row["engine"] in JUDGED and (rank is None or rank > WITHIN)
    return row | {"same_tokens": same, "rank": rank, "wrong": wrong}


def _times(seconds: Sequence[float], text: str, factor: float) -> str:
    best, *others = sorted(seconds)
    rest = f" ({', '.join(text.format(factor * s) for s in others)})" if others else ""
    return text.format(factor * best) + rest


def _ratio(row: dict[str, Any], rows: dict[str, Any], key: str) -> str:
    rival = rows.get(f"{row['context']}/{RIVAL}", {})
    return f"{min(row[key]) / min(rival[key]):.2f}" if key in rival else "-"


def _rate_beside_wide(row: dict[str, Any], rows: dict[str, Any]) -> str:
    wide = rows.get(f"{row['context']}/{ENGINES[row['engine']].wide}", {})
    key = "token_seconds"
    return f"{min(wide[key]) / min(row[key]):.2f}" if key in wide else "-"


COLUMNS = {
    "context": lambda row, _: str(row["context"]),
    "engine": lambda row, _: row["engine"],
    "decode ms": lambda row, _: _times(row["token_seconds"], "{:.1f}", 1e3),
    "time / vllm": lambda row, rows: _ratio(row, rows, "token_seconds"),
    "rate / 16 bits": lambda row, rows: _rate_beside_wide(row, rows),
    "weights GB": lambda row, _: (
        f"{row['weights_bytes'] / 1e9:.2f}" if "weights_bytes" in row else "-"
    ),
    "% read": lambda row, _: f"{100 * row['read_share']:.0f}",
    "prefill tokens/s": lambda row, _: " ".join(
        f"{row['context'] / s:.0f}" if i == 0 else f"({row['context'] / s:.0f})"
        for i, s in enumerate(sorted(row["prefill_seconds"]))
    ),
    "prefill time / vllm": lambda row, rows: _ratio(row, rows, "prefill_seconds"),
    "GiB": lambda row, _: f"{row['peak_resident_bytes'] / GIB:.1f}",
    "same tokens": lambda row, _: (
        f"{row['same_tokens']} of {len(row['tokens'])}" if "same_tokens" in row else "-"
    ),
    "rank": lambda row, _: str(row.get("rank") or "-"),
    "right": lambda row, _: "WRONG" if row["wrong"] else "yes",
}


if __name__ == "__main__":
    sys.exit(main())
