# SPDX-License-Identifier: BSD-3-Clause
"""LeanAttention's Figures 3 and 10 end to end: an OPT-shaped model generates on this machine's CPU.

    python -m benchmarks.papers.shares --layers 2 --prompt 1024 --tokens 16 64 256

Random weights. The share of the time that new tokens take, and how much faster the whole is than
with transformers' own attention and cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import OPTConfig, OPTForCausalLM

from tree_attention import hf
from tree_attention.cli.generation import ArrivalRecorder

from ..harness.measure import Load, load_warnings
from ..harness.program import add_out, finish
from ..harness.report import Report
from .comparison import Row, comparison, number

OURS, THEIRS = "ours", "sdpa"
SHARE = 0.8  # "more than 80 %" with 64 prompt tokens for each new one, and more with fewer


def make_model(layers: int, positions: int, **changes: Any) -> Any:
    """The shape of OPT 1.3B, with fewer layers and as many positions as are needed."""
    shape = {
        "vocab_size": 50272,
        "hidden_size": 2048,
        "ffn_dim": 8192,
        "num_attention_heads": 32,
        "word_embed_proj_dim": 2048,
        **changes,
    }
    torch.manual_seed(0)
    config = OPTConfig(num_hidden_layers=layers, max_position_embeddings=positions, **shape)
    return OPTForCausalLM._from_config(config, attn_implementation="sdpa").eval().bfloat16()


def generate(model: Any, prompt: int, tokens: int) -> tuple[float, list[float]]:
    """Seconds until the first token, and between one token and the next."""
    recorder, ids = ArrivalRecorder([]), torch.arange(prompt)[None] * 7919 % model.config.vocab_size
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        streamer=recorder,
        do_sample=False,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
    )
    return recorder.arrivals[0].seconds, [
        b.seconds - a.seconds for a, b in pairwise(recorder.arrivals)
    ]


def measure(model: Any, prompt: int, tokens: Sequence[int], rounds: int) -> list[Row]:
    """Both in turn; of each the round that took least."""
    times: dict[str, list[tuple[float, list[float]]]] = {THEIRS: [], OURS: []}
    for turn in range(1 + rounds):  # the first one loads and allocates
        for name, found in times.items():
            if name == OURS:
                hf.enable(model)
            generated = generate(model, prompt, max(tokens) if turn else 2)
            if name == OURS:
                hf.disable(model)
            if turn:
                found.append(generated)
    best = {
        name: min(found, key=lambda pair: pair[0] + sum(pair[1])) for name, found in times.items()
    }
    rows = []
    for count in tokens:
        totals = {name: prefill + sum(gaps[: count - 1]) for name, (prefill, gaps) in best.items()}
        prefill = best[OURS][0]
        rows.append(
            {
                "name": f"{prompt} tokens, {count} new",
                "published": SHARE if prompt <= 64 * count else None,
                "ours": 1 - prefill / totals[OURS],
                "prefill": prefill,
                "their_prefill": best[THEIRS][0],
                "totals": totals,
            }
        )
    return rows


def report_of(rows: Sequence[Row], title: str, warnings: Sequence[str] = ()) -> Report:
    report = comparison(
        "lean_figure_3",
        title,
        rows,
        {
            "prefill s": lambda row: number(row["prefill"]),
            "with new tokens s": lambda row: number(row["totals"][OURS]),
            "decoding's share": lambda row: f"{100 * row['ours']:.0f} %",
            "published": lambda row: "-" if row["published"] is None else "> 80 %",
            "sdpa's prefill s": lambda row: number(row["their_prefill"]),
            "sdpa /ours": lambda row: number(row["totals"][THEIRS] / row["totals"][OURS]),
        },
        (
            "The shape of OPT 1.3B with fewer layers, random weights, one process. The paper's "
            "share is that of an A100, on which a prompt's tokens take less time beside a new "
            "one's than here. sdpa: transformers' own attention and cache, in turn with ours.",
        ),
        shown="share of decoding",
    )
    report.warnings += warnings
    return report


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers.shares")
    parser.add_argument("--layers", type=int, default=4, help="of 24 (default 4)")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens (default 1024)")
    parser.add_argument("--tokens", type=int, nargs="+", default=(16, 64, 256, 1024))
    parser.add_argument("--rounds", type=int, default=3, help="of which the best (default 3)")
    add_out(parser, "lean_figure_3")
    parsed = parser.parse_args(arguments)
    with torch.inference_mode(), Load() as load:
        model = make_model(parsed.layers, parsed.prompt + max(parsed.tokens))
        rows = measure(model, parsed.prompt, parsed.tokens, parsed.rounds)
    title = f"An OPT of 1.3B's shape, {parsed.layers} of 24 layers: who takes the time"
    return finish(report_of(rows, title, load_warnings([load.others])), parsed.out, width=120)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
