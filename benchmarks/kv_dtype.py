# SPDX-License-Identifier: BSD-3-Clause
"""Accuracy with caches of 8 bits, or weights of 8 and 4: passkeys, perplexity and divergence.

    python benchmarks/kv_dtype.py --out DIR [--of weights] [--checkpoint DIR]

The passkey checkpoint of examples/, or another one, reads held-out prose with a key in it and
answers for the key. Each prompt is run with every dtype, and the distributions of the next token
are compared.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
sys.path.append(str(Path(__file__).parents[1] / "examples" / "passkey-llama"))

import passkey  # type: ignore[import-not-found]
from benchmarks.harness.program import finish, parser_of, progress_bar
from benchmarks.harness.report import Report, columns_of, environment, verdict
from tree_attention.hf import CACHE_NAME, TreeCache, from_pretrained

CHECKPOINT = Path(passkey.__file__).parent
# Prompt tokens, and prompts at each depth.
SUITES = {2000: 8, 8000: 4, 16000: 1}
DEPTHS = tuple(i / 10 for i in range(11))
# The dtypes that take the place of the checkpoint's own: of keys and values, or of weights.
DTYPES_OF: dict[str, tuple[Any, ...]] = {
    "kv_dtype": (None, "int8", "fp8"),
    "weights": (None, "int8", "int4"),
}
CHUNK = 1024
# Ten times what the coarser one shows: more is a mistake in the arithmetic.
MAX_KLD = {"kv_dtype": 0.02, "weights": 0.5}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Row:
    """Results of one dtype with the prompts of one length."""

    right: int = 0
    prompts: int = 0
    losses: list[Tensor] = field(default_factory=list)  # of the prompt's tokens, in nats
    divergences: list[Tensor] = field(default_factory=list)  # from the model's own dtype, in nats
    same: list[Tensor] = field(default_factory=list)  # whether the likeliest token is the same
    bytes_per_token: float = 0.0
    weights_bytes: int = 0

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
            "weights_bytes": self.weights_bytes,
        }


@dataclass
class Variant:
    """A model with keys and values of one dtype."""

    model: Any
    kv_dtype: Literal["int8", "fp8"] | None


def variants_of(checkpoint: Path, dtype: torch.dtype, of: str) -> dict[str | None, Variant]:
    if of == "weights":
        return {
            weights: Variant(from_pretrained(checkpoint, dtype=dtype, weights=weights), None)
            for weights in DTYPES_OF[of]
        }
    model = from_pretrained(checkpoint, dtype=dtype)
    return {kv_dtype: Variant(model, kv_dtype) for kv_dtype in DTYPES_OF[of]}


def run_prompt(
    variants: dict[str | None, Variant],
    prompt: passkey.PasskeyPrompt,
    answer: list[int],
    rows: dict[str | None, Row],
) -> None:
    ids = torch.tensor([*prompt.input_ids, *answer])
    first = len(prompt.input_ids) - 1  # the position whose next token begins the answer
    caches = {
        name: TreeCache(each.model.config, kv_dtype=each.kv_dtype, growth=1)
        for name, each in variants.items()
    }
    is_right = dict.fromkeys(rows, True)
    # In chunks, which bounds the memory of the distributions.
    for begin in range(0, len(ids) - 1, CHUNK):
        inputs, expected = ids[:-1][begin : begin + CHUNK], ids[1:][begin : begin + CHUNK]
        of_prompt = max(0, min(first - begin, CHUNK))
        truth = None
        for name, row in rows.items():
            logits = variants[name].model(inputs[None], **{CACHE_NAME: caches[name]}).logits[0]
            found = logits.float().log_softmax(-1)
            truth = found if truth is None else truth
            top = found.argmax(-1)
            is_right[name] &= bool((top == expected)[of_prompt:].all())
            row.losses.append(-found.gather(1, expected[:, None])[:of_prompt, 0])
            row.divergences.append((truth.exp() * (truth - found)).sum(-1))
            row.same.append(truth.argmax(-1) == top)
    for name, row in rows.items():
        row.right += is_right[name]
        row.prompts += 1
        row.bytes_per_token = caches[name].num_bytes / (len(ids) - 1)
        row.weights_bytes = sum(x.nbytes for x in variants[name].model.parameters())


@torch.inference_mode()
def measure(
    checkpoint: Path,
    dtype: torch.dtype,
    suites: dict[int, int],
    num_prompts: int | None = None,
    of: str = "kv_dtype",
) -> list[dict[str, Any]]:
    """A row for each length and dtype, of `suites` or of `num_prompts` prompts at each depth."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    variants = variants_of(checkpoint, dtype, of)
    longest = variants[None].model.config.max_position_embeddings
    suites = {n: num_prompts or count for n, count in suites.items() if n + 10 <= longest}
    haystack = passkey.Haystack.from_directory(CHECKPOINT / "text", tokenizer)
    result = []
    with progress_bar(True) as progress:
        task = progress.add_task("prompts", total=len(DEPTHS) * sum(suites.values()))
        for tokens, per_depth in suites.items():
            progress.update(task, description=f"{tokens:,} tokens")
            rows = {name: Row() for name in variants}
            for depth in DEPTHS:
                for seed in range(per_depth):
                    prompt = passkey.build_prompt(haystack, tokens, depth=depth, seed=seed)
                    answer = tokenizer(passkey.answer(prompt.key), add_special_tokens=False)
                    run_prompt(variants, prompt, answer["input_ids"], rows)
                    progress.advance(task)
            own = str(dtype).removeprefix("torch.")
            result += [
                {"name": f"{tokens:,} tokens", of: name or own, **row.to_json()}
                for name, row in rows.items()
            ]
    for row in result:
        row["wrong"] = not row["kld_mean"] < MAX_KLD[of]
    return result


NOTES = (
    "The checkpoint reads prose with a key at 11 depths, which examples/passkey-llama (4 layers, 2"
    " key/value heads of 32) was not trained on, and must answer exactly. All of it runs in the"
    " dtype of the first row but for keys and values, or for the weights of linear layers.",
    "perplexity: of the prompts' tokens. KLD: Kullback-Leibler divergence of the next token's "
    "distribution from that of the first row, in nats, at every position. same top: share of "
    "positions with the same likeliest token.",
    "bytes a token: keys, values and scales of all layers. weights MB: all of them, of which the "
    "embedding and the head stay as they are.",
)


def name_of(checkpoint: Path, of: str) -> str:
    """The name of the files with the results."""
    name = of if of == "kv_dtype" else "weights_dtype"
    return name if checkpoint == CHECKPOINT else f"{name}_{checkpoint.name}"


def report_of(
    rows: Sequence[dict[str, Any]], checkpoint: Path = CHECKPOINT, of: str = "kv_dtype"
) -> Report:
    what = "keys and values" if of == "kv_dtype" else "weights"
    return Report(
        name=name_of(checkpoint, of),
        title=f"Accuracy of {checkpoint.name} by dtype of {what}",
        notes=NOTES,
        environment=environment(),
        rows=list(rows),
        columns=columns_of(
            rows,
            {
                "prompt": lambda row: row["name"],
                of: lambda row: row[of],
                "passkeys": lambda row: f"{row['right']} of {row['prompts']}",
                "perplexity": lambda row: f"{row['perplexity']:.4f}",
                "KLD mean": lambda row: f"{row['kld_mean']:.1e}",
                "KLD p99": lambda row: f"{row['kld_p99']:.1e}",
                "same top %": lambda row: f"{100 * row['same_top']:.2f}",
                "bytes a token": lambda row: f"{row['bytes_per_token']:.0f}",
                "weights MB": lambda row: f"{row['weights_bytes'] / 1e6:.2f}",
                "right": verdict,
            },
        ),
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "kv_dtype")
    parser.add_argument("--of", choices=tuple(DTYPES_OF), default="kv_dtype", help="what varies")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, help="directory of a causal language model"
    )
    parser.add_argument("--prompts", type=int, help="number of prompts at each depth")
    parser.add_argument("--quick", action="store_true", help="a few short prompts, to try it")
    parsed = parser.parse_args(arguments)
    suites = {500: 1} if parsed.quick else SUITES
    rows = measure(parsed.checkpoint, DTYPES[parsed.dtype], suites, parsed.prompts, parsed.of)
    return finish(report_of(rows, parsed.checkpoint, parsed.of), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
