# SPDX-License-Identifier: BSD-3-Clause
"""A long prefix restored from disk instead of computed again: the time of both, by kv_dtype.

    python benchmarks/restore.py --out DIR

The model is the 1B-shaped one of benchmarks/engines, with 4 layers and random weights.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.engines.checkpoint import make
from benchmarks.harness.program import finish, parser_of, progress_bar
from benchmarks.harness.report import Report, columns_of, environment, verdict
from tree_attention import hf
from tree_attention.hf import CACHE_NAME

KV_DTYPES: tuple[Literal["int8"] | None, ...] = (None, "int8")
CHUNK = 2048


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    result = run()
    return result, time.perf_counter() - begin


def prefill(model: Any, ids: torch.Tensor, cache: hf.TreeCache) -> None:
    cache.reserve(ids.shape[1])
    for chunk in ids.split(CHUNK, dim=1):
        model(chunk, **{CACHE_NAME: cache}, logits_to_keep=1)


def next_token(model: Any, cache: hf.TreeCache) -> torch.Tensor:
    """The logits of one more token, of which the cache is left without."""
    ids = torch.tensor([[7]])
    position = torch.tensor([[cache.get_seq_length()]])
    logits: torch.Tensor = model(ids, **{CACHE_NAME: cache}, position_ids=position).logits
    return logits


@torch.inference_mode()
def measure(checkpoint: Path, context: int) -> list[dict[str, Any]]:
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, attn_implementation="tree_attention"
    ).eval()
    ids = torch.randint(
        8, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0)
    )
    rows = []
    with progress_bar(True) as progress, tempfile.TemporaryDirectory() as folder:
        task = progress.add_task("", total=len(KV_DTYPES))
        for kv_dtype in KV_DTYPES:
            progress.update(task, description=f"prefill, kv_dtype={kv_dtype}")
            cache = hf.TreeCache(model.config, kv_dtype=kv_dtype)
            _, prefill_seconds = timed(partial(prefill, model, ids, cache))
            progress.advance(task)
            path = Path(folder) / str(kv_dtype)
            _, save_seconds = timed(partial(cache.save, path))
            num_bytes = sum(file.stat().st_size for file in path.iterdir())
            loaded, load_seconds = timed(partial(hf.TreeCache.load, path, model.config))
            same = torch.equal(next_token(model, cache), next_token(model, loaded))
            rows.append(
                {
                    "name": f"{context:,} tokens, {kv_dtype or 'bfloat16'}",
                    "prefill_seconds": prefill_seconds,
                    "save_seconds": save_seconds,
                    "load_seconds": load_seconds,
                    "bytes": num_bytes,
                    "wrong": not same,
                }
            )
    return rows


NOTES = (
    "4 layers in the shape of Llama 3.2 1B with random weights, bfloat16, one process. Prefill is "
    f"in chunks of {CHUNK:,} tokens. Save writes to the temporary directory and waits for the disk;"
    " load reads pages that the system may still have in memory, and compares the digest.",
    "right: the next token's logits have the same bits with the loaded cache.",
)


def report_of(rows: list[dict[str, Any]]) -> Report:
    for row in rows:
        row["times"] = {
            name: dict.fromkeys(("median_us", "p10_us", "p90_us"), 1e6 * row[f"{name}_seconds"])
            for name in ("prefill", "save", "load")
        }
    return Report(
        name="restore",
        title="A prefix restored instead of computed",
        notes=NOTES,
        environment=environment(threads=torch.get_num_threads()),
        rows=rows,
        columns=columns_of(
            rows,
            {
                "prefix, cache": lambda row: row["name"],
                "prefill s": lambda row: f"{row['prefill_seconds']:.2f}",
                "save s": lambda row: f"{row['save_seconds']:.2f}",
                "load s": lambda row: f"{row['load_seconds']:.2f}",
                "prefill / load": lambda row: f"{row['prefill_seconds'] / row['load_seconds']:.0f}",
                "MB": lambda row: f"{row['bytes'] / 1e6:.0f}",
                "right": verdict,
            },
        ),
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "restore")
    parser.add_argument("--context", type=int, default=65536, metavar="TOKENS")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(".cache/engines"),
        metavar="DIR",
        help="where the model is or will be written, 1 GB (default .cache/engines)",
    )
    parsed = parser.parse_args(arguments)
    make(parsed.checkpoint)
    return finish(report_of(measure(parsed.checkpoint, parsed.context)), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
