# SPDX-License-Identifier: BSD-3-Clause
"""vLLM on two cores with its own attention and with ours, and with its context split over ranks.

benchmarks/engines/setup vllm                                        # once
python -m benchmarks.engines.serving --out benchmarks/results        # some minutes
python -m benchmarks.engines.serving --out benchmarks/results --contexts 65536
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..harness import llama_model
from ..harness.program import add_out, finish, progress_bar
from ..harness.report import ROOT, Report, columns_of, commit, environment, write
from .__main__ import ENVIRONMENTS, on, reason_of, rows_before
from .checkpoint import LAYERS, LONGEST

CONTEXTS, BATCHES = (4096, 16384), (1, 8)
LARGEST = 32768  # tokens of the prompts of a batch, which take time to be read
VOCABULARY = 32064  # a quarter of Llama's
SPACE_GIB = 2  # for keys and values, of a process
QUESTION = 64  # tokens of a request on a document


@dataclass(frozen=True)
class Engine:
    """A vLLM that is measured, and the one with which it is compared."""

    plug_in: bool
    rival: str | None = None
    block_size: int = 128
    kv_heads: int = 8
    ranks: int = 1
    context_ranks: int = 1
    one_document: bool = False
    is_cascade: bool = True


ENGINES = {
    "vllm, blocks of 128": Engine(False),
    "ours, blocks of 128": Engine(True, "vllm, blocks of 128"),
    "vllm, blocks of 32": Engine(False, block_size=32),
    "ours, blocks of 32": Engine(True, "vllm, blocks of 32", block_size=32),
    "ours, blocks of 16": Engine(True, "vllm, blocks of 32", block_size=16),
    "ours, TP 2": Engine(True, kv_heads=1, ranks=2),
    "ours, TP 2, DCP 2": Engine(
        True, "ours, TP 2", block_size=64, kv_heads=1, ranks=2, context_ranks=2
    ),
    "vllm, one document": Engine(False, one_document=True),
    "ours, one document, read by each": Engine(
        True, "vllm, one document", one_document=True, is_cascade=False
    ),
    "ours, one document": Engine(True, "ours, one document, read by each", one_document=True),
}

NOTES = (
    f"The model is a quarter of Llama 3.2 1B: {LAYERS} of 16 layers and a quarter of the "
    "vocabulary, random weights in bfloat16. TP 2 is two processes with a core each, and a model "
    "of one key head, which vLLM asks for; DCP 2 splits the keys and values over them, which vLLM "
    "by itself cannot do on a CPU. Its own attention reads blocks of multiples of 32, with which "
    "ours of 16 are compared.",
    f"A process has {SPACE_GIB} GiB for keys and values, which are 262,144 tokens: requests that "
    "have more together would not be under way at once, and are left out.",
    "First token: the seconds of a request alone, which reads the whole prompt. Then come the "
    "requests of the batch at once, with prompts of their own, of which the first is in the prefix "
    "cache. Between tokens: the median of the steps in which each request got a token. New "
    "tokens/s: of the batch, from its first request to its last token; of a prompt that is in the "
    "cache the last block is read again, which has the block size times the ranks of DCP tokens: "
    "both rows with TP 2 read 128 again, as DCP 2 has blocks of 64.",
    "One document: the first prompt is the document, and each request has it and a question of "
    f"{QUESTION} tokens. The prefix cache has the document, which is in memory once; in a step "
    "each request reads it, or all together once.",
    "Ratios are the rival's time over this one's, or this one's tokens/s over the rival's: above 1 "
    "is faster than the rival, the engine of the row that is named. Tokens per GiB: the context "
    "that a process keeps in a GiB of its memory.",
    "Same tokens: the share of the new tokens before and with the first one that differs from the "
    "rival's, over the requests. bfloat16 rounds differently where sums are cut differently; none "
    "at all is WRONG.",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines.serving", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument(
        "--largest",
        type=int,
        default=LARGEST,
        help=f"tokens of the prompts of a batch; larger ones are left out (default {LARGEST})",
    )
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=[*ENGINES], metavar="ENGINE")
    parser.add_argument("--tokens", type=int, default=17, help="new ones of a request (default 17)")
    parser.add_argument(
        "--environment",
        type=Path,
        default=ENVIRONMENTS / "vllm",
        metavar="DIR",
        help="what engines/setup made",
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=ROOT / ".cache" / "engines",
        metavar="DIR",
        help="where models are or will be written (default .cache/engines)",
    )
    add_out(parser, "serving")
    parsed = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        parser.error(f"needs 2 processors, has {len(cpus)}")
    if not (parsed.environment / "bin" / "python").exists():
        parser.error(f"no {parsed.environment}: benchmarks/engines/setup vllm")
    cases = [
        (context, batch)
        for context in parsed.contexts
        for batch in parsed.batches
        if context * batch <= parsed.largest
    ]
    rows = {} if parsed.out is None else rows_before(parsed.out / "serving.json")
    with progress_bar(True) as progress:
        task = progress.add_task("checkpoint", total=len(parsed.only))
        for name in parsed.only:
            progress.update(task, description=name)
            rows.update(rows_of(name, cases, run(ENGINES[name], cases, parsed, cpus[:2])))
            if parsed.out is not None:  # after each, as the whole takes long
                write(report_of(rows), parsed.out)
            progress.advance(task)
    return finish(report_of(rows), None, width=170)


def make_checkpoint(directory: Path, kv_heads: int) -> Path:
    """The model, which is written where it is not yet."""
    path = directory / f"serving-{kv_heads}"
    if not (path / "model.safetensors").exists():
        configuration = llama_model.configuration(
            LAYERS,
            vocab_size=VOCABULARY,
            num_key_value_heads=kv_heads,
            max_position_embeddings=LONGEST,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            bos_token_id=None,
            eos_token_id=None,
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(configuration, dtype=torch.bfloat16)
        model.save_pretrained(path)
    return path


def run(
    engine: Engine,
    cases: Sequence[tuple[int, int]],
    parsed: argparse.Namespace,
    cpus: Sequence[int],
) -> dict[str, Any]:
    """The driver's result, or the reason why there is none."""
    spec = {
        "cases": cases,
        "tokens": parsed.tokens,
        "vocabulary": VOCABULARY,
        "question": QUESTION * engine.one_document,
        "options": {
            "model": str(make_checkpoint(parsed.checkpoints, engine.kv_heads)),
            "block_size": engine.block_size,
            "tensor_parallel_size": engine.ranks,
            "decode_context_parallel_size": engine.context_ranks,
            "cp_kv_cache_interleave_size": engine.block_size,
        },
    }
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables = on(cpus) | {
        "TREE_ATTENTION_VLLM": str(int(engine.plug_in)),
        "TREE_ATTENTION_VLLM_CASCADE": str(int(engine.is_cascade)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(engine.ranks > 1)),
        "VLLM_CPU_KVCACHE_SPACE": str(SPACE_GIB),
    }
    if engine.ranks > 1:  # vLLM starts them, and binds them by this variable alone
        for name in ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES"):
            del variables[name]
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cpus))
    done = subprocess.run(
        [
            parsed.environment / "bin" / "python",
            "-m",
            "benchmarks.engines.drivers.serving",
            json.dumps(spec),
        ],
        cwd=ROOT,
        env=inherited | variables,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {"reason": reason_of(done)}
    # Processes of the engine may say something at their end.
    [line] = [line for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    result: dict[str, Any] = json.loads(line)
    return result


def rows_of(name: str, cases: Sequence[tuple[int, int]], result: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for index, (context, batch) in enumerate(cases):
        row: dict[str, Any] = {"name": f"{context} x {batch}, {name}", "wrong": False}
        row |= {"context": context, "batch": batch, "engine": name, "commit": commit()}
        if "reason" in result:
            row["reason"] = result["reason"]
        else:
            cold, whole = (result["rows"][index][key] for key in ("cold", "batch"))
            num_tokens = sum(len(tokens) for tokens in whole["tokens"])
            row |= {
                "version": result["engine"],
                "first_token_seconds": cold["first_token_seconds"][0],
                "cached_first_token_seconds": whole["first_token_seconds"],
                "token_seconds": whole["token_seconds"],
                "tokens_per_second": num_tokens / whole["seconds"],
                "tokens_per_gib": result["cache_tokens"] * ENGINES[name].context_ranks / SPACE_GIB,
                "tokens": whole["tokens"],
            }
        found[str(row["name"])] = row
    return found


def report_of(rows: dict[str, Any]) -> Report:
    order = {name: index for index, name in enumerate(ENGINES)}
    ordered = sorted(rows.values(), key=lambda r: (r["context"], r["batch"], order[r["engine"]]))
    ordered = [judged(row, rows) for row in ordered]
    measured = [row for row in ordered if "reason" not in row]
    versions, commits = ({row[key] for row in measured} for key in ("version", "commit"))
    return Report(
        name="serving",
        is_read_back=True,
        title=f"vLLM with its own attention and with ours, {LAYERS} layers of a 1B-shaped Llama",
        notes=NOTES,
        environment=environment(
            vllm=", ".join(sorted(versions)), commit=", ".join(sorted(commits))
        ),
        rows=ordered,
        columns=columns_of([(row, rival_of(row, rows)) for row in measured], COLUMNS),
        warnings=[f"{row['name']}: {row['reason']}" for row in ordered if "reason" in row],
    )


def rival_of(row: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any] | None:
    rival = ENGINES[row["engine"]].rival
    found = rows.get(f"{row['context']} x {row['batch']}, {rival}")
    return None if found is None or "reason" in found else found


def judged(row: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """The row with the share of its tokens that are the rival's."""
    rival = rival_of(row, rows)
    if rival is None or "reason" in row:
        return row
    same = total = 0
    for own, others in zip(row["tokens"], rival["tokens"], strict=True):
        differ = [a != b for a, b in zip(own, others, strict=True)]
        same, total = same + (differ.index(True) if any(differ) else len(own)), total + len(own)
    return row | {"same_tokens": same / total, "wrong": same == 0}


def _ratio(text: str, ratio: float | None) -> str:
    return text if ratio is None else f"{text} ({ratio:.2f})"


def _column(key: str, text: str, factor: float, more_is_better: bool = False) -> Any:
    def column(row: dict[str, Any], rival: dict[str, Any] | None) -> str:
        ratio = None
        if rival is not None:
            ratio = row[key] / rival[key] if more_is_better else rival[key] / row[key]
        return _ratio(text.format(factor * row[key]), ratio)

    return column


COLUMNS = {
    "context": lambda row, _: str(row["context"]),
    "batch": lambda row, _: str(row["batch"]),
    "engine": lambda row, _: row["engine"],
    "first token s": _column("first_token_seconds", "{:.2f}", 1),
    "between tokens ms": _column("token_seconds", "{:.1f}", 1e3),
    "new tokens/s": _column("tokens_per_second", "{:.1f}", 1, more_is_better=True),
    "tokens per GiB": _column("tokens_per_gib", "{:.0f}", 1, more_is_better=True),
    "same tokens": lambda row, _: (
        f"{100 * row['same_tokens']:.0f} %" if "same_tokens" in row else "-"
    ),
    "right": lambda row, _: "WRONG" if row["wrong"] else "yes",
}


if __name__ == "__main__":
    sys.exit(main())
