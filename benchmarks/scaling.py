# SPDX-License-Identifier: BSD-3-Clause
"""Gain of a second rank: a prompt and new tokens of a 1B-shaped Llama, by weights and prompts
that are split over ranks or not, or of another shape with weights of 16, 8 and 4 bits.

    .venv/bin/python benchmarks/scaling.py --out benchmarks/results
    .venv/bin/python benchmarks/scaling.py --shape qwen3-30b-a3b --prompt 2048 --only bare/1 bare/2

One thread for each rank, beside one process with one thread and with as many threads as there are
processors. `python -m lab.emulation.scaling` does the same on emulated hosts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness import published_shapes
from benchmarks.harness.llama_model import make_model
from benchmarks.harness.measure import Load
from benchmarks.harness.places import (
    BARE,
    link_sentences,
    measure,
    milliseconds,
    places_parser,
    report_of_places,
)
from benchmarks.harness.published_shapes import SHAPES
from benchmarks.harness.ranks import Ranks, run_rank, start_ranks
from benchmarks.harness.report import Column, Report, columns_of, environment, verdict
from tree_attention import hf
from tree_attention.cli.generation import ArrivalRecorder
from tree_attention.exchange import Communicator
from tree_attention.hf import CACHE_NAME

NAMES = (f"{BARE}/1", f"{BARE}/2", f"{BARE}/4")
DTYPES = ("bf16", "int8", "int4")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
TRUTH = "float32"
_MIB = 1 << 20

NOTES = (
    "A row is named place/ranks: bare is this machine, and every emulated host is one rank. Each "
    "rank has one thread; a thread has a processor of its own where there are enough. prefill is "
    "the time to the first new token, and ms per token the median gap between the following ones, "
    "of the slowest rank. A short prompt is generated from before, untimed.",
    "of ideal: the time of one process with one thread, divided by the number of processors that "
    "the ranks or threads have, over the time of the row.",
    "Bytes are what the rank sent that sent most, for the prompt and for each further token; "
    "weights and key/value are what the largest rank keeps.",
    "The model has a published shape with fewer layers and random weights; activations are bf16, "
    "which rounds differently where a sum is cut differently: same tokens counts those before the "
    "first that differs from one process with one thread and the same dtype of weights. The head "
    "stays bf16. error is the largest error of the first token's logits relative to the largest "
    "logit, against float32 arithmetic; more than twice that of one process with the same dtype "
    "plus one rounding, or ranks that differ in a token, are WRONG.",
)
# Place, ranks, the module with its options, and its specification: as `run_bare`.
RunElsewhere = Callable[[str, int, Sequence[str], dict[str, Any]], dict[str, Any]]
_TIMEOUT = 600.0
_WARM_UP_TOKENS = 256
# Logits of every so many tokens of the vocabulary are compared.
_EVERY = 997


def form(
    weights: str = "whole",
    tensor_parallel_size: int = 1,
    prefill: str = "replicated",
    threads: int = 1,
    dtype: str = "bf16",
) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "weights": weights,
        "tensor_parallel_size": tensor_parallel_size,
        "prefill": prefill,
        "threads": threads,
    }


def forms(world_size: int, dtypes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the forms that are measured: with `dtypes`, of a shape whose checkpoint is read."""
    if dtypes:
        counts = sorted({1, CORES}) if world_size == 1 else [1]
        sizes = [1] if world_size == 1 else [1, 2]
        kind = "whole" if world_size == 1 else "split"
        of_dtypes = [
            form(kind, size, threads=n, dtype=dtype)
            for dtype in dtypes
            for size in sizes
            for n in counts
        ]
        return [form(TRUTH, threads=CORES), *of_dtypes] if world_size == 1 else of_dtypes
    if world_size == 1:
        return [form(TRUTH, threads=CORES), *(form(threads=n) for n in sorted({1, CORES}))]
    split = [form("split", size) for size in (1, 2)]
    return [form(), form(prefill="split"), *split]


def generate(model: Any, prompt: Tensor, tokens: int) -> dict[str, Any]:
    """This rank's times, bytes, tokens and logits of a generation."""
    # Held here, as those of an earlier form would be forgotten while this one is counted.
    comms = list(Communicator.by_name.values())
    before = sum(comm.bytes_sent for comm in comms)
    recorder = ArrivalRecorder(comms)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        streamer=recorder,
        do_sample=False,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    first, last = recorder.arrivals[0], recorder.arrivals[-1]
    gaps = [b.seconds - a.seconds for a, b in pairwise(recorder.arrivals)]
    return {
        "prefill_seconds": first.seconds,
        "prefill_bytes": first.merge_bytes - before,
        "gaps": gaps,
        "bytes": (last.merge_bytes - first.merge_bytes) // max(1, len(gaps)),
        "waiting": (last.exchange_seconds - first.exchange_seconds) / sum(gaps) if gaps else 0.0,
        "kv_bytes": output[CACHE_NAME].num_bytes,
        "tokens": [arrival.token for arrival in recorder.arrivals],
        "logits": output.logits[0][0, ::_EVERY].float().tolist(),
    }


def weights_bytes(model: torch.nn.Module) -> int:
    """Size in bytes of the memory behind the parameters, of which tied ones share theirs."""
    storages = (parameter.untyped_storage() for parameter in model.parameters())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def run_form(form: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """A form on this rank, from a model of its own."""
    torch.set_num_threads(form["threads"])
    tokens, chunk = spec["tokens"] + 1, spec["chunk"]
    options = {"prefill_chunk_size": chunk, "timeout": _TIMEOUT}
    if form["weights"] == TRUTH:
        tokens = 1
    if spec["checkpoint"] is not None:
        model = hf.from_pretrained(
            spec["checkpoint"],
            tensor_parallel_size=form["tensor_parallel_size"],
            dtype=torch.float32 if form["weights"] == TRUTH else None,
            weights=None if form["dtype"] == "bf16" else form["dtype"],
            **options,
        )
    else:
        model = make_model(spec["layers"])
        if form["weights"] == TRUTH:
            model = model.float()
        if form["weights"] == "split":
            hf.parallelize(model, tensor_parallel_size=form["tensor_parallel_size"])
        hf.enable(model, prefill=form["prefill"], **options)
    prompt = torch.arange(spec["prompt"])[None] * 7919 % model.config.vocab_size
    generate(model, prompt[:, :_WARM_UP_TOKENS], 2)
    found = {**generate(model, prompt, tokens), "weights_bytes": weights_bytes(model)}
    del model
    gc.collect()
    return found


def run_on_rank(specification: Path, out: Path) -> None:
    """On every rank: the results of all ranks for each form, on rank 0 in `out`."""
    spec = json.loads(specification.read_text())

    def run_forms(ranks: Ranks) -> list[list[dict[str, Any]]]:
        return [ranks.gather(run_form(form, spec)) for form in spec["forms"]]

    run_rank(out, run_forms)


def run_bare(world_size: int, program: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
    """Return what ranks that torchrun starts here report, as `run` of emulated hosts."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Load() as load:
        file = Path(folder) / "spec.json"
        file.write_text(json.dumps(spec))
        before = os.times()
        # More threads than one are asked for by the form.
        results = start_ranks(world_size, ["-m", *program, str(file)])
        after = os.times()
    seconds = time.monotonic() - begin
    ours = (sum(after[2:4]) - sum(before[2:4])) / (CORES * seconds)
    return {
        "results": results,
        "links": [],
        "other_load": None if load.busy is None else max(0.0, load.busy - ours),
        "seconds": seconds,
        "environment": environment(),
    }


def rows_of(
    place: str, world_size: int, forms: Sequence[dict[str, Any]], results: Sequence[Any]
) -> list[dict[str, Any]]:
    rows = []
    for form, ranks in zip(forms, results, strict=True):
        gaps = [max(times) for times in zip(*(rank["gaps"] for rank in ranks), strict=True)]
        rows.append(
            {
                "name": f"{place}/{world_size} {name_of({**form, 'world_size': world_size})}",
                "link": place,
                "world_size": world_size,
                **form,
                "gaps": gaps,
                "token_seconds": statistics.median(gaps) if gaps else None,
                **{
                    field: max(rank[field] for rank in ranks)
                    for field in (
                        "prefill_seconds",
                        "prefill_bytes",
                        "bytes",
                        "waiting",
                        "weights_bytes",
                        "kv_bytes",
                    )
                },
                "tokens": ranks[0]["tokens"],
                "logits": ranks[0]["logits"],
                "ranks_agree": all(
                    rank[field] == ranks[0][field]
                    for rank in ranks
                    for field in ("tokens", "logits")
                ),
            }
        )
    return rows


def name_of(row: dict[str, Any]) -> str:
    dtype = "" if row["dtype"] == "bf16" else f", {row['dtype']}"
    if row["world_size"] == 1:
        return f"1 process, {row['threads']} thread{'s' * (row['threads'] > 1)}{dtype}"
    if row["weights"] == "split":
        return f"weights split, tensor_parallel_size {row['tensor_parallel_size']}{dtype}"
    return f"weights whole, prompt {row['prefill']}"


def judged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each beside one process with one thread, as far as that was measured."""
    bare = [row for row in rows if row["link"] == BARE]
    truth = next((row for row in bare if _is_one(row, TRUTH)), None)
    ones = {row["dtype"]: row for row in bare if _is_one(row, "whole")}
    result = []
    for row in rows:
        row, one = {**row, "wrong": not row["ranks_agree"]}, ones.get(row["dtype"])
        if truth is not None and one is not None and row is not truth:
            error, bound = (_error(x["logits"], truth["logits"]) for x in (row, one))
            row["error"] = error
            row["wrong"] |= not error <= 2 * bound + torch.finfo(torch.bfloat16).eps
        if one is not None and row["gaps"]:
            cores = min(CORES, row["world_size"] * row["threads"])
            pairs = zip(row["tokens"], one["tokens"], strict=True)
            row |= {
                "prefill_of_ideal": one["prefill_seconds"] / cores / row["prefill_seconds"],
                "token_of_ideal": one["token_seconds"] / cores / row["token_seconds"],
                "same_tokens": len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))),
            }
        result.append(row)
    return result


def _is_one(row: dict[str, Any], weights: str) -> bool:
    threads = CORES if weights == TRUTH else 1
    return (row["world_size"], row["weights"], row["threads"]) == (1, weights, threads)


def _error(logits: Sequence[float], truth: Sequence[float]) -> float:
    """The largest error of a logit relative to the largest logit."""
    found, expected = torch.tensor(logits), torch.tensor(truth)
    return ((found - expected).abs().max() / expected.abs().max()).item()


def columns(rows: list[dict[str, Any]]) -> list[Column]:
    def share(row: dict[str, Any], field: str) -> str:
        return f"{row[field]:.2f}" if field in row else "-"

    def mib(num_bytes: int) -> str:
        return f"{num_bytes / _MIB:,.0f}"

    return columns_of(
        [row for row in rows if row["gaps"]],
        {
            "place/ranks": lambda row: f"{row['link']}/{row['world_size']}",
            "form": name_of,
            "prefill s": lambda row: f"{row['prefill_seconds']:.2f}",
            "of ideal": lambda row: share(row, "prefill_of_ideal"),
            "ms /token": lambda row: milliseconds(row["token_seconds"]),
            "of ideal ": lambda row: share(row, "token_of_ideal"),
            "waiting /token": lambda row: f"{row['waiting']:.0%}",
            "bytes /token": lambda row: f"{row['bytes']:,}",
            "prompt MiB sent": lambda row: mib(row["prefill_bytes"]),
            "weights MiB": lambda row: mib(row["weights_bytes"]),
            "key/value MiB": lambda row: mib(row["kv_bytes"]),
            "same tokens": lambda row: f"{row.get('same_tokens', '-')}/{len(row['tokens'])}",
            "error": lambda row: f"{row['error']:.1e}" if "error" in row else "-",
            "right": verdict,
        },
    )


def main(
    arguments: list[str],
    program: str = "benchmarks.scaling",
    names: Sequence[str] = NAMES,
    run_elsewhere: RunElsewhere | None = None,
) -> int:
    """`run_elsewhere` runs the ranks at the places of `names` that are not this machine."""
    parser = places_parser(program, "scaling", names)
    parser.add_argument("--layers", type=int, default=4, help="of 16 (default 4)")
    parser.add_argument("--shape", choices=SHAPES, help="another model, with as many layers as fit")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="of a shape")
    parser.add_argument("--checkpoints", type=Path, help="directory for the shape's weights")
    parser.add_argument("--prompt", type=int, default=16384, help="tokens (default 16384)")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a prompt at once")
    parser.add_argument("--tokens", type=int, default=16, help="timed new tokens (default 16)")
    parser.add_argument("--on-rank", type=Path, nargs=2, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.on_rank is not None:
        run_on_rank(*parsed.on_rank)
        return 0

    checkpoint = None
    if parsed.shape is not None:
        folder = parsed.checkpoints or Path(tempfile.gettempdir())
        checkpoint = published_shapes.make(parsed.shape, folder)
        parsed.layers = SHAPES[parsed.shape].layers

    def run_place(place: str, world_size: int) -> dict[str, Any]:
        model = {name: getattr(parsed, name) for name in ("layers", "prompt", "chunk", "tokens")}
        model |= {"shape": parsed.shape, "checkpoint": checkpoint and str(checkpoint)}
        chosen = forms(world_size, parsed.dtypes if parsed.shape else ())
        on_rank, spec = ["benchmarks.scaling", "--on-rank"], {**model, "forms": chosen}
        if place == BARE:
            part = run_bare(world_size, on_rank, spec)
        else:
            assert run_elsewhere is not None
            part = run_elsewhere(place, world_size, on_rank, spec)
        rows = rows_of(place, world_size, chosen, part.pop("results"))
        return {"rows": rows, "model": model, **part}

    name = "scaling" if parsed.shape is None else f"scaling_{parsed.shape}"
    return measure(name, names, parsed, run_place, report_of, width=170)


def report_of(measured: dict[str, Any]) -> Report:
    rows = judged([row for part in measured.values() for row in part["rows"]])
    spec, *others = (part["model"] for part in measured.values())
    if any(other != spec for other in others):
        raise SystemExit("the results there are of another model or prompt: take another --out")
    shape, model = spec["shape"], f"A 1B-shaped Llama, {spec['layers']} of 16 layers, bf16"
    if shape is not None:
        of = SHAPES[shape]
        model = f"The shape of {of.title}, {of.layers} of {of.published_layers} layers"
    return report_of_places(
        measured,
        name="scaling" if shape is None else f"scaling_{shape}",
        title=(
            f"{model}: a prompt of {spec['prompt']:,} tokens in chunks of {spec['chunk']:,}, then "
            f"{spec['tokens']} new ones"
        ),
        notes=NOTES,
        environment={"transformers": transformers.__version__, "processors": CORES},
        rows=rows,
        columns=columns(rows),
        summary=link_sentences(measured),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
