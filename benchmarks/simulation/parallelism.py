# SPDX-License-Identifier: BSD-3-Clause
"""Which form of split pays where, by arithmetic: Llama 3.1 on several hosts and links.

    python -m benchmarks.simulation.parallelism --out docs

Times are those of bandwidths, of arithmetic at the rate that is given, and of rounds of messages.
Nothing overlaps and nobody waits, so that they are bounds of a kind: their order says which form to
take, not how long it takes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..harness.plots import picture

BF16, FP32 = 2, 4  # bytes of a weight, an activation, a key; of a partial state
CONTEXT = 128 << 10  # tokens of the prompt, and in the cache when a token is timed
CHUNK = 8192  # tokens of the prompt in a forward pass
WORLDS = (2, 4, 8, 16)
# T is tensor_parallel_size: 1, or as large as the heads of keys and values allow.
WHOLE, PROMPTS = "weights whole", "weights whole, prompts split"
SPLIT, SPLIT_BY_HEADS = "weights split, T = 1", "weights split, largest T"
FORMS = (WHOLE, PROMPTS, SPLIT, SPLIT_BY_HEADS)
IS_SPLIT = {WHOLE: False, PROMPTS: False, SPLIT: True, SPLIT_BY_HEADS: True}


@dataclass(frozen=True)
class Model:
    """A dense Llama: its shape, from config.json."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128

    @property
    def layer_weights(self) -> int:
        """Number of weights in the matrices of a layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def qkv_weights(self) -> int:
        """Number of weights in q, k and v of a layer, of which every context rank has a copy."""
        return self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)

    @property
    def kv_bytes(self) -> int:
        """Size in bytes of a token's keys and values in a layer."""
        return 2 * self.kv_heads * self.head_dim * BF16

    @property
    def state_bytes(self) -> int:
        """Size in bytes of a token's partial state in a layer: float32 o and lse."""
        return FP32 * self.heads * (self.head_dim + 1)

    @property
    def query_bytes(self) -> int:
        return BF16 * self.heads * self.head_dim


MODELS = (
    Model("Llama 3.1 8B", 32, 4096, 14336, 32, 8, 128256),
    Model("Llama 3.1 70B", 80, 8192, 28672, 64, 8, 128256),
)


@dataclass(frozen=True)
class Hosts:
    """Hosts of one rank each, and the link between any two of them."""

    name: str
    link_bandwidth: float  # bytes per second, that a host sends
    round_seconds: float  # of a small message to every other host, with what the software takes
    memory_bandwidth: float  # bytes per second
    arithmetic: float  # bf16 operations per second, sustained
    memory: float  # bytes
    source: str


_CPU = (300e9, 20e12, 512e9)
_CPU_SOURCE = (
    "socket with 8 channels of DDR5-4800 (307 GB/s, data sheet) and AMX; 20 TFLOP/s of bf16 and "
    "512 GB of memory are assumptions"
)
HOSTS = (
    Hosts("1 GbE", 0.125e9, 300e-6, *_CPU, f"{_CPU_SOURCE}; a round over Gloo takes 0.3 ms"),
    Hosts("10 GbE", 1.25e9, 150e-6, *_CPU, f"{_CPU_SOURCE}; a round over Gloo takes 0.15 ms"),
    Hosts(
        "NVLink",
        *(450e9, 12e-6, 3.35e12, 500e12, 80e9),
        "H100 SXM (3.35 TB/s, 80 GB, NVLink 4 with 450 GB/s each way, data sheet); half of its 989 "
        "TFLOP/s of dense bf16, and 12 us for a collective of NCCL, are assumptions",
    ),
)


def tensor_parallel_size(model: Model, form: str, p: int) -> int:
    return math.gcd(p, model.kv_heads) if form == SPLIT_BY_HEADS else 1


# Bytes that a rank of `p` sends for a layer, as docs/parallelism.md says.


def to_all(num_bytes: float, p: int) -> float:
    """In one round: its own part to every other rank."""
    return (p - 1) * num_bytes


def to_owners(num_bytes: float, p: int) -> float:
    """A slice of what it has to each other rank."""
    return (p - 1) * num_bytes / p


def sum_bytes(num_bytes: float, p: int) -> float:
    """An all_reduce: in one round up to 64 KiB, else in two phases."""
    return to_all(num_bytes, p) if num_bytes <= 64 << 10 else 2 * to_owners(num_bytes, p)


def token_layer_bytes(model: Model, form: str, p: int) -> float:
    """For a new token: the merge of the heads that the rank goes on with, and two sums; or the
    merge of all heads."""
    if IS_SPLIT[form]:
        size = tensor_parallel_size(model, form, p)
        merge = to_owners(model.state_bytes / size, p // size)
        return merge + 2 * sum_bytes(model.hidden * BF16, p)
    return to_all(model.state_bytes, p)


def token_ends_bytes(model: Model, form: str, p: int) -> float:
    """For a new token, once: the sum after the embedding, and the logits."""
    if IS_SPLIT[form]:
        return sum_bytes(model.hidden * BF16, p) + to_all(model.vocab * BF16 / p, p)
    return 0.0


def chunk_layer_bytes(model: Model, form: str, p: int, begin: int, tokens: int) -> float:
    """For a chunk of a prompt behind `begin` tokens."""
    states = tokens * model.state_bytes
    if IS_SPLIT[form]:
        size = tensor_parallel_size(model, form, p)
        merge = to_owners(states / size, p // size)
        return merge + 2 * sum_bytes(tokens * model.hidden * BF16, p)
    if form == PROMPTS:
        # The cheaper way: all queries and the states of them, or all keys and values.
        pass_queries = to_owners(tokens * model.query_bytes + states, p)
        return min(pass_queries, to_owners((begin + tokens) * model.kv_bytes, p))
    return 2 * to_owners(states, p)


# Seconds, and bytes in memory.


def token_seconds(model: Model, hosts: Hosts, form: str, p: int) -> float:
    """Seconds that a new token takes behind CONTEXT tokens."""
    read = held_bytes(model, form, p)
    merges = int(tensor_parallel_size(model, form, p) < p)
    rounds, ends = (merges + 2, 2) if IS_SPLIT[form] else (1, 0)
    sent = model.layers * token_layer_bytes(model, form, p) + token_ends_bytes(model, form, p)
    steps = model.layers * rounds + ends
    embedding = model.vocab * model.hidden * BF16 / (p if IS_SPLIT[form] else 1)  # one row is read
    return (
        (read - embedding) / hosts.memory_bandwidth
        + steps * hosts.round_seconds
        + sent / hosts.link_bandwidth
    )


def prefill_seconds(model: Model, hosts: Hosts, form: str, p: int) -> float:
    """Seconds that a prompt of CONTEXT tokens in chunks takes, by arithmetic, rounds and bytes."""
    weights = model.layers * model.layer_weights / (p if form == PROMPTS else 1)
    if IS_SPLIT[form]:
        weights = layers_weights(model, form, p)
    pairs = CONTEXT * CONTEXT / 2  # a query and a key before it
    attention = 4 * model.layers * model.heads * model.head_dim * pairs / p
    operations = 2 * weights * CONTEXT + attention
    chunks = range(0, CONTEXT, CHUNK)
    sent = sum(chunk_layer_bytes(model, form, p, begin, CHUNK) for begin in chunks)
    rounds = 5 if IS_SPLIT[form] else 2  # at most: a sum has two phases
    return operations / hosts.arithmetic + model.layers * (
        rounds * len(chunks) * hosts.round_seconds + sent / hosts.link_bandwidth
    )


def layers_weights(model: Model, form: str, p: int) -> float:
    """Number of weights of a rank in its layers: a context group has copies of q, k and v."""
    qkv = model.qkv_weights / tensor_parallel_size(model, form, p)
    others = (model.layer_weights - model.qkv_weights) / (p if IS_SPLIT[form] else 1)
    return model.layers * (qkv + others)


def held_bytes(model: Model, form: str, p: int) -> float:
    """Weights and key/value cache of a rank."""
    ends = 2 * model.vocab * model.hidden / (p if IS_SPLIT[form] else 1)
    weights = layers_weights(model, form, p) + ends
    return BF16 * weights + model.layers * model.kv_bytes * CONTEXT / p


DECODING = (WHOLE, SPLIT, SPLIT_BY_HEADS)  # prompts are split while there is one


def rows() -> Iterator[list[str]]:
    for model in MODELS:
        for hosts in HOSTS:
            for p in WORLDS:
                fits = {form: held_bytes(model, form, p) <= hosts.memory for form in FORMS}
                token, prefill = (
                    {f: seconds(model, hosts, f, p) if fits[f] else math.inf for f in forms}
                    for seconds, forms in ((token_seconds, DECODING), (prefill_seconds, FORMS))
                )
                yield [
                    *(model.name, hosts.name, str(p)),
                    *(f"{held_bytes(model, form, p) / 1e9:,.0f}" for form in DECODING),
                    *_marked({form: 1e3 * seconds for form, seconds in token.items()}),
                    *_marked(prefill),
                ]


def _marked(times: dict[str, float]) -> list[str]:
    """The times, that of the best form in bold: of those within 1 % of the least the first."""
    least = min(times.values())
    winner = next(form for form, time in times.items() if time <= 1.01 * least)
    texts = {form: _text(time) for form, time in times.items()}
    if least < math.inf:
        texts[winner] = f"**{texts[winner]}**"
    return list(texts.values())


HEADINGS = (
    *("model", "link", "hosts"),
    *("GB: whole", "T = 1", "largest T"),
    *("ms per token: whole", "T = 1", "largest T"),
    *("prefill s: whole", "prompts split", "T = 1", "largest T"),
)


def table() -> str:
    lines = [HEADINGS, ["---"] * 2 + ["---:"] * 11, *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _text(value: float) -> str:
    if value == math.inf:
        return "does not fit"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def pieces(p: int, rank: int, size: int | None) -> dict[str, tuple[int, int]]:
    """Into how many pieces each thing that a rank holds is cut, and which of them the rank has.

    `size` is tensor_parallel_size; None: weights are whole.
    """
    whole, size_or_one = (1, 0), size or 1
    num_contexts = p // size_or_one
    context, tensor = divmod(rank, size_or_one)
    heads = (size_or_one, tensor)
    return {
        "q, k, v": heads,
        "o": whole if size is None else (p, tensor * num_contexts + context),
        "MLP, vocabulary": whole if size is None else (p, rank),
        "cache: heads": heads,
        "cache: slots": (num_contexts, context),
    }


def draw_who_holds_what(path: Path, p: int = 4) -> None:
    """Ranks and, for each form, the part of every tensor that each of them holds."""
    names: dict[int | None, str] = {None: "weights whole"}
    names |= {size: f"weights split, tensor_parallel_size {size}" for size in (1, 2, 4)}
    with picture(path, (13, 4), (1, len(names)), sharey=True) as (panels,):
        for axes, (size, name) in zip(panels, names.items(), strict=True):
            for rank in range(p):
                for place, (count, piece) in enumerate(pieces(p, rank, size).values()):
                    box = {"height": 0.6, "align": "edge"}
                    left, width = rank + 0.1, 0.8 / count
                    axes.barh(place, 0.8, left=left, color="0.93", **box)
                    axes.barh(place, width, left=left + piece * width, color=f"C{rank}", **box)
            axes.set_xticks([rank + 0.5 for rank in range(p)], [f"rank {r}" for r in range(p)])
            axes.set_title(name, fontsize=9)
            axes.set_frame_on(False)
            axes.tick_params(length=0, labelsize=8)
        panels[0].set_yticks([place + 0.3 for place in range(5)], list(pieces(p, 0, None)))
        panels[0].invert_yaxis()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.parallelism")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write parallelism.png there")
    parsed = parser.parse_args(arguments)
    print(table(), end="")
    if parsed.out is not None:
        draw_who_holds_what(parsed.out / "parallelism.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
