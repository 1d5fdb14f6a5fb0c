# SPDX-License-Identifier: BSD-3-Clause
"""Cost of a decoding step beside its arithmetic: in a model so small that Python is most of it.

    python benchmarks/step_cost.py --out DIR

One sequence, one token at a time, on one thread: transformers' caches and ours, eager and compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness.measure import MAX_ROUNDS, Samples, time_alternating
from benchmarks.harness.program import finish, parser_of
from benchmarks.harness.report import Report, columns_of, environment, verdict
from tree_attention.hf import CACHE_NAME, TreeCache

PROMPT = 64
MAX_LENGTH = PROMPT + 2 * MAX_ROUNDS
BASELINE = "StaticCache"

Step = Callable[[int], Tensor]


def model_of(attention: str, num_layers: int) -> Any:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def steps_of(num_layers: int, compiled: bool) -> dict[str, Step]:
    """A function for each cache, which decodes the next token; the same tokens for all."""
    sdpa, ours = model_of("sdpa", num_layers), model_of("tree_attention", num_layers)
    caches: dict[str, tuple[Any, Any]] = {
        BASELINE: (sdpa, StaticCache(sdpa.config, max_cache_len=MAX_LENGTH)),
        "TreeCache(max_length)": (ours, TreeCache(ours.config, max_length=MAX_LENGTH)),
    }
    if not compiled:
        caches["DynamicCache"] = sdpa, DynamicCache(config=sdpa.config)
        caches["TreeCache"] = ours, TreeCache(ours.config)
    return {name: step_of(model, cache, compiled) for name, (model, cache) in caches.items()}


def step_of(model: Any, cache: Any, compiled: bool) -> Step:
    model(torch.arange(PROMPT)[None], **{CACHE_NAME: cache})
    forward = torch.compile(model.forward, fullgraph=True) if compiled else model.forward
    # As from `generate`, which has made the positions of all tokens.
    positions = iter(torch.arange(PROMPT, MAX_LENGTH)[None].split(1, dim=1))
    token = torch.tensor([[7]])

    def step(_: int) -> Tensor:
        position = next(positions)
        logits: Tensor = forward(token, **{CACHE_NAME: cache}, position_ids=position).logits
        return logits

    return step


@torch.no_grad()
def measure(num_layers: int, seconds: float) -> list[dict[str, Any]]:
    rows = []
    for way in ("eager", "compiled"):
        samples = time_alternating(
            steps_of(num_layers, way == "compiled"), num_sets=1, seconds=seconds
        )
        baseline = samples[BASELINE]
        rows += [row_of(name, way, x, baseline, num_layers) for name, x in samples.items()]
    return rows


def row_of(
    name: str, way: str, samples: Samples, baseline: Samples, num_layers: int
) -> dict[str, Any]:
    return {
        "name": f"{name}, {way}",
        "us_per_layer": samples.median * 1e6 / num_layers,
        "us_above": (samples.median - baseline.median) * 1e6 / num_layers,
        "wrong": not torch.allclose(samples.result, baseline.result, 1e-3, 1e-3),
        "times": {name: samples.to_json()},
    }


NOTES = (
    "A Llama of 64 hidden units with 8 query and 2 key-value heads of 8 in float32, one sequence, "
    f"{PROMPT} tokens before the first step, room for {MAX_LENGTH}. One thread. The model's own "
    "Python and small operators are in all times, and the difference to StaticCache of the same "
    "way is what a cache with its attention adds. transformers' caches with sdpa.",
    "right: the logits after the last step are those of StaticCache.",
)


def report_of(rows: list[dict[str, Any]], num_layers: int) -> Report:
    return Report(
        name="step_cost",
        title=f"A decoding step of {num_layers} tiny layers",
        notes=NOTES,
        environment=environment(),
        rows=rows,
        columns=columns_of(
            rows,
            {
                "cache": lambda row: row["name"],
                "ms a token": lambda row: f"{median_us(row) / 1e3:.2f}",
                "µs a layer": lambda row: f"{row['us_per_layer']:.0f}",
                "µs a layer above StaticCache": lambda row: f"{row['us_above']:+.1f}",
                "right": verdict,
            },
        ),
    )


def median_us(row: dict[str, Any]) -> float:
    (times,) = row["times"].values()
    median: float = times["median_us"]
    return median


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "step_cost")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="timed seconds eager, and compiled (default 10)"
    )
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = measure(parsed.layers, parsed.seconds)
    return finish(report_of(rows, parsed.layers), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
