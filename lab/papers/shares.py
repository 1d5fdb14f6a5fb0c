# SPDX-License-Identifier: BSD-3-Clause
"""LeanAttention's Figures 3 and 10 end to end: an OPT-shaped model generates on a CPU or a GPU.

    python -m lab.papers.shares --layers 2 4 8 --prompts 1024 4096 --tokens 16 64 256

Random weights. The share of the time that new tokens take, and how much faster the whole is than
with transformers' own attention and cache. Models of few layers run; the time of the whole model is
a fit to them, a fixed time and one for each layer. What the published prompt of 50,000 tokens would
take is extrapolated from the fits to two prompts or more. Rows stay in the directory of `--out`
until they are measured again, so that each call may measure one shape, depth or prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import OPTConfig, OPTForCausalLM

from benchmarks.harness.measure import Load, load_warnings
from benchmarks.harness.program import add_device, add_out, check_device, finish
from benchmarks.harness.report import Report
from tree_attention import _loader, hf
from tree_attention.cli.generation import ArrivalRecorder

from .comparison import Row, comparison, number

NAMES = OURS, THEIRS = "ours", "sdpa"
SHARE = 0.8  # "more than 80 %" with 64 prompt tokens for each new one, and more with fewer
LONG = 50_000, 1_000  # Figure 10's prompt and first new tokens


class Shape(NamedTuple):
    """One of the paper's models; both have 32 heads."""

    layers: int
    hidden: int
    speedup: float | None  # published for LONG, over FlashAttention-2 on an A100


SHAPES = {"1.3b": Shape(24, 2048, 1.26), "6.7b": Shape(32, 4096, None)}

# Seconds until the first token, and between one token and the next, of each implementation.
Times = Mapping[str, tuple[float, Sequence[float]]]


def default_dtype(device: str) -> str:
    """bfloat16 where the processor multiplies it: elsewhere products would be emulated."""
    is_fast = device == "cuda" or _loader.load().cpu_instruction_set() in ("avx512_bf16", "amx")
    return "bfloat16" if is_fast else "float32"


def make_model(shape: str, layers: int, positions: int, **changes: Any) -> Any:
    """A model of the shape with fewer layers and as many positions as are needed, in float32."""
    hidden = SHAPES[shape].hidden
    sizes = {
        "vocab_size": 50272,
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_attention_heads": 32,
        "word_embed_proj_dim": hidden,
        **changes,
    }
    torch.manual_seed(0)
    config = OPTConfig(num_hidden_layers=layers, max_position_embeddings=positions, **sizes)
    return OPTForCausalLM._from_config(config, attn_implementation="sdpa").eval()


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


def rows_of(
    shape: str, layers: int, prompt: int, tokens: Sequence[int], times: Times, conditions: str
) -> list[Row]:
    """Rows of a measurement, for each number of new tokens."""
    prefills = {name: prefill for name, (prefill, _) in times.items()}
    each = {name: median(gaps) for name, (_, gaps) in times.items()}
    rows = []
    for count in tokens:
        totals = {name: prefill + sum(gaps[: count - 1]) for name, (prefill, gaps) in times.items()}
        row = _row(shape, layers, prompt, count, prefills, totals)
        rows.append(row | {"each": each, "measured": conditions})
    return rows


def whole_model(rows: Sequence[Row]) -> Row:
    """A row of all layers of the shape, from rows that differ in their layers alone.

    Its "error" is how far the same fit to the other rows misses the deepest one, at most.
    """
    first, *_, deepest = sorted(rows, key=lambda row: row["layers"])
    layers = SHAPES[first["shape"]].layers

    def at(depth: int, used: Sequence[Row]) -> list[dict[str, float]]:
        prefills, each = (
            {name: _line(depth, {row["layers"]: row[key][name] for row in used}) for name in NAMES}
            for key in ("prefills", "each")
        )
        totals = {  # new tokens alone are fitted, so that no total is below its prompt's time
            name: prefills[name]
            + _line(depth, {r["layers"]: r["totals"][name] - r["prefills"][name] for r in used})
            for name in NAMES
        }
        return [prefills, totals, each]

    prefills, totals, each = at(layers, rows)
    row = _row(first["shape"], layers, first["prompt"], first["tokens"], prefills, totals)
    others = [row for row in rows if row is not deepest]
    if len(others) > 1:
        guesses = at(deepest["layers"], others)
        row["error"] = max(
            abs(guess[name] / deepest[key][name] - 1)
            for key, guess in zip(("prefills", "totals"), guesses[:2], strict=True)
            for name in NAMES
        )
    return row | {"name": f"{row['name']}, fitted", "each": each}


def with_fits(rows: Sequence[Row]) -> list[Row]:
    """The rows in order, and those of whole models as far as several depths were measured."""
    found = []
    for shape, of_shape in groupby(sorted(rows, key=_order), lambda row: row["shape"]):
        fits = []
        measured = list(of_shape)
        for _, alike in groupby(measured, lambda row: (row["prompt"], row["tokens"])):
            if len(depths := list(alike)) > 1:
                fits.append(whole_model(depths))
        found += [*measured, *fits]
        if len({row["prompt"] for row in fits}) > 1:
            found.append(extrapolated(fits, *LONG) | {"published_speedup": SHAPES[shape].speedup})
    return found


def _line(layers: int, seconds: Mapping[int, float]) -> float:
    return float(_fitted(seconds, (0, 1)) @ [1, layers])


def _order(row: Row) -> tuple[Any, ...]:
    return row["shape"], row["prompt"], row["tokens"], row["layers"]


def extrapolated(rows: Sequence[Row], prompt: int, tokens: int) -> Row:
    """A row for a prompt that was not run, from those of several.

    A prompt takes `a n + b n^2` seconds and a new token after n others `c + d n`.
    """
    prefills, totals = {}, {}
    for name in NAMES:
        first = _fitted({row["prompt"]: row["prefills"][name] for row in rows}, (1, 2))
        each = _fitted({row["prompt"]: row["each"][name] for row in rows}, (0, 1))
        prefills[name] = first @ [prompt, prompt**2]
        # On average a new token has half of the others before it too.
        totals[name] = prefills[name] + (tokens - 1) * (each @ [1, prompt + tokens / 2])
    row = _row(rows[0]["shape"], rows[0]["layers"], prompt, tokens, prefills, totals)
    return row | {"name": f"{row['name']}, extrapolated"}


def _fitted(seconds: Mapping[int, float], powers: Sequence[int]) -> Any:
    """Coefficients of two powers, at least 0, with the least squares of relative errors."""
    terms = np.array([[n**power / y for power in powers] for n, y in seconds.items()])
    fits = []
    for used in ([0, 1], [0], [1]):
        fit = np.zeros(2)
        fit[used] = np.linalg.lstsq(terms[:, used], np.ones(len(terms)), rcond=None)[0]
        if min(fit) >= 0:  # below 0 is noise, which grows with the prompt
            fits.append(fit)
    return min(fits, key=lambda fit: np.linalg.norm(terms @ fit - 1))


def _row(
    shape: str,
    layers: int,
    prompt: int,
    count: int,
    prefills: Mapping[str, float],
    totals: Mapping[str, float],
) -> Row:
    return {
        "name": f"{shape}, {layers} layers, {prompt} tokens, {count} new",
        "shape": shape,
        "layers": layers,
        "prompt": prompt,
        "tokens": count,
        "published": SHARE if prompt <= 64 * count else None,
        "published_speedup": None,
        "error": None,
        "ours": 1 - prefills[OURS] / totals[OURS],
        "prefills": dict(prefills),
        "totals": dict(totals),
    }


def kept_rows(out: Path | None, conditions: str) -> dict[str, Row]:
    """Rows by name that earlier calls measured in the same dtype and on the same device."""
    path = None if out is None else out / "lean_figure_3.json"
    rows = [] if path is None or not path.exists() else json.loads(path.read_text())["rows"]
    return {row["name"]: row for row in rows if row.get("measured") == conditions}


def report_of(rows: Sequence[Row], conditions: str, warnings: Sequence[str] = ()) -> Report:
    report = comparison(
        "lean_figure_3",
        f"Generation with the shapes of OPT, {conditions}: who takes the time",
        rows,
        {
            "prefill s": lambda row: number(row["prefills"][OURS]),
            "with new tokens s": lambda row: number(row["totals"][OURS]),
            "decoding's share": lambda row: f"{100 * row['ours']:.0f} %",
            "published": lambda row: "-" if row["published"] is None else "> 80 %",
            "sdpa's prefill s": lambda row: number(row["prefills"][THEIRS]),
            "sdpa /ours": lambda row: number(row["totals"][THEIRS] / row["totals"][OURS]),
            "published speedup": lambda row: number(row["published_speedup"]),
            "fit's error": lambda row: (
                "-" if row["error"] is None else f"{100 * row['error']:.1f} %"
            ),
        },
        (
            "Random weights, one process. The paper's share is that of an A100, on which a "
            "prompt's tokens take less time beside a new one's than here. sdpa: transformers' own "
            "attention and cache, in turn with ours.",
            "Fitted: not run. A model takes a + b layers seconds, fitted to the same prompt and "
            "tokens at the depths above. The fit's error is how far the fit without the deepest "
            "model misses it, at most, in the four times of the row.",
            "Extrapolated: not run. A prompt of n tokens takes a n + b n^2 and a new token after n "
            "others c + d n, fitted to the fitted rows. The published speedup is over "
            "FlashAttention-2 on an A100.",
        ),
    )
    report.warnings += warnings
    report.is_read_back = True
    return report


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.papers.shares")
    parser.add_argument("--shape", choices=SHAPES, default="1.3b", help="of OPT (default 1.3b)")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=(2, 4, 8), help="depths that run (default 2 4 8)"
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=(1024, 4096), help="tokens")
    parser.add_argument("--tokens", type=int, nargs="+", default=(16, 64, 256), help="new ones")
    parser.add_argument("--rounds", type=int, default=3, help="of which the best (default 3)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="default: bfloat16 where the processor multiplies it, else float32",
    )
    add_device(parser)
    add_out(parser, "lean_figure_3")
    parsed = parser.parse_args(arguments)
    check_device(parser, parsed.device)
    dtype = parsed.dtype or default_dtype(parsed.device)
    conditions = f"{dtype} on {parsed.device}"
    rows = kept_rows(parsed.out, conditions)
    most = max(parsed.tokens)
    with torch.inference_mode(), Load() as load:
        for layers in parsed.layers:
            model = make_model(parsed.shape, layers, max(parsed.prompts) + most)
            model = model.to(parsed.device, getattr(torch, dtype))
            for prompt in parsed.prompts:
                times = measure(model, prompt, most, parsed.rounds)
                found = rows_of(parsed.shape, layers, prompt, parsed.tokens, times, conditions)
                rows |= {row["name"]: row for row in found}
    report = report_of(with_fits(list(rows.values())), conditions, load_warnings([load.others]))
    return finish(report, parsed.out, width=160)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
