# SPDX-License-Identifier: BSD-3-Clause
"""A generation: when each token arrives, what it costs, and how the terminal shows it."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, TextStreamer
from transformers.generation.streamers import BaseStreamer

from ..exchange import Communicator
from ..hf import TreeCache
from ..hf.release import CACHE_NAME
from ..weights.split import mesh_of
from .usage import plain_console

# With fewer tokens a rate would show the time of the set-up, or chance.
_FEWEST_PROMPT_TOKENS, _FEWEST_NEW_TOKENS = 256, 16


@dataclass(frozen=True)
class Arrival:
    """A new token, with what this rank had spent when it arrived."""

    token: int
    seconds: float  # since the generation began
    merge_bytes: int  # sent to merge attention
    sum_bytes: int  # sent for sums and logits of weights that are split
    exchange_seconds: float


@dataclass(frozen=True)
class Generation:
    """One sequence that a model generated, as this rank saw it."""

    prompt_tokens: int
    arrivals: Sequence[Arrival]
    weight_bytes: int  # of the weights on this rank
    kv_bytes: int  # allocated for keys and values on this rank

    @property
    def tokens(self) -> list[int]:
        return [arrival.token for arrival in self.arrivals]

    @property
    def gaps(self) -> list[float]:
        """Seconds between each new token and the one before it."""
        return [b.seconds - a.seconds for a, b in pairwise(self.arrivals)]

    def to_json(self) -> dict[str, Any]:
        first, last, gaps = self.arrivals[0], self.arrivals[-1], sorted(self.gaps)
        result: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.arrivals),
            "tokens": self.tokens,
            "ttft_s": first.seconds,
            "prefill_tokens_per_s": self.prompt_tokens / first.seconds,
            "weight_bytes_per_rank": self.weight_bytes,
            "kv_bytes_per_rank": self.kv_bytes,
        }
        if gaps:
            decode_seconds = last.seconds - first.seconds
            merge_bytes = (last.merge_bytes - first.merge_bytes) / len(gaps)
            sum_bytes = (last.sum_bytes - first.sum_bytes) / len(gaps)
            p99 = gaps[-(-len(gaps) * 99 // 100) - 1]  # at least 99 % of the gaps are no longer
            result |= {
                "inter_token_p50_ms": statistics.median(gaps) * 1e3,
                "inter_token_p99_ms": p99 * 1e3,
                "tokens_per_s": len(gaps) / decode_seconds,
                "bytes_sent_per_token": merge_bytes + sum_bytes,
                "merge_bytes_per_token": merge_bytes,
                "sum_bytes_per_token": sum_bytes,
                "exchange_share": (last.exchange_seconds - first.exchange_seconds) / decode_seconds,
            }
        return result


class ArrivalRecorder(BaseStreamer):
    """Notes when each token arrives and hands the token on to another streamer."""

    def __init__(
        self,
        merging: Sequence[Communicator] = (),
        summing: Sequence[Communicator] = (),
        streamer: BaseStreamer | None = None,
    ) -> None:
        self.arrivals: list[Arrival] = []
        self._merging, self._summing, self._streamer = merging, summing, streamer
        self._prompt_seen = False
        self._begin = time.perf_counter()

    def put(self, value: Tensor) -> None:
        now = time.perf_counter() - self._begin
        if self._prompt_seen:
            merge, sums = (sum(c.bytes_sent for c in x) for x in (self._merging, self._summing))
            waited = sum(comm.seconds for comm in (*self._merging, *self._summing))
            tokens = value.flatten().tolist()
            self.arrivals += [Arrival(token, now, merge, sums, waited) for token in tokens]
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
    """Generates one sequence into `cache`, on every rank of its group, greedily unless `options` of
    the model's `generate` say otherwise; each token goes to `streamer` when it arrives."""
    mesh = mesh_of(model)
    recorder = ArrivalRecorder(
        (cache.shard.comm,) if isinstance(cache, TreeCache) else (),
        () if mesh is None else mesh.of_layers,
        streamer,
    )
    with torch.inference_mode():
        model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            streamer=recorder,
            **{CACHE_NAME: cache, "do_sample": False} | options,
        )
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return Generation(input_ids.shape[1], recorder.arrivals, weight_bytes, cache_bytes(cache))


def cache_bytes(cache: TreeCache | DynamicCache) -> int:
    """Size in bytes of the keys and values that a cache holds on this rank."""
    if isinstance(cache, TreeCache):
        return cache.num_bytes
    layers: Sequence[Any] = cache.layers
    return sum(
        x.nbytes for layer in layers if layer.is_initialized for x in (layer.keys, layer.values)
    )


class Screen(TextStreamer):
    """The screen during a generation: the prompt and a bar during prefill on stderr, and the text,
    alone, on stdout.

    Only the root rank shows anything; the other ranks run the same code in silence.
    """

    def __init__(
        self, root: bool, text: str, prompt_tokens: int, model: Any, tokenizer: Any
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._console = plain_console(quiet=not root)
        self.remarks = plain_console(quiet=not root, stderr=True)
        self._text, self._prompt_tokens, self._model = text, prompt_tokens, model
        errors = Console(stderr=True)
        columns = "prefill", BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        hidden = not (root and errors.is_terminal)
        self._progress = Progress(*columns, console=errors, transient=True, disable=hidden)

    def __enter__(self) -> "Screen":
        text = f"Prompt ({self._prompt_tokens:,} tokens): {excerpt(self._text)}"
        self.remarks.print(text, style="dim")
        task = self._progress.add_task("prefill", total=self._prompt_tokens)

        def advance(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            self._progress.advance(task, kwargs["input_ids"].shape[1])

        self._hook = self._model.register_forward_hook(advance, with_kwargs=True)
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        self._end_progress()

    def _end_progress(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._end_progress()  # the first token ends the prefill
        self._console.out(text, end="\n" if stream_end else "")


def excerpt(text: str) -> str:
    """The text on one line, and of a long one its beginning and its end."""
    text = " ".join(text.split())
    return text if len(text) <= 240 else f"{text[:110]} [...] {text[-110:]}"


def table(measured: dict[str, Any], attention: str, world_size: int) -> Table:
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    result = Table(title=f"{attention}, {processes}", title_justify="left", show_header=False)
    formats = {
        "prompt, new tokens": "{prompt_tokens:,}, {new_tokens}",
        "time to first token": "{ttft_s:.3f} s",
    }
    if measured["prompt_tokens"] >= _FEWEST_PROMPT_TOKENS:
        formats["prefill"] = "{prefill_tokens_per_s:,.0f} tokens/s"
    if measured["new_tokens"] >= _FEWEST_NEW_TOKENS:
        formats |= {
            "inter-token latency p50, p99": "{inter_token_p50_ms:.2f}, {inter_token_p99_ms:.2f} ms",
            "decode": "{tokens_per_s:.1f} tokens/s",
            "exchange's share of decode time": "{exchange_share:.0%}",
        }
    if "bytes_sent_per_token" in measured:
        sent = "{merge_bytes_per_token:,.0f} merge, {sum_bytes_per_token:,.0f} sums"
        formats["bytes sent per token and rank"] = sent
    for name, text in formats.items():
        result.add_row(name, text.format(**measured))
    # A cache has room for more tokens than it holds.
    for name, what, is_room in (
        ("weights", "weight", ""),
        ("key/value cache", "kv", ", allocated"),
    ):
        mebibytes = measured[f"{what}_bytes_per_rank"] / 2**20
        result.add_row(f"{name} per rank", f"{mebibytes:.2f} MiB{is_room}")
    return result
