#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Decode at a long context: HuggingFace's caches beside ours, whole and split over processes.

    torchrun --nproc-per-node 2 examples/long_context.py

The model has two layers of Llama 3.2 1B's shape, random weights and a small vocabulary, so that
attention dominates as it does where contexts are long. The context is random keys and values put
straight into every cache: a prompt of this length would take minutes to read and change nothing
about the time of a decoding step. The first process decodes alone with the threads of all of them,
then all decode together. The exit status is 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

import tree_attention
from tree_attention import Communicator
from tree_attention.cli.generation import cache_bytes
from tree_attention.cli.info import cpu_name
from tree_attention.cli.world import World, joined_world
from tree_attention.hf import TreeCache
from tree_attention.reference.accuracy import bound_of_o, check_against_float64

DYNAMIC, STATIC, WHOLE = "sdpa, DynamicCache", "sdpa, StaticCache", "ours, 1 process"
TREE, RING = "tree, one layer", "ring, one layer"


@dataclass
class Row:
    """What is measured for one line of the table."""

    processes: int
    threads: int  # of each process
    kv_bytes: int  # in each process
    bytes_sent: int = 0  # by each process for one token
    seconds: list[float] = field(default_factory=list)  # of each token
    right: bool = True

    @property
    def ms(self) -> float:
        return statistics.median(self.seconds) * 1e3


class Decoder:
    """A model that steps over one cache, with one of the attentions of transformers."""

    def __init__(self, model: Any, cache: Any, attention: str, context: int) -> None:
        self.model, self.cache, self.attention = model, cache, attention
        self.position = context
        k, v = random_context(context)
        for layer in range(model.config.num_hidden_layers):
            cache.update(k.to(model.dtype), v.to(model.dtype), layer)

    def step(self) -> tuple[Tensor, float]:
        """Decodes one token; returns its logits and the seconds it took."""
        self.model.set_attn_implementation(self.attention)
        begin = time.perf_counter()
        output = self.model(
            input_ids=torch.tensor([[self.position * 7919 % self.model.config.vocab_size]]),
            position_ids=torch.tensor([[self.position]]),
            past_key_values=self.cache,
            use_cache=True,
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
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def random_context(context: int) -> tuple[Tensor, Tensor]:
    """The keys and values of every layer. Scores near zero would average the values to nothing and
    hide a wrong result: the keys are three times as large as the queries."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 8, context, 64, generator=generator) for _ in range(2))
    return k.mul_(3).bfloat16(), v.bfloat16()


def largest_error(logits: Tensor, truth: Tensor) -> float:
    """The largest error of a logit relative to the largest logit."""
    return ((logits - truth).abs().max() / truth.abs().max()).item()


class Demo:
    """The measurements, on every rank; only the root's rows are complete."""

    def __init__(self, world: World, context: int, layers: int, tokens: int) -> None:
        self.world, self.context, self.tokens = world, context, tokens
        self.threads = torch.get_num_threads()  # of a process when all decode together
        self.together = f"ours, {world.size} processes"
        self.rows: dict[str, Row] = {}
        self.progress = Progress(
            console=Console(stderr=True), transient=True, disable=not world.root
        )
        self.task = self.progress.add_task("random weights", total=4 * tokens + 3)
        with self.progress:
            self.model = make_model(layers)
            self.advance("float32 arithmetic")
            alone = dist.new_group([0])  # of which every rank must know
            if world.root:
                torch.set_num_threads(self.threads * world.size)
                truth = self.true_logits()
                self.advance("1 process")
                self.run_alone(Communicator(alone), truth)
                torch.set_num_threads(self.threads)
            dist.barrier()
            self.run_together(truth if world.root else None)
            self.run_one_layer()

    def advance(self, description: str) -> None:
        self.progress.update(self.task, advance=1, description=description)

    def true_logits(self) -> Tensor:
        """The first step's logits with float32 arithmetic on the same weights and context."""
        exact = copy.deepcopy(self.model).float()
        cache = DynamicCache(config=exact.config)
        return Decoder(exact, cache, "sdpa", self.context).step()[0]

    def run_alone(self, comm: Communicator, truth: Tensor) -> None:
        """In one process: the caches take turns, token by token."""
        config, decoders = self.model.config, {}
        caches = {
            DYNAMIC: (DynamicCache(config=config), "sdpa"),
            STATIC: (
                StaticCache(config=config, max_cache_len=self.context + 1 + self.tokens),
                "sdpa",
            ),
            WHOLE: (TreeCache(config, comm), "tree_attention"),
        }
        for name, (cache, attention) in caches.items():
            decoders[name] = Decoder(self.model, cache, attention, self.context)
            error = largest_error(decoders[name].step()[0], truth)  # the step also warms up
            if name == DYNAMIC:
                self.bound = bound_of_o(error, torch.bfloat16)
            threads = self.threads * self.world.size
            self.rows[name] = Row(1, threads, cache_bytes(cache), right=error <= self.bound)
        for _ in range(self.tokens):
            for name, decoder in decoders.items():
                self.rows[name].seconds.append(decoder.step()[1])
                self.advance(name)

    def run_together(self, truth: Tensor | None) -> None:
        """Over all ranks, each with its share of the cache."""
        comm = Communicator()
        cache = TreeCache(self.model.config, comm)
        decoder = Decoder(self.model, cache, "tree_attention", self.context)
        logits, _ = decoder.step()
        row = Row(self.world.size, self.threads, cache.num_bytes)
        sent = comm.bytes_sent
        for _ in range(self.tokens):
            row.seconds.append(decoder.step()[1])
            self.advance(self.together)
        row.bytes_sent = (comm.bytes_sent - sent) // self.tokens
        others = [torch.empty_like(logits) for _ in range(self.world.size)]
        dist.all_gather(others, logits)
        if truth is not None:
            same = all(torch.equal(logits, other) for other in others)
            row.right = same and largest_error(logits, truth) <= self.bound
        self.rows[self.together] = row

    def run_one_layer(self) -> None:
        """The attention of one layer over all ranks, by a tree and by a ring."""
        world = self.world
        k, v = random_context(self.context)
        q = torch.randn(1, 32, 1, 64).bfloat16()
        slots = tree_attention.BlockCyclic(world.size).local_slots(world.rank, 0, self.context)
        k_local, v_local = k[:, :, slots], v[:, :, slots]
        calls: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
            TREE: tree_attention.tree_decode,
            RING: tree_attention.ring_decode,
        }
        for name, call in calls.items():
            comm = Communicator()
            row = Row(world.size, self.threads, k_local.nbytes + v_local.nbytes)
            o, lse = call(q, k_local, v_local, group=comm)  # also connects
            sent = comm.bytes_sent
            for _ in range(self.tokens):
                begin = time.perf_counter()
                call(q, k_local, v_local, group=comm)
                row.seconds.append(time.perf_counter() - begin)
            row.bytes_sent = (comm.bytes_sent - sent) // self.tokens
            row.right = not world.root or check_against_float64(q, k, v, None, o, lse).right
            self.rows[name] = row
            self.advance(name)

    def readings(self) -> dict[str, str]:
        """One sentence about each row."""
        ms = {name: row.ms for name, row in self.rows.items()}
        two, tree, ring = ms[self.together], self.rows[TREE], self.rows[RING]
        return {
            DYNAMIC: "HuggingFace as generate() uses it copies the whole cache to append a token.",
            STATIC: f"HuggingFace with a cache allocated once copies nothing and is "
            f"{speed(ms[DYNAMIC], ms[STATIC])} DynamicCache.",
            WHOLE: "our cache copies nothing either, and one call a layer reads every key once: "
            f"{speed(ms[DYNAMIC], ms[WHOLE])} DynamicCache, {ms[STATIC] / ms[WHOLE]:.2f} times "
            "StaticCache.",
            self.together: f"each process holds 1/{self.world.size} of the keys; "
            f"{speed(ms[DYNAMIC], two)} DynamicCache and {ms[WHOLE] / two:.2f} times one process: "
            "here they share the cores of one machine, and each computes the whole MLP.",
            TREE: "the keys stay where they are; only o and lse of each head travel.",
            RING: f"the keys travel: {ring.bytes_sent / tree.bytes_sent:,.0f} times the bytes and "
            f"{ring.ms / tree.ms:.1f} times the time of the tree, although here they travel "
            "through the memory of one machine.",
        }


def speed(other_ms: float, own_ms: float) -> str:
    return f"{other_ms / own_ms:.2f} times as fast as"


def show(demo: Demo, console: Console) -> None:
    config = demo.model.config
    console.print(
        f"{cpu_name()}, torch {torch.__version__}. {demo.context:,} keys, batch 1, bfloat16; "
        f"{config.num_hidden_layers} layers of Llama 3.2 1B's shape with random weights and a "
        f"vocabulary of {config.vocab_size:,}; medians of {demo.tokens} tokens.",
        markup=False,
    )
    table = Table(title=f"One more token after {demo.context:,}", title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("processes\nx threads", "ms", "KV MiB per\nprocess", "KiB sent by\na process"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("right")
    for name, row in demo.rows.items():
        table.add_row(
            name,
            f"{row.processes} x {row.threads}",
            f"{row.ms:.1f}",
            f"{row.kv_bytes / 2**20:,.0f}",
            f"{row.bytes_sent / 2**10:,.0f}",
            "yes" if row.right else "WRONG",
            style="" if row.right else "bold red",
            end_section=name == demo.together,
        )
    console.print(table)
    for name, sentence in demo.readings().items():
        console.print(Text.assemble((name, "bold"), f": {sentence}"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--context", type=int, default=131072, help="keys (default 131072)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default 2)")
    parser.add_argument("--tokens", type=int, default=9, help="timed tokens (default 9)")
    arguments = parser.parse_args()
    with joined_world() as world, torch.inference_mode():
        if world.size < 2:
            parser.error("start it with torchrun --nproc-per-node 2")
        demo = Demo(world, arguments.context, arguments.layers, arguments.tokens)
        if world.root:
            show(demo, Console(highlight=False))
        wrong = world.root and not all(row.right for row in demo.rows.values())
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
