#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""A context for which one process has no room, and the time of a token on one host and on two.

    tree-attention run -n 2 examples/long_context.py

Every process stands for a host: it has its share of this machine's threads, its share of the cache
and its share of the weights. First each may take only so much memory for keys and values: one
process is refused, all together decode. Then a token is timed on one host and on all of them, in
turn, so that other programs on this machine slow both.

The model has two layers of Llama 3.2 1B's shape, random weights and a small vocabulary, so that
attention dominates as it does where contexts are long. The context is random keys and values put
straight into every cache: a prompt of this length would take minutes to read and change nothing
about the time of a token. The exit status is 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import copy
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

from tree_attention import Communicator, hf
from tree_attention.cli.generation import cache_bytes
from tree_attention.cli.information import cpu_name
from tree_attention.cli.usage import plain_console
from tree_attention.cli.world import World, joined_world
from tree_attention.hf import CACHE_NAME, TreeCache
from tree_attention.reference.accuracy import bound_of_o

PLAIN, ONE, WIDE = "HuggingFace, 1 host", "ours, 1 host", "ours, 1 process"
HEADS_KV, HEAD_DIM = 8, 64
KV_BYTES = 2 * 2 * HEADS_KV * HEAD_DIM  # of a token in a layer: keys and values of bfloat16

MEASURED = "In benchmarks/results/scaling.md 2 hosts are 1.63 times as fast, 1.75 with split heads."
ELSE = 64 << 20  # bytes for what is no key and no value


@dataclass
class Row:
    """What is measured for one way to decode."""

    kv_bytes: int  # in each process
    right: bool = True
    bytes_sent: int = 0  # by each process for one token
    seconds: list[float] = field(default_factory=list)  # of each token

    @property
    def ms(self) -> float:
        return statistics.median(self.seconds) * 1e3

    @property
    def spread(self) -> str:
        return f"{min(self.seconds) * 1e3:.1f} to {max(self.seconds) * 1e3:.1f}"

    def times_as_fast(self, other: Row) -> list[float]:
        """By how much this way is faster than another, token by token, increasing."""
        return sorted(x / y for x, y in zip(other.seconds, self.seconds, strict=True))


class Decoder:
    """A model that steps over one cache, with one of the attentions of transformers."""

    def __init__(
        self, model: Any, cache: Any, attention: str, threads: int, context: tuple[Tensor, Tensor]
    ) -> None:
        self.model, self.cache, self.attention, self.threads = model, cache, attention, threads
        self.position = context[0].shape[2]
        for layer in range(model.config.num_hidden_layers):
            cache.update(*(x.to(model.dtype) for x in context), layer)

    def step(self) -> tuple[Tensor, float]:
        """Decodes one token; returns its logits and the seconds it took."""
        torch.set_num_threads(self.threads)
        self.model.set_attn_implementation(self.attention)
        begin = time.perf_counter()
        output = self.model(
            input_ids=torch.tensor([[self.position * 7919 % self.model.config.vocab_size]]),
            position_ids=torch.tensor([[self.position]]),
            use_cache=True,
            **{CACHE_NAME: self.cache},
        )
        self.position += 1
        return output.logits[0, -1].float(), time.perf_counter() - begin


def make_model(layers: int) -> Any:
    """The same model on every rank."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=HEADS_KV,
        head_dim=HEAD_DIM,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def random_context(context: int) -> tuple[Tensor, Tensor]:
    """The keys and values of every layer. Scores near zero would average the values to nothing and
    hide a wrong result: the keys are three times as large as the queries."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.empty(1, HEADS_KV, context, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))
    return k.normal_(0, 3, generator=generator), v.normal_(generator=generator)


def largest_error(logits: Tensor, truth: Tensor) -> float:
    """The largest error of a logit relative to the largest logit."""
    return ((logits - truth).abs().max() / truth.abs().max()).item()


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Lets this process take so much more memory for its data, and no more than that and what
    stacks of threads and buffers need."""
    with open("/proc/self/status") as status:
        (taken,) = (int(x.split()[1]) for x in status if x.startswith("VmData:"))  # in KiB
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (taken * 1024 + num_bytes + ELSE, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def busy_seconds() -> float:
    """What all processors of this machine have computed since it started."""
    with open("/proc/stat") as file:
        user, nice, system = map(int, file.readline().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


class Demo:
    """The measurements, on every rank; only the root's are complete."""

    def __init__(self, world: World, context: int, layers: int, tokens: int) -> None:
        self.world, self.tokens = world, tokens
        self.threads = torch.get_num_threads()  # of each host
        self.cache_bytes = layers * context * KV_BYTES
        # Between what one process needs and what each of several does.
        self.room = self.cache_bytes * (world.size + 1) // (2 * world.size)
        self.refusal = ""  # of one process, for which there is no room
        self.length = context + tokens + 1
        self.together = f"ours, {world.size} hosts"
        self.rows: dict[str, Row] = {}
        self.progress = Progress(
            console=Console(stderr=True), transient=True, disable=not world.root
        )
        self.task = self.progress.add_task("random weights", total=4 * tokens + 5)
        with self.progress:
            self.model = make_model(layers)
            self.split = hf.parallelize(copy.deepcopy(self.model))
            self.context = random_context(context)
            alone = dist.new_group([0])  # every rank must make it, though only one is in it
            if world.root:
                self.alone = Communicator(alone)
            self.find_truth()
            self.find_room()
            self.measure()

    def advance(self, description: str) -> None:
        self.progress.update(self.task, advance=1, description=description)

    def new_cache(self, comm: Communicator) -> TreeCache:
        return TreeCache(self.model.config, comm, max_length=self.length)

    def find_truth(self) -> None:
        """The first token's logits with float32 arithmetic on the same weights and context."""
        if self.world.root:
            self.advance("float32 arithmetic")
            exact = copy.deepcopy(self.model).float()
            cache, threads = DynamicCache(config=exact.config), self.threads * self.world.size
            self.truth = Decoder(exact, cache, "sdpa", threads, self.context).step()[0]

    def find_room(self) -> None:
        """One process is refused; all decode the first token, each with a share of the cache."""
        torch.set_num_threads(self.threads)
        self.context[0].abs().max()  # starts the threads, whose stacks count as data
        if self.world.root:
            self.advance("one process under the limit")
            try:
                with room_for(self.room):
                    Decoder(self.model, self.new_cache(self.alone), "", 1, self.context)
            except (MemoryError, RuntimeError) as error:
                self.refusal = str(error).splitlines()[0]
        self.advance("all processes under the limit")
        dist.barrier()  # which waits for the root longer than an exchange does
        with room_for(self.room):
            cache = self.new_cache(Communicator())
            self.shares = Decoder(self.split, cache, "tree_attention", self.threads, self.context)
            self.logits, _ = self.shares.step()
        self.rows[self.together] = Row(cache.num_bytes)

    def measure(self) -> None:
        """One host and all of them in turn, token by token."""
        alone: list[tuple[Row, Decoder]] = []
        if self.world.root:
            config, length = self.model.config, self.length
            caches = {
                PLAIN: (StaticCache(config=config, max_cache_len=length), "sdpa", self.threads),
                ONE: (self.new_cache(self.alone), "tree_attention", self.threads),
                WIDE: (
                    self.new_cache(self.alone),
                    "tree_attention",
                    self.threads * self.world.size,
                ),
            }
            for name, (cache, attention, threads) in caches.items():
                decoder = Decoder(self.model, cache, attention, threads, self.context)
                error = largest_error(decoder.step()[0], self.truth)  # the step also warms up
                if name == PLAIN:
                    bound = bound_of_o(error, torch.bfloat16)
                self.rows[name] = Row(cache_bytes(cache), error <= bound)
                alone.append((self.rows[name], decoder))
            error = largest_error(self.logits, self.truth)
            self.rows[self.together].right = error <= bound
        row, comms = self.rows[self.together], list(Communicator.by_name.values())
        begin, busy, computed = time.perf_counter(), busy_seconds(), time.process_time()
        for _ in range(self.tokens):
            for own, decoder in alone:
                own.seconds.append(decoder.step()[1])
                self.advance("one host")
            dist.barrier()
            before = sum(comm.bytes_sent for comm in comms)
            logits, seconds = self.shares.step()
            row.seconds.append(seconds)
            row.bytes_sent = sum(comm.bytes_sent for comm in comms) - before
            others = [torch.empty_like(logits) for _ in range(self.world.size)]
            dist.all_gather(others, logits)
            row.right &= all(torch.equal(logits, other) for other in others)
            self.advance(self.together)
        ours = torch.tensor(time.process_time() - computed)
        dist.all_reduce(ours)
        seconds = time.perf_counter() - begin
        self.others = (busy_seconds() - busy - ours.item()) / seconds  # processors, on average

    def is_short_of_processors(self) -> bool:
        """True where other programs used more than a tenth of what the hosts need."""
        needed = self.threads * self.world.size
        return needed * 0.9 > (os.cpu_count() or needed) - self.others


def show(demo: Demo, console: Console) -> None:
    config, size = demo.model.config, demo.world.size
    context, mib = demo.context[0].shape[2], 1 << 20
    together, wide = demo.rows[demo.together], demo.rows[WIDE]
    threads = f"{demo.threads} thread{'s' * (demo.threads > 1)}"
    console.print(
        f"{cpu_name()}, torch {torch.__version__}. {context:,} keys, batch 1, bfloat16; "
        f"{config.num_hidden_layers} layers of Llama 3.2 1B's shape with random weights and a "
        f"vocabulary of {config.vocab_size:,}. A host is a process with {threads}.\n"
    )
    console.print(
        f"{context:,} tokens have {demo.cache_bytes / mib:,.0f} MiB of keys and values. Each "
        f"process may take {demo.room / mib:,.0f} MiB for them:"
    )
    console.print(f"  one process is refused: {demo.refusal or 'WRONG: it was not'}")
    console.print(
        f"  {size} processes take {together.kv_bytes / mib:,.0f} MiB each, and decode the next "
        f"token.\n"
    )
    table = Table(title=f"One more token after {context:,}", title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("ms", "lowest to highest", "cache MiB per host"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("right")
    for name in (PLAIN, ONE, demo.together):
        row = demo.rows[name]
        table.add_row(
            name,
            f"{row.ms:.1f}",
            row.spread,
            f"{row.kv_bytes / mib:,.0f}",
            "yes" if row.right else "WRONG",
            style="" if row.right else "bold red",
        )
    console.print(table, soft_wrap=False)
    moved = demo.cache_bytes * (size - 1) / size
    console.print(
        f"Medians of {demo.tokens} tokens, each timed on one host, then on {size}. The footnote: "
        f"one process with all {demo.threads * size} threads takes {wide.ms:.1f} ms "
        f"({wide.spread})."
    )
    console.print(
        f"A host sends {together.bytes_sent / 1024:,.0f} KiB for a token. Moving keys and values "
        f"to the query instead would cost {moved / mib:,.0f} MiB."
    )
    console.print(
        "All hosts have the same logits, bit for bit, as near to float32 arithmetic as "
        "HuggingFace's."
        if together.right
        else "WRONG: the hosts' logits differ from one another or from float32 arithmetic."
    )
    console.print(speed(demo))
    console.print(
        f"{size} hosts decode what one has no room for, with 1/{size} of the cache each.",
        style="bold",
    )


def speed(demo: Demo) -> str:
    """What the times say about several hosts, or why they say little."""
    size = demo.world.size
    one, together, wide = (demo.rows[name] for name in (ONE, demo.together, WIDE))
    ratios, gain = together.times_as_fast(one), statistics.median(wide.times_as_fast(one))
    faster = statistics.median(ratios)
    if demo.is_short_of_processors():
        return (
            f"Other programs used {demo.others:.1f} of this machine's {os.cpu_count()} processors, "
            f"so that {size} hosts had to share what one has alone: the times say little. Run it "
            "again when they have ended."
        )
    shared = (
        f"Here they read one memory, which gives one process with all threads {gain:.2f} times the "
        "speed; real hosts have one each."
    )
    if faster < 1:
        return f"{size} hosts had no more speed than one on this machine. {shared}"
    return (
        f"{size} hosts are {faster:.2f} times as fast as one ({ratios[0]:.2f} to {ratios[-1]:.2f}, "
        f"token by token). {shared} {MEASURED}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--context", type=int, default=131072, help="keys (default 131072)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default 2)")
    parser.add_argument("--tokens", type=int, default=9, help="timed tokens (default 9)")
    arguments = parser.parse_args()
    with joined_world() as world, torch.inference_mode():
        if world.size < 2:
            parser.error("start it with `tree-attention run -n 2 examples/long_context.py`")
        demo = Demo(world, arguments.context, arguments.layers, arguments.tokens)
        if world.root:
            show(demo, plain_console())
        right = demo.refusal and all(row.right for row in demo.rows.values())
    return int(world.root and not right)


if __name__ == "__main__":
    sys.exit(main())
