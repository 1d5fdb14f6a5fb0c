# SPDX-License-Identifier: BSD-3-Clause
"""A decoding step whose older keys lie in the host's memory, compared with the longer of its two
parts and with transformers' offloaded cache.

    python -m benchmarks.cuda.far_keys --out DIR

A few layers with the heads of Llama 3.1 8B and next to no other weights, so that a step is its
attention. All caches have the same random keys, and all steps the same token.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from benchmarks import cuda
from tree_attention import hf, lean_decode
from tree_attention.hf.cache.far import FarLayer

from ..harness.measure import Samples, time_alternating
from ..harness.program import finish, parser_of
from ..harness.report import Column, Report, environment, verdict

NAME = "far_keys_cuda"
MOST_OF_LONGER, LEAST_OF_OFFLOADED = 1.1, 2.0  # the goals
STEP, NEAR, FAR, OFFLOADED = "step", "GPU's part", "host's part", "offloaded cache"
CHUNK = 8192  # tokens that are made at a time
SECONDS = 20.0  # of timing
# Largest difference of logits, relative to the largest one: bfloat16 rounds other sums.
TOLERANCE = 0.03


@dataclass(frozen=True)
class Sizes:
    far: int = 256 << 10
    near: int = 16 << 10
    layers: int = 4
    hidden: int = 512
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=512,
            hidden_size=self.hidden,
            intermediate_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads_kv,
            head_dim=self.head_dim,
            max_position_embeddings=1 << 22,
        )

    @property
    def key_bytes(self) -> int:
        """The far keys and values."""
        return self.layers * self.far * self.heads_kv * self.head_dim * 2 * 2


def make_model(sizes: Sizes, attention: str, device: torch.device) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        sizes.config(), attn_implementation=attention, dtype=torch.bfloat16
    )
    return model.eval().to(device)


def rows(sizes: Sizes, layer: int, begin: int, end: int, device: torch.device) -> list[Tensor]:
    """The keys and the values of some tokens, which begin with a chunk."""
    shape = 1, sizes.heads_kv, CHUNK, sizes.head_dim
    found: list[list[Tensor]] = [[], []]
    for chunk in range(begin, end, CHUNK):
        generator = torch.Generator(device).manual_seed((layer << 32) + chunk)
        for parts in found:
            x = torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device)
            parts.append(x[:, :, : end - chunk])
    return [torch.cat(parts, 2) for parts in found]


def fill(cache: Any, sizes: Sizes, begin: int, end: int, chunk: int, device: torch.device) -> None:
    for first in range(begin, end, chunk):
        last = min(first + chunk, end)
        for layer in range(sizes.layers):
            cache.update(*rows(sizes, layer, first, last, device), layer)


def host_part(sizes: Sizes, cache: hf.TreeCache) -> Callable[[int], Any]:
    """Attention of the host to all that lies there, as in a step."""
    query = torch.randn(1, sizes.heads, 1, sizes.head_dim, dtype=torch.bfloat16, device="cpu")

    def attend(_: int) -> None:
        for layer in cache.kv_layers:
            assert isinstance(layer, FarLayer)
            for _, run in layer.host.until(layer.dropped):
                keys, values, scales = layer.operands(run.buffers)
                options = {"page_table": run.table, "out_dtype": torch.float32, **scales}
                lean_decode(query, keys, values, **options)

    return attend


def measure(sizes: Sizes, device: torch.device) -> tuple[dict[str, Samples], float, int]:
    """Seconds of each step and part; the largest relative difference of the step's logits from
    those of transformers; and the number of far tokens."""
    options: dict[str, Any] = {"far": "cpu", "near_tokens": sizes.near}
    ours = hf.enable(make_model(sizes, "sdpa", device), **options)
    theirs = make_model(sizes, "sdpa", device)
    total = sizes.far + sizes.near
    cache, near = hf.TreeCache(ours.config, **options), hf.TreeCache(ours.config)
    cache.reserve(total)
    near.reserve(sizes.near)
    fill(cache, sizes, 0, total, CHUNK, device)
    fill(near, sizes, 0, sizes.near, CHUNK, device)
    offloaded = DynamicCache(config=theirs.config, offloading=True)
    fill(offloaded, sizes, 0, total, total, device)
    token = torch.tensor([[7]], device=device)

    def step(model: Any, held: Any) -> Callable[[int], Tensor]:
        def run(_: int) -> Tensor:
            found: Tensor = model(token, **{hf.CACHE_NAME: held}).logits
            torch.cuda.synchronize()
            return found

        return run

    with torch.inference_mode():
        # Both hold the same tokens, and these alone, only at the first step.
        found, expected = (step(*pair)(0) for pair in ((ours, cache), (theirs, offloaded)))
        apart = float((found - expected).abs().max() / expected.abs().max())
        dropped = min(layer.dropped for layer in cache.kv_layers)
        samples = time_alternating(
            {
                STEP: step(ours, cache),
                NEAR: step(ours, near),
                FAR: host_part(sizes, cache),
                OFFLOADED: step(theirs, offloaded),
            },
            num_sets=1,
            seconds=SECONDS,
        )
    return samples, apart, dropped


def run(sizes: Sizes, device: torch.device) -> Report:
    from . import machine

    samples, apart, dropped = measure(sizes, device)
    seconds = {name: one.median for name, one in samples.items()}
    longer = seconds[STEP] / max(seconds[NEAR], seconds[FAR])
    gain = seconds[OFFLOADED] / seconds[STEP]
    row: dict[str, Any] = {
        "name": f"{sizes.heads}/{sizes.heads_kv} heads of {sizes.head_dim}, {sizes.layers} layers, "
        f"{dropped:,} far tokens",
        "far tokens": dropped,
        "times": {name: one.to_json() for name, one in samples.items()},
        "over the longer part": longer,
        "offloaded over ours": gain,
        "host GB/s": 1e-9 * sizes.key_bytes / sizes.far * dropped / seconds[FAR],
        "difference of logits": apart,
        "wrong": not apart <= TOLERANCE,
    }
    columns = [Column("case", [row["name"]])]
    columns += [Column(f"{name} ms", [f"{1e3 * x:.2f}"]) for name, x in seconds.items()]
    columns += [
        Column("host GB/s", [f"{row['host GB/s']:.0f}"]),
        Column("step / longer part", [f"{longer:.2f}"]),
        Column("offloaded / step", [f"{gain:.2f}"]),
        Column("right", [verdict(row)]),
    ]
    met = {True: "met", False: "missed"}
    return Report(
        name=NAME,
        title="A decoding step with far keys in the host's memory",
        notes=[
            "Medians of whole steps, on the host's clock, in turn. The parts are the same step "
            "with no other keys than near ones, and the host's attention to the far ones alone.",
            "An offloaded cache has its keys come to the GPU in each step, and go back.",
        ],
        environment=environment(**machine.environment()),
        rows=[row],
        columns=columns,
        summary=[
            f"At most {MOST_OF_LONGER} of the longer part: {met[longer <= MOST_OF_LONGER]}. "
            f"At least {LEAST_OF_OFFLOADED:g} times as fast as the offloaded cache: "
            f"{met[gain >= LEAST_OF_OFFLOADED]}."
        ],
        is_read_back=True,
    )


def main(arguments: list[str]) -> int:
    parsed = parser_of(__doc__, NAME).parse_args(arguments)
    if (why := cuda.unavailable()) is not None:
        print(f"far_keys: {why}")
        return 2
    return finish(run(Sizes(), torch.device("cuda", 0)), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
