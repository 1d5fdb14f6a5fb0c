# SPDX-License-Identifier: BSD-3-Clause
"""Multi-head latent attention in a whole model: transformers' cache of latents beside ours.

    python -m benchmarks.latent model --out DIR

The model has the attention of DeepSeek-V2-Lite (16 heads, latents of 512 + 64 columns), 2 layers,
small experts and random weights. Both caches hold latents; transformers makes keys and values of
all heads from all of them for every token.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV2Config, DynamicCache

from tree_attention import hf
from tree_attention.hf import CACHE_NAME

from ..harness import measure
from ..harness.program import finish, parser_of, progress_bar
from ..harness.published_shapes import DEEPSEEK_V2_LITE_ATTENTION
from ..harness.report import Report, columns_of, environment, verdict

CONTEXTS = (4096, 8192)
CHUNK = 2048
THEIRS, OURS = "sdpa, DynamicCache", "tree_attention"


def configuration(**changes: Any) -> DeepseekV2Config:
    shape: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": 2048,
        "intermediate_size": 1408,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        **DEEPSEEK_V2_LITE_ATTENTION,
        "max_position_embeddings": 32768,
    }
    return DeepseekV2Config(**shape | changes)


class Decoder:
    """A model and its cache."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, cache

    def prefill(self, ids: Tensor) -> float:
        """Return the seconds that it takes."""
        begin = time.perf_counter()
        for chunk in ids.split(CHUNK, dim=1):
            self.model(chunk, **{CACHE_NAME: self.cache}, logits_to_keep=1)
        return time.perf_counter() - begin

    def step(self, _: int = 0) -> Tensor:
        """Return the logits after one token, the same one for every decoder."""
        token = self.cache.get_seq_length() * 7919 % self.model.config.vocab_size
        logits: Tensor = self.model(torch.tensor([[token]]), **{CACHE_NAME: self.cache}).logits
        return logits.float()


def exact_step(decoder: Decoder) -> Tensor:
    """Return what the next step of one with transformers' cache would in float32."""
    cache = copy.deepcopy(decoder.cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.float(), layer.values.float()
        layer.dtype = torch.float32
    return Decoder(copy.deepcopy(decoder.model).float(), cache).step()


@torch.inference_mode()
def run(config: DeepseekV2Config, contexts: list[int], tokens: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    enabled = hf.enable(copy.deepcopy(model))
    rows = []
    with progress_bar(True) as progress:
        task = progress.add_task("latents", total=len(contexts))
        for context in contexts:
            progress.update(task, description=f"latents, {context} tokens")
            ids = torch.randint(8, config.vocab_size, (1, context))
            cache = hf.TreeCache(config)
            cache.reserve(context)
            decoders = {
                THEIRS: Decoder(model, DynamicCache(config=config)),
                OURS: Decoder(enabled, cache),
            }
            prefill = {name: decoder.prefill(ids) for name, decoder in decoders.items()}
            num_bytes = cache.num_bytes
            exact = exact_step(decoders[THEIRS])
            error = {
                name: (decoder.step() - exact).abs().max().item()
                for name, decoder in decoders.items()
            }
            steps = {name: decoder.step for name, decoder in decoders.items()}
            samples = measure.time_in_step(steps, num_sets=1, rounds=tokens)
            rows.append(
                {
                    "name": f"{context:,} tokens",
                    "prefill_seconds": prefill,
                    "times": {name: sample.to_json() for name, sample in samples.items()},
                    "bytes_per_token": num_bytes / context,
                    "errors": error,
                    "wrong": not error[OURS]
                    <= 2 * error[THEIRS] + torch.finfo(torch.bfloat16).eps * exact.abs().max(),
                }
            )
            progress.advance(task)
    return rows


NOTES = (
    "16 heads, latents of 512 + 64 columns, 2 layers, random weights, bfloat16, one process. "
    f"Prefill is in chunks of {CHUNK:,} tokens; steps alternate token by token.",
    "bytes: what our cache has allocated, for a token. Keys and values of all heads would be "
    "20,480.",
    "right: the error of the first step's logits, to float32 arithmetic on transformers' latents, "
    "is at most twice that of transformers, and a rounding of the largest.",
)


def report_of(rows: list[dict[str, Any]]) -> Report:
    def step_ms(row: dict[str, Any], name: str) -> float:
        return float(row["times"][name]["median_us"]) / 1e3

    return Report(
        name="latent_model",
        is_read_back=True,
        title="Multi-head latent attention, transformers' cache beside ours",
        notes=NOTES,
        environment=environment(threads=torch.get_num_threads()),
        rows=rows,
        columns=columns_of(
            rows,
            {
                "context": lambda row: row["name"],
                "prefill s": lambda row: f"{row['prefill_seconds'][OURS]:.2f}",
                "transformers": lambda row: f"{row['prefill_seconds'][THEIRS]:.2f}",
                "ms per token": lambda row: f"{step_ms(row, OURS):.1f}",
                "its ms": lambda row: f"{step_ms(row, THEIRS):.1f}",
                "its / ours": lambda row: f"{step_ms(row, THEIRS) / step_ms(row, OURS):.1f}",
                "bytes per token": lambda row: f"{row['bytes_per_token']:.0f}",
                "right": verdict,
            },
        ),
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "latent_model")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--tokens", type=int, default=8, help="timed tokens (default 8)")
    parsed = parser.parse_args(arguments)
    measure.pin_threads()
    rows = run(configuration(), parsed.contexts, parsed.tokens)
    return finish(report_of(rows), parsed.out)
