# SPDX-License-Identifier: BSD-3-Clause
"""Gain of a second rank: a prompt and new tokens of a 1B-shaped Llama, by weights and prompts
that are split over ranks or not, or of another shape with weights of 16, 8 and 4 bits.

    sudo .venv/bin/python -m benchmarks.scaling --out benchmarks/results
    .venv/bin/python -m benchmarks.scaling --shape qwen3-30b-a3b --prompt 2048 --only bare/1 bare/2

On this machine itself and on emulated hosts, one thread for each rank; beside one process with one
thread and with as many threads as there are processors. Needs root for the emulated hosts alone.
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
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.emulation.configuration import BARE, cluster_report, measure, parser_of, run
from benchmarks.emulation.tables import link_sentences
from benchmarks.emulation.wiring import LINKS
from benchmarks.harness import published_shapes
from benchmarks.harness.measure import Load
from benchmarks.harness.published_shapes import SHAPES
from benchmarks.harness.ranks import Ranks, run_rank, start_ranks
from benchmarks.harness.report import Report, environment
from benchmarks.harness.scaling_rows import CORES, NOTES, TRUTH, columns, judged, name_of
from benchmarks.llama import make_model
from tree_attention import hf
from tree_attention.cli.generation import ArrivalRecorder
from tree_attention.exchange import Communicator

WIRINGS = {
    "lan": LINKS["lan"],
    "metro": LINKS["metro"],
    "two-level": replace(LINKS["two-level"], per_node=2),
}
NAMES = (f"{BARE}/1", f"{BARE}/2", f"{BARE}/4", "lan/2", "metro/2", "two-level/4")
DTYPES = ("bf16", "int8", "int4")
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
        "kv_bytes": output.past_key_values.num_bytes,
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


def main(arguments: list[str]) -> int:
    parser = parser_of("scaling", "scaling", NAMES)
    parser.prog = "python -m benchmarks.scaling"
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
        program, spec = ["benchmarks.scaling", "--on-rank"], {**model, "forms": chosen}
        if place == BARE:
            part = run_bare(world_size, program, spec)
        else:
            part = run(WIRINGS[place], world_size, program, spec)
        rows = rows_of(place, world_size, chosen, part.pop("results"))
        return {"rows": rows, "model": model, **part}

    name = "scaling" if parsed.shape is None else f"scaling_{parsed.shape}"
    return measure(name, NAMES, parsed, run_place, report_of, width=170)


def report_of(measured: dict[str, Any]) -> Report:
    rows = judged([row for part in measured.values() for row in part["rows"]])
    spec, *others = (part["model"] for part in measured.values())
    if any(other != spec for other in others):
        raise SystemExit("the results there are of another model or prompt: take another --out")
    shape, model = spec["shape"], f"A 1B-shaped Llama, {spec['layers']} of 16 layers, bf16"
    if shape is not None:
        of = SHAPES[shape]
        model = f"The shape of {of.title}, {of.layers} of {of.published_layers} layers"
    return cluster_report(
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
