#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Evaluate a passkey checkpoint on held-out text and keys: length by depth, and with distractors.

    python examples/passkey-llama/evaluate_passkey.py

Writes evaluation.json and evaluation.png into the checkpoint's folder and the table into its
README.md. An answer counts when greedy decoding gives exactly " KEY.": one forward over the prompt
with its answer tells that, since every answer token must be the likeliest after the ones before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

import passkey
from passkey import Haystack, PasskeyPrompt, build_prompt

if __name__ == "__main__":  # started by its path, from where `benchmarks` is not found
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.report import environment, json_text

HERE = Path(__file__).resolve().parent
DEPTHS = tuple(i / 10 for i in range(11))
TABLE_BEGIN, TABLE_END = "<!-- evaluation: begin -->", "<!-- evaluation: end -->"


@dataclass(frozen=True)
class Suite:
    tokens: int
    distractors: int
    per_depth: int
    target: float | None = None
    """The share of right answers that the checkpoint must reach."""

    @property
    def name(self) -> str:
        if not self.distractors:
            return f"{self.tokens:,} tokens"
        return f"{self.tokens:,} tokens, other keys: {self.distractors}"


SUITES = (
    Suite(1000, 0, 10),
    Suite(2000, 0, 20, target=0.95),
    Suite(4000, 0, 5),
    Suite(2000, 1, 5),
    Suite(2000, 4, 5),
    Suite(8000, 0, 6, target=0.90),
    Suite(16000, 0, 1),
)


@torch.inference_mode()
def answers_exactly(model: Any, tokenizer: Any, prompts: list[PasskeyPrompt]) -> list[bool]:
    """Whether greedy decoding would give exactly each prompt's answer; prompts of one length."""
    answers = [
        tokenizer(passkey.answer(prompt.key), add_special_tokens=False)["input_ids"]
        for prompt in prompts
    ]
    expected = torch.tensor(answers)
    ids = torch.cat([torch.tensor([p.input_ids for p in prompts]), expected[:, :-1]], dim=1)
    logits = model(input_ids=ids, logits_to_keep=expected.shape[1], use_cache=False).logits
    return (logits.argmax(-1) == expected).all(-1).tolist()


def evaluate(model: Any, haystack: Haystack, suites: tuple[Suite, ...]) -> list[dict[str, Any]]:
    """One row per suite: right answers and prompts at every depth."""
    rows = []
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("", total=sum(s.per_depth for s in suites) * len(DEPTHS))
        for suite in suites:
            began = time.monotonic()
            right = []
            for depth in DEPTHS:
                progress.update(task, description=f"{suite.name}, depth {depth:.0%}")
                good = 0
                batch = max(1, 8000 // suite.tokens)
                for first in range(0, suite.per_depth, batch):
                    prompts = [
                        build_prompt(
                            haystack,
                            suite.tokens,
                            depth=depth,
                            seed=seed,
                            distractors=suite.distractors,
                        )
                        for seed in range(first, min(first + batch, suite.per_depth))
                    ]
                    good += sum(answers_exactly(model, haystack.tokenizer, prompts))
                    progress.update(task, advance=len(prompts))
                right.append(good)
            rows.append(
                {
                    "name": suite.name,
                    "tokens": suite.tokens,
                    "distractors": suite.distractors,
                    "depths": list(DEPTHS),
                    "prompts_per_depth": suite.per_depth,
                    "right_at_depth": right,
                    "right": sum(right),
                    "prompts": suite.per_depth * len(DEPTHS),
                    "target": suite.target,
                    "seconds": round(time.monotonic() - began, 1),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: all depths together, then each depth."""
    lines = [
        "| Prompt | All | " + " | ".join(f"{depth:.0%}" for depth in DEPTHS) + " |",
        "| --- |" + " ---: |" * (len(DEPTHS) + 1),
    ]
    for row in rows:
        cells = [f"{right}/{row['prompts_per_depth']}" for right in row["right_at_depth"]]
        share = f"**{row['right']}/{row['prompts']}** = {row['right'] / row['prompts']:.1%}"
        lines.append(f"| {row['name']} | {share} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_card(path: Path, rows: list[dict[str, Any]]) -> None:
    """Puts the table between the two marks of the model card."""
    card = path.read_text(encoding="utf-8")
    before, _, rest = card.partition(TABLE_BEGIN)
    _, mark, after = rest.partition(TABLE_END)
    if not mark:
        raise SystemExit(f"{path} lacks the marks {TABLE_BEGIN} and {TABLE_END} for the table")
    text = f"{before}{TABLE_BEGIN}\n{table(rows)}\n{TABLE_END}{after}"
    path.write_text(text, encoding="utf-8")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A heat map of the share of right answers: depth across, prompts down."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares = [[r / row["prompts_per_depth"] for r in row["right_at_depth"]] for row in rows]
    figure, axes = pyplot.subplots(figsize=(8, 1.4 + 0.42 * len(rows)))
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            colour = "black" if share > 0.6 else "white"
            axes.text(j, i, f"{share:.0%}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(DEPTHS)), [f"{depth:.0%}" for depth in DEPTHS])
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_xlabel("depth of the key in the prose")
    axes.set_title("exact answers on held-out prompts; higher is better", loc="left", fontsize=10)
    figure.colorbar(image, ax=axes, format=lambda share, _: f"{share:.0%}")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def training_summary(log: Path) -> dict[str, Any]:
    """Steps, seconds and every 50th step's figures of a training log."""
    steps = json.loads(log.read_text(encoding="utf-8"))
    kept = [*steps[::50], steps[-1]]
    rounded = [
        {name: round(v, 4) if isinstance(v, float) else v for name, v in step.items()}
        for step in kept
    ]
    return {"steps": len(steps), "seconds": round(steps[-1]["seconds"]), "log": rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=HERE)
    parser.add_argument("--text", type=Path, help="folder of held-out prose; default MODEL/text")
    parser.add_argument("--training-log", type=Path, help="log.json of the training, to summarize")
    parser.add_argument("--longest", type=int, default=16000, help="skip longer prompts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, attn_implementation="sdpa"
    ).eval()
    haystack = Haystack.from_directory(args.text or args.model / "text", tokenizer)
    suites = tuple(suite for suite in SUITES if suite.tokens <= args.longest)
    began = time.monotonic()
    rows = evaluate(model, haystack, suites)
    print(table(rows))
    if args.write:
        report: dict[str, Any] = {
            "environment": environment(transformers=transformers.__version__),
            "seconds": round(time.monotonic() - began, 1),
            "rows": rows,
        }
        if args.training_log:
            report["training"] = training_summary(args.training_log)
        (args.model / "evaluation.json").write_text(json_text(report))
        draw(rows, args.model / "evaluation.png")
        write_card(args.model / "README.md", rows)
    missed = [
        row["name"]
        for row in rows
        if row["target"] and row["right"] < row["target"] * row["prompts"]
    ]
    if missed:
        raise SystemExit(f"below the target: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
