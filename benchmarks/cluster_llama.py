# SPDX-License-Identifier: BSD-3-Clause
"""What bench_generation.py runs on every host: generation by tree and by ring over one cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import tree_attention.hf.attention as attention_module
from tree_attention import ring_decode
from tree_attention.bench.generation import generate
from tree_attention.exchange import Communicator
from tree_attention.hf import TreeCache
from tree_attention.hf.cache import TreeCacheLayer
from tree_attention.hf.masks import KeyRanges

from .bench_llama import fill, make_model

TREE, RING = "tree", "ring"
_GENERATIONS = 2  # of each way, in turn
_TIMEOUT = 300.0


def attend_by_ring(
    query: Tensor,
    layer: TreeCacheLayer,
    ranges: KeyRanges,
    out_dtype: torch.dtype,
    keywords: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """In place of the function by which the model's attention merges over ranks.

    The buffers travel whole, as a part of them would have to be copied first: with a `growth` of
    64, at most 63 keys more.
    """
    shard = layer.shard
    local_ranges = ranges.local(shard.layout, shard.rank)
    options = {"group": shard.comm, "timeout": shard.timeout, **keywords}
    o, lse = ring_decode(query, layer.keys, layer.values, local_ranges, **options)
    return o.to(out_dtype), lse


@contextmanager
def by_ring() -> Iterator[None]:
    with mock.patch.object(attention_module, "_over_shard", attend_by_ring):
        yield


def run_context(model: Any, context: int, tokens: int) -> dict[str, Any]:
    """Generations of both ways, in turn, from the same random context."""
    prompt = torch.arange(context + 1)[None] * 7919 % model.config.vocab_size
    result: dict[str, Any] = {}
    caches = {}
    for way in (TREE, RING):  # of their own, as changing the call would compare signatures again
        cache = TreeCache(model.config, Communicator(), timeout=_TIMEOUT, growth=64)
        cache.reserve(context + 2 * tokens)
        caches[way] = fill(cache, model.config, context)
        result[way] = {"tokens": [], "seconds": [], "bytes": [], "exchange_share": []}
    for turn in range(1 + _GENERATIONS):
        for way, cache in caches.items():
            with by_ring() if way == RING else nullcontext():
                # The first one also connects and allocates; the first token of each is not timed.
                count = tokens + 1 if turn else 2
                made = generate(model, prompt, cache, max_new_tokens=count, min_new_tokens=count)
            cache.crop(context - cache.get_seq_length())
            if turn == 0:
                continue
            assert made.steps is not None
            first, last = made.arrivals[0], made.arrivals[-1]
            sent = (last.bytes_sent - first.bytes_sent) // (len(made.arrivals) - 1)
            result[way]["tokens"].append(made.tokens)
            result[way]["seconds"] += made.steps.seconds
            result[way]["bytes"].append(sent)
            exchanging = last.exchange_seconds - first.exchange_seconds
            result[way]["exchange_share"].append(exchanging / sum(made.steps.seconds))
    return result


def main(specification: Path, out: Path) -> None:
    spec = json.loads(specification.read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    with torch.inference_mode():
        model = make_model(spec["layers"])
        model.set_attn_implementation("tree_attention")
        for context in spec["contexts"]:
            own = run_context(model, context, spec["tokens"])
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, own)
            results[str(context)] = every
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
