# SPDX-License-Identifier: BSD-3-Clause
"""Tables 1 and 2 of the Tree Attention paper by its own protocol, on the ranks of torchrun.

    torchrun --nproc-per-node 8 -m lab.papers.protocol --shape 8B --device cuda
    sudo .venv/bin/python -m lab.emulation --hosts 2 --link lan -- \\
        .venv/bin/python -m lab.papers.protocol --layers 1 --contexts 512 --trials 3

A Llama with random weights, or a trained model (`--model`), reads a prompt and makes ten tokens,
ten times by each method in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness.llama_model import make_model
from benchmarks.harness.program import add_device, add_out, check_device, finish
from benchmarks.harness.ranks import Ranks, joined_device
from benchmarks.harness.report import Report, verdict
from benchmarks.scaling import generate
from tree_attention import hf, ring_decode, ring_pass_q_decode, tree_decode
from tree_attention.exchange import Communicator, StrategyName

from ..emulation.generation import by
from .comparison import Row, comparison, number
from .tables import TABLES, TOKENS, Table
from .tree_allreduce import NAME, registered

Decode = Callable[..., tuple[Tensor, Tensor]]
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {},
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
LAYERS = {"1B": 16, "8B": 32}
CONTEXTS = {"1B": (8_000, 16_000, 20_000, 32_000), "8B": (32_000, 64_000, 128_000, 256_000)}
TIMEOUT = 600.0

OURS = "ours"


def expanded(decode: Decode) -> Decode:
    """Every query head with a key head of its own, made at every step, as the published code."""

    def call(q: Tensor, k: Tensor, v: Tensor, *ranges: Tensor, **options: Any) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return decode(q, k, v, *ranges, **options)

    return call


PUBLISHED_TREE, PUBLISHED_RING = "tree as published", "ring as published"
TREE_STEPS = "tree of 3 log2 p steps"
METHODS: dict[str, Decode | None] = {
    PUBLISHED_TREE: expanded(partial(tree_decode, strategy="three_allreduce")),
    TREE_STEPS: expanded(partial(tree_decode, strategy=cast(StrategyName, NAME))),
    PUBLISHED_RING: expanded(ring_decode),
    "ring of key heads": ring_decode,
    "ring, passing queries": ring_pass_q_decode,
    OURS: None,
}
# Sums by an all-reduce round otherwise, which may change a token of random weights.
ROUNDS_OTHERWISE = (PUBLISHED_TREE, TREE_STEPS)


@registered()
def measure(
    model: Any,
    contexts: Sequence[int],
    trials: int,
    tokens: int,
    ranks: Ranks,
    text: Tensor | None = None,
) -> list[Row]:
    """The rows, on every rank; each trial is as long as that of the slowest rank.

    `text`: token ids with which prompts begin, of a trained model, by which all methods have to
    write the same.
    """
    comms = {name: Communicator() for name in METHODS}
    rows = []
    for context in contexts:
        prompt = torch.arange(context)[None] * 7919 % model.config.vocab_size
        if text is not None:
            prompt = text[:, :context]
        prompt = prompt.to(model.device)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
        made: dict[str, set[tuple[int, ...]]] = {name: set() for name in METHODS}
        for trial in range(1 + trials):  # the first one connects and allocates
            for name, decode in METHODS.items():
                hf.enable(model, comms[name], timeout=TIMEOUT)
                with nullcontext() if decode is None else by(decode):
                    result = generate(model, prompt, tokens)
                every = ranks.gather((result["prefill_seconds"], sum(result["gaps"])))
                if trial:
                    prefill, decoding = (max(values) for values in zip(*every, strict=True))
                    times[name].append((prefill, decoding))
                made[name] |= set(ranks.gather(tuple(result["tokens"])))
        for name, seconds in times.items():
            prefills, decodings = zip(*seconds, strict=True)
            alone = name in ROUNDS_OTHERWISE and text is None
            others = made[name] if alone else made[name] | made[OURS]
            rows.append(
                {
                    "name": f"{context} tokens: {name}",
                    "context": context,
                    "method": name,
                    "prefill": mean_and_error(prefills),
                    "total": mean_and_error([sum(pair) for pair in seconds]),
                    "ours": statistics.mean(decodings) / (tokens - 1),
                    "same_tokens": made[name] == made[OURS],
                    "wrong": len(others) != 1,
                }
            )
    return rows


def mean_and_error(seconds: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    if len(seconds) == 1:
        return seconds[0], float("nan")
    return statistics.mean(seconds), statistics.stdev(seconds) / sqrt(len(seconds))


def table_of(shape: str, world_size: int) -> Table | None:
    """The published table of this model and world."""
    of_shape = (t for t in TABLES.values() if t.layers == LAYERS[shape])
    return next((table for table in of_shape if table.world_size == world_size), None)


def report_of(
    rows: Sequence[Row], title: str, table: Table | None, layers: int, name: str = "tree_protocol"
) -> Report:
    totals = {(row["context"], row["method"]): row["total"][0] for row in rows}

    def published(row: Row) -> str:
        index = {PUBLISHED_TREE: 0, PUBLISHED_RING: 1}.get(row["method"])
        if table is None or index is None or row["context"] not in table.seconds:
            return "-"
        seconds, errors = table.seconds[row["context"]], table.errors[row["context"]]
        return f"{seconds[index]:.2f} ± {errors[index]:.2f}"

    def more_than_ours(row: Row) -> float:
        ours = next(
            other["ours"]
            for other in rows
            if (other["context"], other["method"]) == (row["context"], OURS)
        )
        return 1e3 * (row["ours"] - ours) / layers

    def spread(pair: tuple[float, float]) -> str:
        return f"{pair[0]:.3f} ± {pair[1]:.3f}"

    return comparison(
        name,
        title,
        rows,
        {
            "prefill s": lambda row: spread(row["prefill"]),
            "with ten tokens s": lambda row: spread(row["total"]),
            "published s": published,
            "/ours": lambda row: number(
                row["total"][0] / totals[row["context"], OURS],
            ),
            "ms /token": lambda row: number(1e3 * row["ours"]),
            "ms more /token and layer": lambda row: number(more_than_ours(row)),
            "same tokens": lambda row: "yes" if row["same_tokens"] else "no",
            "right": verdict,
        },
        (
            "Mean and standard error over the trials, of the slowest rank; methods take turns. "
            "Prompts are read the same way in all, so that the difference is that of new tokens.",
            "as published: key heads expanded to query heads at every step, and for the tree three "
            "all-reduces, over Gloo rings; tree of 3 log2 p steps: trees by our messages. "
            "Any batch is right, and the rings receive one shard while they attend to another. "
            "ring of key heads: without the expansion.",
            "right: all ranks made the same tokens, those of ours by a trained model or where the "
            "method has its bits. Weights are random unless the title names a model.",
        ),
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.papers.protocol")
    parser.add_argument("--shape", choices=SHAPES, default="1B", help="of Llama (default 1B)")
    parser.add_argument("--layers", type=int, help="by default all of the shape")
    parser.add_argument("--model", type=Path, metavar="DIR", help="trained, continues design.md")
    parser.add_argument("--contexts", type=int, nargs="+", help="by default the paper's")
    parser.add_argument("--trials", type=int, default=10, help="(default 10)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="new ones (default 10)")
    add_device(parser)
    add_out(parser, "tree_protocol")
    parsed = parser.parse_args(arguments)
    check_device(parser, parsed.device)
    layers, contexts = parsed.layers or LAYERS[parsed.shape], parsed.contexts
    name, all_layers = "tree_protocol", LAYERS[parsed.shape]
    of_model = f"A Llama of {parsed.shape}'s shape, {layers} of {all_layers} layers"
    with joined_device(parsed.device) as (world, device), torch.inference_mode():
        table, text = table_of(parsed.shape, world.size), None
        if parsed.model is None:
            model = make_model(layers, **SHAPES[parsed.shape])
        else:
            model, text = trained(parsed.model)
            table, layers, of_model = None, model.config.num_hidden_layers, parsed.model.name
            name += f"_{of_model}"
        contexts, trials, tokens = contexts or CONTEXTS[parsed.shape], parsed.trials, parsed.tokens
        rows = measure(model.to(device), contexts, trials, tokens, Ranks(), text)
        title = f"{of_model}, on {world.size} ranks: a prompt and {tokens} tokens"
        report = report_of(rows, title, table, layers, name)
        return finish(report, parsed.out) if world.root else int(bool(report.wrong))


def trained(folder: Path) -> tuple[Any, Tensor]:
    """A checkpoint, and the token ids of a text that it can continue."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    text = (Path(__file__).parents[2] / "docs/design.md").read_text()
    return model, AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
