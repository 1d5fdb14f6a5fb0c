# SPDX-License-Identifier: BSD-3-Clause
"""A 1B-shaped Llama generates on emulated clusters, by tree and by ring: needs root.

    sudo .venv/bin/python -m lab.emulation.generation --out DIR

Every host runs the model with random weights and keeps its share of a context of random keys and
values; see benchmarks/harness/llama_model.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

import tree_attention.hf.attention as attention_module
from benchmarks.harness.llama_model import fill, make_model
from benchmarks.harness.places import link_sentences, measure, milliseconds, report_of_places
from benchmarks.harness.ranks import Ranks, run_rank
from benchmarks.harness.report import Column, Report, columns_of
from tree_attention import ring_decode
from tree_attention.cli.generation import generate
from tree_attention.exchange import Communicator
from tree_attention.hf import TreeCache
from tree_attention.hf.cache.growing import TreeCacheLayer
from tree_attention.hf.masks import KeyRanges

from .configuration import configurations, emulated_parser, run, where_emulated
from .probe import spread
from .tables import spread_of
from .wiring import LINKS

TREE, RING = "tree", "ring"
LINK_NAMES = ("lan", "metro")
WORLDS = (2, 4)
CONTEXTS = (8192, 32768)  # of all ranks together
_GENERATIONS = 2  # of each method, in turn
_TIMEOUT = 300.0

NOTES = (
    "A row is named link, p ranks, L tokens of context of all ranks together. Tokens of generate "
    "of HuggingFace transformers, greedy, one sequence; each time is the slowest rank's; median, "
    "p10 and p90 of so many tokens. Tree and ring take turns; first tokens are not timed.",
    "The model has the shape of Llama 3.2 1B, with fewer layers and random weights, and the "
    "context is random keys and values put straight into the cache. The ring is ring_decode in "
    "place of the merge in the same attention function. All ranks share the processors of this "
    "machine, so the model itself takes longer with more of them.",
    "tree exchanges by strategy auto, with what `python -m tree_attention calibrate` measured on "
    "the same configuration just before. waiting: the share of the time in which rank 0 "
    "waited for others. Bytes are per token, of the rank that sent most.",
    "right: both methods and all ranks made the same tokens every time.",
)


def rows_of(link: str, world_size: int, results: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for context, ranks in results.items():
        methods = {}
        for name in (TREE, RING):
            of_ranks = [rank[name] for rank in ranks]
            slowest = [max(times) for times in zip(*(r["seconds"] for r in of_ranks), strict=True)]
            tenth, median, ninetieth = spread(slowest)
            methods[name] = {
                "seconds": slowest,
                **{"p10": tenth, "median": median, "p90": ninetieth},
                "bytes": max(count for rank in of_ranks for count in rank["bytes"]),
                "exchange_share": max(of_ranks[0]["exchange_share"]),
            }
        made = {tuple(t) for rank in ranks for name in methods for t in rank[name]["tokens"]}
        rows.append(
            {
                "name": f"{link} p={world_size} L={context}",
                "link": link,
                "world_size": world_size,
                "context": int(context),
                "methods": methods,
                "tokens": sorted(map(list, made)),
                "wrong": len(made) != 1,
            }
        )
    return rows


def main(arguments: list[str]) -> int:
    names = configurations(LINK_NAMES, WORLDS)
    parser = emulated_parser("generation", "generation", names)
    parser.add_argument("--layers", type=int, default=4, help="of 16 (default 4)")
    parser.add_argument("--tokens", type=int, default=6, help="timed at once (default 6)")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="TOKENS")
    parser.add_argument("--on-host", type=Path, nargs=2, help=argparse.SUPPRESS)  # of its ranks
    parsed = parser.parse_args(arguments)
    if parsed.on_host is not None:
        generate_on_host(*parsed.on_host)
        return 0
    spec = {name: getattr(parsed, name) for name in ("layers", "tokens", "contexts")}

    def run_model(link: str, world_size: int) -> dict[str, Any]:
        part = run(LINKS[link], world_size, ["lab.emulation.generation", "--on-host"], spec)
        rows = rows_of(link, world_size, part.pop("results"))
        return {"rows": rows, "layers": parsed.layers, **part}

    return where_emulated(
        lambda: measure("generation", names, parsed, run_model, report_of, width=140)
    )


def report_of(measured: dict[str, Any]) -> Report:
    rows = [row for part in measured.values() for row in part["rows"]]
    layers = " or ".join(str(n) for n in sorted({part["layers"] for part in measured.values()}))
    return report_of_places(
        measured,
        name="generation",
        title=f"A 1B-shaped Llama, {layers} of 16 layers, generates on emulated clusters",
        notes=NOTES,
        environment={"transformers": transformers.__version__},
        rows=rows,
        columns=columns(rows),
        summary=link_sentences(measured),
    )


def columns(rows: list[dict[str, Any]]) -> list[Column]:
    lines = [(row, name, method) for row in rows for name, method in row["methods"].items()]

    def times_ring(row: dict[str, Any], method: dict[str, Any]) -> str:
        return f"{row['methods'][RING]['median'] / method['median']:.2f}"

    return columns_of(
        lines,
        {
            "case": lambda row, name, method: row["name"],
            "method": lambda row, name, method: name,
            "tokens/s": lambda row, name, method: f"{1 / method['median']:.2f}",
            "x ring": lambda row, name, method: times_ring(row, method),
            "ms /token": lambda row, name, method: milliseconds(method["median"]),
            "p10 to p90": lambda row, name, method: spread_of(method),
            "waiting": lambda row, name, method: f"{method['exchange_share']:.0%}",
            "bytes sent": lambda row, name, method: f"{method['bytes']:,}",
            "right": lambda row, name, method: "WRONG" if row["wrong"] else "yes",
        },
    )


@contextmanager
def by(decode: Callable[..., tuple[Tensor, Tensor]]) -> Iterator[None]:
    """New tokens are attended to by `decode`, in place of the function by which the model's
    attention merges over ranks; prompts as ever.

    The buffers travel whole, as a part of them would have to be copied first: with a `growth` of
    64, at most 63 keys more.
    """
    over_shard = attention_module._over_shard

    def attend(
        query: Tensor,
        layer: TreeCacheLayer,
        is_head_sharded: bool,
        ranges: KeyRanges,
        out_dtype: torch.dtype,
        keywords: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        if query.shape[2] > 1:
            return over_shard(query, layer, is_head_sharded, ranges, out_dtype, keywords)
        shard = layer.shard
        local_ranges = ranges.local(shard.layout, shard.rank)
        options = {"group": shard.comm, "timeout": shard.timeout, **keywords}
        o, lse = decode(query, layer.key_rows, layer.value_rows, local_ranges, **options)
        return o.to(out_dtype), lse

    with mock.patch.object(attention_module, "_over_shard", attend):
        yield


def run_context(model: Any, context: int, tokens: int) -> dict[str, Any]:
    """Generations of both methods, in turn, from the same random context."""
    prompt = torch.arange(context + 1)[None] * 7919 % model.config.vocab_size
    result: dict[str, Any] = {}
    caches = {}
    for method in (TREE, RING):  # of their own, as changing the call would compare signatures again
        cache = TreeCache(model.config, Communicator(), timeout=_TIMEOUT, growth=64)
        cache.reserve(context + 2 * tokens)
        caches[method] = fill(cache, model.config, context)
        result[method] = {"tokens": [], "seconds": [], "bytes": [], "exchange_share": []}
    for turn in range(1 + _GENERATIONS):
        for method, cache in caches.items():
            with by(ring_decode) if method == RING else nullcontext():
                # The first one also connects and allocates; the first token of each is not timed.
                count = tokens + 1 if turn else 2
                made = generate(model, prompt, cache, max_new_tokens=count, min_new_tokens=count)
            cache.crop(context - cache.get_seq_length())
            if turn == 0:
                continue
            first, last = made.arrivals[0], made.arrivals[-1]
            sent = (last.merge_bytes - first.merge_bytes) // (len(made.arrivals) - 1)
            result[method]["tokens"].append(made.tokens)
            result[method]["seconds"] += made.gaps
            result[method]["bytes"].append(sent)
            exchanging = last.exchange_seconds - first.exchange_seconds
            result[method]["exchange_share"].append(exchanging / sum(made.gaps))
    return result


def generate_on_host(specification: Path, out: Path) -> None:
    """On every host: each rank's results of each context, on rank 0 in `out`."""
    spec = json.loads(specification.read_text())

    def generate_all(ranks: Ranks) -> dict[str, Any]:
        model = make_model(spec["layers"])
        model.set_attn_implementation("tree_attention")
        return {
            str(context): ranks.gather(run_context(model, context, spec["tokens"]))
            for context in spec["contexts"]
        }

    run_rank(out, generate_all)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
