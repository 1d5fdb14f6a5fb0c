# SPDX-License-Identifier: BSD-3-Clause
"""Decoding with a Llama 3.2 1B: HuggingFace's caches and attention beside ours, in the same cores.

    python benchmarks/llama.py --out benchmarks/results

The model has the shape of Llama 3.2 1B and random weights; the context is random keys and values
put straight into the cache, because a real prompt of this length would take minutes to read and
changes nothing about the time of a decoding step. World 1 uses all threads in one process; for
world 2 the program starts itself under torchrun with half of the threads per rank.
"""

import argparse
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import Progress
from torch import Tensor
from transformers import DynamicCache, StaticCache

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness import measure, ranks, report
from benchmarks.harness.llama_model import fill, make_model, random_context
from benchmarks.harness.program import finish, parser_of, progress_bar
from tree_attention.cli.world import World, joined_world
from tree_attention.hf import CACHE_NAME, TreeCache

DYNAMIC, STATIC = "sdpa, DynamicCache", "sdpa, StaticCache"
WORLD = "tree_attention, world {}"
CONTEXTS = (4096, 16384, 65536)


def main() -> int:
    parser = parser_of(__doc__, "llama")
    parser.add_argument("--layers", type=int, default=16, help="of the model (default 16, all)")
    parser.add_argument("--tokens", type=int, default=8, help="timed tokens (default 8)")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--ranks-json", type=Path, help=argparse.SUPPRESS)  # of its own ranks
    arguments = parser.parse_args()
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    with joined_world() as world, progress_bar(world.root) as progress, torch.inference_mode():
        cpus = measure.pin_threads(first=world.local_rank * torch.get_num_threads())
        if world.size > 1:
            times = run_ranks(arguments, world, progress)
            if world.root:
                arguments.ranks_json.write_text(json.dumps(times))
            return 0
        result = run(arguments, progress, cpus, allowed)
    return finish(result, arguments.out, width=140)


def token_at(position: int) -> Tensor:
    """The token that every decoder is given there."""
    return torch.tensor([[position * 7919 % 128256]])


class Decoder:
    """Steps the model over one cache."""

    def __init__(self, model: Any, cache: Any, context: int, attention: str) -> None:
        self.model, self.cache, self.attention = model, cache, attention
        self.position = context

    def step(self, _: int = 0) -> Tensor:
        """One token; returns its logits."""
        if self.model.config._attn_implementation != self.attention:
            self.model.set_attn_implementation(self.attention)
        output = self.model(
            input_ids=token_at(self.position),
            position_ids=torch.tensor([[self.position]]),
            **{CACHE_NAME: self.cache},
            use_cache=True,
        )
        self.position += 1
        return output.logits[0, -1]


def true_logits(model: Any, context: int) -> Tensor:
    """The first step's logits with float32 arithmetic, one layer at a time."""
    model.set_attn_implementation("sdpa")
    decoder, position = model.model, torch.tensor([[context]])
    k, v = (x.float() for x in random_context(model.config, context))
    hidden = decoder.embed_tokens(token_at(context)).float()
    rotary = decoder.rotary_emb(hidden, position)
    for layer in decoder.layers:
        exact = copy.deepcopy(layer).float()
        exact.self_attn.layer_idx = 0
        cache = DynamicCache()
        cache.update(k, v, 0)
        hidden = exact(
            hidden, position_ids=position, **{CACHE_NAME: cache}, position_embeddings=rotary
        )
    hidden = copy.deepcopy(decoder.norm).float()(hidden)
    return hidden[0, -1] @ model.lm_head.weight.float().T


def run_context(
    model: Any, context: int, tokens: int, methods: dict[str, tuple[Any, str]]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Times of each method, alternating token by token, and the logits of its first step."""
    decoders = {
        name: Decoder(model, fill(cache, model.config, context), context, attention)
        for name, (cache, attention) in methods.items()
    }
    logits = {name: decoder.step() for name, decoder in decoders.items()}
    steps = {name: decoder.step for name, decoder in decoders.items()}
    samples = measure.time_in_step(steps, num_sets=1, rounds=tokens)
    return {name: sample.to_json() for name, sample in samples.items()}, logits


def run_ranks(arguments: argparse.Namespace, world: World, progress: Progress) -> dict[str, Any]:
    """On every rank of a world: what this program asks its own ranks for."""
    name = WORLD.format(world.size)
    model = make_model(arguments.layers)
    task = progress.add_task(name, total=len(arguments.contexts))
    results = {}
    for context in arguments.contexts:
        progress.update(task, description=f"{name}, {context}")
        methods = {name: (TreeCache(model.config), "tree_attention")}
        times, logits = run_context(model, context, arguments.tokens, methods)
        results[str(context)] = {"times": times[name], "logits": logits[name].tolist()}
        progress.advance(task)
    return results


def start_ranks(
    arguments: argparse.Namespace, world_size: int, allowed: set[int]
) -> dict[str, Any]:
    if allowed:  # this thread is pinned, and processes inherit that
        os.sched_setaffinity(0, allowed)
    program = [__file__, "--layers", str(arguments.layers), "--tokens", str(arguments.tokens)]
    program += ["--contexts", *map(str, arguments.contexts), "--ranks-json"]
    results: dict[str, Any] = ranks.start_ranks(world_size, program)
    return results


def run(
    arguments: argparse.Namespace, progress: Progress, cpus: list[int], allowed: set[int]
) -> report.Report:
    model = make_model(arguments.layers)
    task = progress.add_task("llama", total=len(arguments.contexts) + 1)
    times: dict[int, dict[str, Any]] = {}
    errors: dict[int, dict[str, float]] = {}
    truths: dict[int, Tensor] = {}
    with measure.Load() as load:
        for context in arguments.contexts:
            progress.update(task, description=f"world 1, {context}")
            truths[context] = true_logits(model, context)
            room = context + arguments.tokens + 2
            methods = {
                DYNAMIC: (DynamicCache(config=model.config), "sdpa"),
                STATIC: (StaticCache(config=model.config, max_cache_len=room), "sdpa"),
                WORLD.format(1): (TreeCache(model.config), "tree_attention"),
            }
            times[context], logits = run_context(model, context, arguments.tokens, methods)
            errors[context] = {name: error(x, truths[context]) for name, x in logits.items()}
            del methods, logits
            progress.advance(task)
    del model
    name = WORLD.format(2)
    progress.update(task, description=name)
    for key, result in start_ranks(arguments, 2, allowed).items():
        context = int(key)
        times[context][name] = result["times"]
        errors[context][name] = error(torch.tensor(result["logits"]), truths[context])
    progress.advance(task)
    rows = [
        {
            "name": f"{context} tokens",
            "times": times[context],
            "errors": errors[context],
            "wrong": not all(
                e <= 2 * errors[context][DYNAMIC] + torch.finfo(torch.bfloat16).eps
                for e in errors[context].values()
            ),
        }
        for context in arguments.contexts
    ]
    return report.Report(
        name="llama",
        title=f"Decoding a 1B-shaped Llama 3.2, {arguments.layers} of 16 layers, bf16",
        notes=NOTES,
        environment=report.environment(
            **{
                "transformers": transformers.__version__,
                "pinned to CPUs": cpus or "not pinned",
                "model": f"{arguments.layers} of 16 layers, random weights, random context",
            }
        ),
        rows=rows,
        columns=columns(rows),
        warnings=measure.load_warnings([load.others]),
    )


def error(logits: Tensor, truth: Tensor) -> float:
    """The largest error of a logit relative to the largest logit."""
    return ((logits.float() - truth).abs().max() / truth.abs().max()).item()


NOTES = (
    "Tokens per second of whole decoding steps (all layers and the output matrix), medians of "
    "tokens that the methods of world 1 take in turn. World 1 has all threads in one process, "
    "world 2 the same cores with half of the threads in each of two processes.",
    "StaticCache beside DynamicCache shows what a preallocated cache alone gains; ours beside "
    "StaticCache shows the attention.",
    "error is the largest error of the first step's logits relative to the largest logit, against "
    "float32 arithmetic; more than twice DynamicCache's plus one rounding is WRONG.",
)


def columns(rows: list[dict[str, Any]]) -> list[report.Column]:
    lines = [(row, name) for row in rows for name in row["times"]]

    def seconds(row: dict[str, Any], name: str) -> float:
        return row["times"][name]["median_us"] * 1e-6

    def ratio(row: dict[str, Any], name: str, base: str) -> str:
        return f"{seconds(row, base) / seconds(row, name):.2f}"

    return report.columns_of(
        lines,
        {
            "context": lambda row, name: row["name"],
            "method": lambda row, name: name,
            "tokens/s": lambda row, name: f"{1 / seconds(row, name):.2f}",
            "ms /token": lambda row, name: f"{1e3 * seconds(row, name):.1f}",
            "x DynamicCache": lambda row, name: ratio(row, name, DYNAMIC),
            "x StaticCache": lambda row, name: ratio(row, name, STATIC),
            "error": lambda row, name: f"{row['errors'][name]:.1e}",
            "right": lambda row, name: report.verdict(row),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
