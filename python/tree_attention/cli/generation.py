# SPDX-License-Identifier: BSD-3-Clause
"""What a generation costs: every token's arrival, the exchange between ranks and the memory."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from ..exchange import Communicator
from ..hf import TreeCache


@dataclass(frozen=True)
class Arrival:
    """A token, seconds since the start, and the exchange so far on this rank."""

    token: int
    seconds: float
    bytes_sent: int
    exchange_seconds: float


@dataclass(frozen=True)
class Generation:
    """One sequence generated from `prompt_tokens` tokens, as seen by this rank."""

    prompt_tokens: int
    arrivals: Sequence[Arrival]
    kv_bytes: int  # allocated on this rank

    @property
    def tokens(self) -> list[int]:
        return [arrival.token for arrival in self.arrivals]

    @property
    def ttft(self) -> float:
        return self.arrivals[0].seconds

    @property
    def steps(self) -> list[float]:
        """Seconds between each token and the one before it."""
        return [b.seconds - a.seconds for a, b in pairwise(self.arrivals)]

    def to_json(self) -> dict[str, Any]:
        first, last, steps = self.arrivals[0], self.arrivals[-1], self.steps
        result: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.arrivals),
            "tokens": self.tokens,
            "ttft_s": self.ttft,
            "prefill_tokens_per_s": self.prompt_tokens / self.ttft,
            "kv_bytes_per_rank": self.kv_bytes,
        }
        if steps:
            decode_seconds = last.seconds - first.seconds
            # A percentile is a step that was: the least that so many per cent do not exceed.
            slow = np.percentile(steps, 99, method="inverted_cdf")
            result |= {
                "inter_token_p50_ms": statistics.median(steps) * 1e3,
                "inter_token_p99_ms": float(slow) * 1e3,
                "tokens_per_s": len(steps) / decode_seconds,
                "bytes_sent_per_token": (last.bytes_sent - first.bytes_sent) / len(steps),
                "exchange_share": (last.exchange_seconds - first.exchange_seconds) / decode_seconds,
            }
        return result


class ArrivalRecorder(BaseStreamer):
    """Notes when each token arrives and hands it on to another streamer."""

    def __init__(self, comm: Communicator | None, streamer: BaseStreamer | None = None) -> None:
        self.arrivals: list[Arrival] = []
        self._comm, self._streamer = comm, streamer
        self._prompt_seen = False
        self._begin = time.perf_counter()

    def put(self, value: Tensor) -> None:
        now = time.perf_counter() - self._begin
        if self._prompt_seen:
            sent = (0, 0.0) if self._comm is None else (self._comm.bytes_sent, self._comm.seconds)
            self.arrivals += [Arrival(token, now, *sent) for token in value.flatten().tolist()]
        self._prompt_seen = True  # generate puts the prompt first
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


def generate(
    model: Any,
    input_ids: Tensor,
    cache: TreeCache | DynamicCache,
    *,
    streamer: BaseStreamer | None = None,
    **options: Any,
) -> Generation:
    """One sequence generated greedily into `cache`; on every rank of the cache's group.

    `model` is a transformers model; `options` are its generate's, for example `max_new_tokens`.
    """
    recorder = ArrivalRecorder(cache.shard.comm if isinstance(cache, TreeCache) else None, streamer)
    with torch.inference_mode():
        model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            past_key_values=cache,
            streamer=recorder,
            do_sample=False,
            **options,
        )
    return Generation(input_ids.shape[1], recorder.arrivals, cache_bytes(cache))


def cache_bytes(cache: TreeCache | DynamicCache) -> int:
    if isinstance(cache, TreeCache):
        return cache.num_bytes
    layers: Sequence[Any] = cache.layers
    return sum(
        x.nbytes for layer in layers if layer.is_initialized for x in (layer.keys, layer.values)
    )
