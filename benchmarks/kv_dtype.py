# SPDX-License-Identifier: BSD-3-Clause
"""Accuracy with caches of 8 bits: passkeys, perplexity and divergence by kv_dtype.

    python benchmarks/kv_dtype.py --out DIR [--checkpoint DIR]

The passkey checkpoint of examples/, or another one, reads held-out prose with a key in it and
answers for the key. Each prompt is run with every kv_dtype, and the distributions of the next token
are compared.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
sys.path.append(str(Path(__file__).parents[1] / "examples" / "passkey-llama"))

import passkey  # type: ignore[import-not-found]
from benchmarks.harness.program import finish, parser_of, progress_bar
from benchmarks.harness.report import Report, columns_of, environment, verdict
from tree_attention.hf import TreeCache

CHECKPOINT = Path(passkey.__file__).parent
# Prompt tokens, and prompts at each depth.
SUITES = {2000: 8, 8000: 4, 16000: 1}
DEPTHS = tuple(i / 10 for i in range(11))
KV_DTYPES = (None, "int8", "fp8")
CHUNK = 1024
# Ten times what the coarser one shows: more is a mistake in the arithmetic.
MAX_KLD = 0.02
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Row:
    """Results of one kv_dtype with the prompts of one length."""

    right: int = 0
    prompts: int = 0
    losses: list[Tensor] = field(default_factory=list)  # of the prompt's tokens, in nats
    divergences: list[Tensor] = field(default_factory=list)  # from the model's own dtype, in nats
    same: list[Tensor] = field(default_factory=list)  # whether the likeliest token is the same
    bytes_per_token: float = 0.0

    def to_json(self) -> dict[str, Any]:
        divergences = torch.cat(self.divergences)
        return {
            "right": self.right,
            "prompts": self.prompts,
            "perplexity": math.exp(torch.cat(self.losses).mean().item()),
            "kld_mean": divergences.mean().item(),
            "kld_p99": divergences.quantile(0.99).item(),
            "same_top": torch.cat(self.same).float().mean().item(),
            "bytes_per_token": self.bytes_per_token,
        }


def run_prompt(model: Any, prompt: passkey.PasskeyPrompt, answer: list[int], rows: Any) -> None:
    ids = torch.tensor([*prompt.input_ids, *answer])
    first = len(prompt.input_ids) - 1  # the position whose next token begins the answer
    caches = {kv_dtype: TreeCache(model.config, kv_dtype=kv_dtype, growth=1) for kv_dtype in rows}
    is_right = dict.fromkeys(rows, True)
    # In chunks, which bounds the memory of the distributions.
    for begin in range(0, len(ids) - 1, CHUNK):
        inputs, expected = ids[:-1][begin : begin + CHUNK], ids[1:][begin : begin + CHUNK]
        of_prompt = max(0, min(first - begin, CHUNK))
        truth = None
        for kv_dtype, row in rows.items():
            logits = model(inputs[None], past_key_values=caches[kv_dtype]).logits[0]
            found = logits.float().log_softmax(-1)
            truth = found if truth is None else truth
            top = found.argmax(-1)
            is_right[kv_dtype] &= bool((top == expected)[of_prompt:].all())
            row.losses.append(-found.gather(1, expected[:, None])[:of_prompt, 0])
            row.divergences.append((truth.exp() * (truth - found)).sum(-1))
            row.same.append(truth.argmax(-1) == top)
    for kv_dtype, row in rows.items():
        row.right += is_right[kv_dtype]
        row.prompts += 1
        row.bytes_per_token = caches[kv_dtype].num_bytes / (len(ids) - 1)


@torch.inference_mode()
def measure(
    checkpoint: Path, dtype: torch.dtype, suites: dict[int, int], num_prompts: int | None = None
) -> list[dict[str, Any]]:
    """A row for each length and kv_dtype, of `suites` or of `num_prompts` prompts at each depth."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, attn_implementation="tree_attention"
    ).eval()
    longest = model.config.max_position_embeddings
    suites = {n: num_prompts or count for n, count in suites.items() if n + 10 <= longest}
    haystack = passkey.Haystack.from_directory(CHECKPOINT / "text", tokenizer)
    result = []
    with progress_bar(True) as progress:
        task = progress.add_task("prompts", total=len(DEPTHS) * sum(suites.values()))
        for tokens, per_depth in suites.items():
            progress.update(task, description=f"{tokens:,} tokens")
            rows = {kv_dtype: Row() for kv_dtype in KV_DTYPES}
            for depth in DEPTHS:
                for seed in range(per_depth):
                    prompt = passkey.build_prompt(haystack, tokens, depth=depth, seed=seed)
                    answer = tokenizer(passkey.answer(prompt.key), add_special_tokens=False)
                    run_prompt(model, prompt, answer["input_ids"], rows)
                    progress.advance(task)
            own = str(dtype).removeprefix("torch.")
            result += [
                {"name": f"{tokens:,} tokens", "kv_dtype": kv_dtype or own, **row.to_json()}
                for kv_dtype, row in rows.items()
            ]
    for row in result:
        row["wrong"] = not row["kld_mean"] < MAX_KLD
    return result


NOTES = (
    "The checkpoint reads prose with a key at 11 depths, which examples/passkey-llama (4 layers, 2"
    " key/value heads of 32) was not trained on, and must answer exactly. All of it runs in the"
    " dtype of the first row but for keys and values.",
    "perplexity: of the prompts' tokens. KLD: Kullback-Leibler divergence of the next token's "
    "distribution from that of the first row, in nats, at every position. same top: share of "
    "positions with the same likeliest token.",
    "bytes a token: keys, values and scales of all layers.",
)


def name_of(checkpoint: Path) -> str:
    """The name of the files with the results."""
    return "kv_dtype" if checkpoint == CHECKPOINT else f"kv_dtype_{checkpoint.name}"


def report_of(rows: Sequence[dict[str, Any]], checkpoint: Path = CHECKPOINT) -> Report:
    return Report(
        name=name_of(checkpoint),
        title=f"Accuracy of {checkpoint.name} by dtype of keys and values",
        notes=NOTES,
        environment=environment(),
        rows=list(rows),
        columns=columns_of(
            rows,
            {
                "prompt": lambda row: row["name"],
                "kv_dtype": lambda row: row["kv_dtype"],
                "passkeys": lambda row: f"{row['right']} of {row['prompts']}",
                "perplexity": lambda row: f"{row['perplexity']:.4f}",
                "KLD mean": lambda row: f"{row['kld_mean']:.1e}",
                "KLD p99": lambda row: f"{row['kld_p99']:.1e}",
                "same top %": lambda row: f"{100 * row['same_top']:.2f}",
                "bytes a token": lambda row: f"{row['bytes_per_token']:.0f}",
                "right": verdict,
            },
        ),
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "kv_dtype")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, help="directory of a causal language model"
    )
    parser.add_argument("--prompts", type=int, help="number of prompts at each depth")
    parser.add_argument("--quick", action="store_true", help="a few short prompts, to try it")
    parsed = parser.parse_args(arguments)
    suites = {500: 1} if parsed.quick else SUITES
    rows = measure(parsed.checkpoint, DTYPES[parsed.dtype], suites, parsed.prompts)
    return finish(report_of(rows, parsed.checkpoint), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
