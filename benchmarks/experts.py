# SPDX-License-Identifier: BSD-3-Clause
"""One token through the experts that it is sent to, beside transformers' ways and reading alone.

    python benchmarks/experts.py --out DIR

The experts have the shape of Qwen3-30B-A3B's: 128, of which a token takes 8.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness.measure import Load, load_warnings, read_memory, time_alternating
from benchmarks.harness.program import finish, parser_of
from benchmarks.harness.report import Report, columns_of, environment, verdict
from tree_attention.weights.experts import experts_forward, quantise_experts
from tree_attention.weights.parts import OfFile

CONFIG = Qwen3MoeConfig(num_experts=128, hidden_size=2048, moe_intermediate_size=768)
CHOICES = 8
NAMES = ("gate_up_proj", "down_proj")
# The largest errors that are right, as shares of the largest output. Rounding the weights to 8 and
# 4 bits is most of the last two.
BOUNDS = {"bf16": 1e-2, "int8": 3e-2, "int4": 3e-1}


def modules() -> dict[str, nn.Module]:
    """The same experts in 16, 8 and 4 bits."""
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {"bf16": Qwen3MoeExperts(CONFIG).bfloat16()}
    for name in NAMES:
        nn.init.normal_(getattr(made["bf16"], name), std=0.02)
    for scheme in ("int8", "int4"):
        module = copy.copy(made["bf16"])
        module._parameters = dict(module._parameters)
        for name in NAMES:
            source = OfFile(getattr(made["bf16"], name))
            setattr(
                module, name, quantise_experts(module, name, source, None, scheme, torch.bfloat16)
            )
        made[scheme] = module
    return made


def weights_of(module: nn.Module, chosen: Tensor) -> Iterator[Tensor]:
    """What a token that is sent to these experts has to read."""
    for name in NAMES:
        for weight in (getattr(module, name), getattr(module, f"{name}_scale", None)):
            if weight is not None:
                yield from (weight[expert] for expert in chosen.flatten().tolist())


def exact(module: nn.Module, x: Tensor, chosen: Tensor) -> Tensor:
    """The mean of the chosen experts in float64."""
    outputs = []
    for expert in chosen.flatten().tolist():
        inner, outer = (getattr(module, name)[expert].double() for name in NAMES)
        gate, up = (x.double() @ inner.T).chunk(2, dim=-1)
        outputs.append(nn.functional.silu(gate) * up @ outer.T)
    return torch.stack(outputs).mean(dim=0)


@torch.no_grad()
def measure(seconds: float) -> list[dict[str, Any]]:
    of_dtype = modules()
    # One fewer than there are, so that the eight functions, which take turns, meet all of them.
    sets = torch.randperm(CONFIG.num_experts).view(-1, 1, CHOICES)[1:]
    x = torch.randn(1, CONFIG.hidden_size).bfloat16()
    weights = torch.full((1, CHOICES), 1 / CHOICES).bfloat16()
    ways: dict[tuple[str, str], Callable[..., Tensor]] = {
        ("ours", "bf16"): experts_forward,
        ("grouped_mm", "bf16"): grouped_mm_experts_forward,
        ("batched_mm", "bf16"): batched_mm_experts_forward,
        ("ours", "int8"): experts_forward,
        ("ours", "int4"): experts_forward,
    }

    def call(forward: Callable[..., Tensor], module: nn.Module, index: int) -> tuple[Tensor, int]:
        return forward(module, x, sets[index], weights), index

    def read(module: nn.Module, index: int) -> None:
        read_memory(*weights_of(module, sets[index]))

    functions: dict[str, Callable[[int], Any]] = {
        f"{way} {dtype}": partial(call, forward, of_dtype[dtype])
        for (way, dtype), forward in ways.items()
    }
    functions |= {f"read {dtype}": partial(read, module) for dtype, module in of_dtype.items()}
    with Load() as load:
        samples = time_alternating(functions, num_sets=len(sets), seconds=seconds)
    rows = []
    for way, dtype in ways:
        sample = samples[f"{way} {dtype}"]
        found, index = sample.result
        expected = exact(of_dtype["bf16"], x, sets[index])
        error = ((found.double() - expected).abs().max() / expected.abs().max()).item()
        rows.append(
            {
                "name": f"{way}, {dtype}",
                "bytes": sum(x.nbytes for x in weights_of(of_dtype[dtype], sets[0])),
                "times": {"call": sample.to_json()},
                "over_reading": sample.median / samples[f"read {dtype}"].median,
                "over_grouped": sample.median / samples["grouped_mm bf16"].median,
                "error": error,
                "wrong": not error <= BOUNDS[dtype],
                "load": load.others,
            }
        )
    return rows


NOTES = (
    f"One token, {CHOICES} of {CONFIG.num_experts} experts of {CONFIG.hidden_size} and "
    f"{CONFIG.moe_intermediate_size} columns, random weights; each call takes other experts. "
    "Medians of alternating calls through Python. grouped_mm and batched_mm are transformers' own.",
    "over reading: the time over that of reading the same bytes with all threads, in turn.",
    "error: of the largest output, against float64 on the weights in bfloat16.",
)


def report_of(rows: list[dict[str, Any]]) -> Report:
    return Report(
        name="experts",
        title="A token through its experts",
        notes=NOTES,
        environment=environment(),
        rows=rows,
        columns=columns_of(
            rows,
            {
                "way": lambda row: row["name"],
                "ms": lambda row: f"{row['times']['call']['median_us'] / 1e3:.2f}",
                "MB": lambda row: f"{row['bytes'] / 1e6:.0f}",
                "over reading": lambda row: f"{row['over_reading']:.2f}",
                "over grouped_mm": lambda row: f"{row['over_grouped']:.2f}",
                "error": lambda row: f"{row['error']:.1e}",
                "right": verdict,
            },
        ),
        warnings=load_warnings([rows[0]["load"]]),
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "experts")
    parser.add_argument("--seconds", type=float, default=10.0, help="timed seconds (default 10)")
    parsed = parser.parse_args(arguments)
    return finish(report_of(measure(parsed.seconds)), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
