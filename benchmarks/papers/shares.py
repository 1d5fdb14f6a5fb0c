# SPDX-License-Identifier: BSD-3-Clause
"""LeanAttention's Figures 3 and 10 end to end: an OPT-shaped model generates on a CPU or a GPU.

    python -m benchmarks.papers.shares --layers 2 --prompts 1024 4096 16384 --tokens 16 64 256

Random weights. The share of the time that new tokens take, and how much faster the whole is than
with transformers' own attention and cache. What the published prompt of 50,000 tokens would take is
extrapolated from two prompts or more. Rows stay in the directory of `--out` until they are measured
again, so that each call may measure one prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import OPTConfig, OPTForCausalLM

from tree_attention import hf
from tree_attention.cli.generation import ArrivalRecorder

from ..harness.measure import Load, load_warnings
from ..harness.program import add_device, add_out, check_device, finish
from ..harness.report import Report
from .comparison import Row, comparison, number

OURS, THEIRS = "ours", "sdpa"
SHARE = 0.8  # "more than 80 %" with 64 prompt tokens for each new one, and more with fewer
FIGURE_10 = 50_000, 1_000, 1.26  # prompt, new tokens, speedup over FlashAttention-2 on an A100

# Seconds until the first token, and between one token and the next, of each implementation.
Times = Mapping[str, tuple[float, Sequence[float]]]


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
    ids = ids.to(model.device)
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


def measure(model: Any, prompt: int, tokens: int, rounds: int) -> Times:
    """Both in turn; of each the round that took least."""
    times: dict[str, list[tuple[float, list[float]]]] = {THEIRS: [], OURS: []}
    for turn in range(1 + rounds):  # the first one loads
        for name, found in times.items():
            if name == OURS:
                hf.enable(model)
            generated = generate(model, *((prompt, tokens) if turn else (min(prompt, 1024), 2)))
            if name == OURS:
                hf.disable(model)
            if turn:
                found.append(generated)
    return {
        name: min(found, key=lambda pair: pair[0] + sum(pair[1])) for name, found in times.items()
    }


def rows_of(layers: int, prompt: int, tokens: Sequence[int], times: Times) -> list[Row]:
    """Rows of a measurement, for each number of new tokens."""
    prefills = {name: prefill for name, (prefill, _) in times.items()}
    each = {name: median(gaps) for name, (_, gaps) in times.items()}
    rows = []
    for count in tokens:
        totals = {name: prefill + sum(gaps[: count - 1]) for name, (prefill, gaps) in times.items()}
        rows.append(_row(prompt, count, prefills, totals) | {"layers": layers, "each": each})
    return rows


def extrapolated(rows: Sequence[Row], prompt: int, tokens: int) -> Row:
    """A row for a prompt that was not run, from those of several.

    A prompt takes `a n + b n^2` seconds and a new token after n others `c + d n`; the coefficients
    are at least 0 and have the least squares of relative errors.
    """
    prefills, totals = {}, {}
    for name in (OURS, THEIRS):
        first = _fitted({row["prompt"]: row["prefills"][name] for row in rows}, (1, 2))
        each = _fitted({row["prompt"]: row["each"][name] for row in rows}, (0, 1))
        prefills[name] = first @ [prompt, prompt**2]
        # On average a new token has half of the others before it too.
        totals[name] = prefills[name] + (tokens - 1) * (each @ [1, prompt + tokens / 2])
    return _row(prompt, tokens, prefills, totals) | {
        "name": f"{prompt} tokens, {tokens} new, extrapolated",
        "published_speedup": FIGURE_10[2] if (prompt, tokens) == FIGURE_10[:2] else None,
    }


def _fitted(seconds: Mapping[int, float], powers: Sequence[int]) -> Any:
    terms = np.array([[n**power / y for power in powers] for n, y in seconds.items()])
    fits = []
    for used in ([0, 1], [0], [1]):
        fit = np.zeros(2)
        fit[used] = np.linalg.lstsq(terms[:, used], np.ones(len(terms)), rcond=None)[0]
        if min(fit) >= 0:  # below 0 is noise, which grows with the prompt
            fits.append(fit)
    return min(fits, key=lambda fit: np.linalg.norm(terms @ fit - 1))


def _row(
    prompt: int, count: int, prefills: Mapping[str, float], totals: Mapping[str, float]
) -> Row:
    return {
        "name": f"{prompt} tokens, {count} new",
        "prompt": prompt,
        "tokens": count,
        "published": SHARE if prompt <= 64 * count else None,
        "published_speedup": None,
        "ours": 1 - prefills[OURS] / totals[OURS],
        "prefills": dict(prefills),
        "totals": dict(totals),
    }


def kept_rows(out: Path | None, layers: int) -> dict[str, Row]:
    """Rows of the same model that `out` has from earlier calls, by name."""
    path = None if out is None else out / "lean_figure_3.json"
    rows = [] if path is None or not path.exists() else json.loads(path.read_text())["rows"]
    return {row["name"]: row for row in rows if row.get("layers") == layers}


def report_of(rows: Sequence[Row], title: str, warnings: Sequence[str] = ()) -> Report:
    report = comparison(
        "lean_figure_3",
        title,
        rows,
        {
            "prefill s": lambda row: number(row["prefills"][OURS]),
            "with new tokens s": lambda row: number(row["totals"][OURS]),
            "decoding's share": lambda row: f"{100 * row['ours']:.0f} %",
            "published": lambda row: "-" if row["published"] is None else "> 80 %",
            "sdpa's prefill s": lambda row: number(row["prefills"][THEIRS]),
            "sdpa /ours": lambda row: number(row["totals"][THEIRS] / row["totals"][OURS]),
            "published speedup": lambda row: number(row["published_speedup"]),
        },
        (
            "The shape of OPT 1.3B with fewer layers, random weights, one process. The paper's "
            "share is that of an A100, on which a prompt's tokens take less time beside a new "
            "one's than here. sdpa: transformers' own attention and cache, in turn with ours.",
            "Extrapolated: not run. A prompt of n tokens takes a n + b n^2 and a new token after n "
            "others c + d n, fitted to the prompts above. The published speedup is over "
            "FlashAttention-2 on an A100.",
        ),
    )
    report.warnings += warnings
    report.is_read_back = True
    return report


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers.shares")
    parser.add_argument("--layers", type=int, default=4, help="of 24 (default 4)")
    parser.add_argument("--prompts", type=int, nargs="+", default=(1024, 4096), help="tokens")
    parser.add_argument("--tokens", type=int, nargs="+", default=(16, 64, 256), help="new ones")
    parser.add_argument("--rounds", type=int, default=3, help="of which the best (default 3)")
    add_device(parser)
    add_out(parser, "lean_figure_3")
    parsed = parser.parse_args(arguments)
    check_device(parser, parsed.device)
    rows = kept_rows(parsed.out, parsed.layers)
    most = max(parsed.tokens)
    with torch.inference_mode(), Load() as load:
        model = make_model(parsed.layers, max(parsed.prompts) + most).to(parsed.device)
        for prompt in parsed.prompts:
            times = measure(model, prompt, most, parsed.rounds)
            found = rows_of(parsed.layers, prompt, parsed.tokens, times)
            rows |= {row["name"]: row for row in found}
    ordered = sorted(rows.values(), key=lambda row: (row["prompt"], row["tokens"]))
    if len({row["prompt"] for row in ordered}) > 1:
        ordered.append(extrapolated(ordered, *FIGURE_10[:2]))
    title = f"An OPT of 1.3B's shape, {parsed.layers} of 24 layers: who takes the time"
    return finish(report_of(ordered, title, load_warnings([load.others])), parsed.out, width=140)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
