# SPDX-License-Identifier: BSD-3-Clause
"""Models that choose their keys: the index, the choice, chosen rows as pages, whole layers, ranks.

python benchmarks/chosen.py --out DIR

One thread, because figures are for each core; two ranks of one thread for the merge and the split
index.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness.measure import (
    InputArena,
    Load,
    Samples,
    fma_peak,
    load_warnings,
    pin_threads,
    read_memory,
    time_alternating,
    time_in_step,
)
from benchmarks.harness.program import finish, parser_of, progress_bar, shown
from benchmarks.harness.ranks import Ranks, run_rank, slowest_rank, start_ranks
from benchmarks.harness.report import Report, columns_of, environment, verdict
from tree_attention import (
    BlockCyclic,
    Communicator,
    index_topk,
    lean_decode,
    merge_topk,
    reference,
)
from tree_attention.patterns import by_rows

OURS, READING, TORCH, TRANSFORMERS = "ours", "reading", "torch", "transformers"
FIRST = "ours, topk 1"
HEAD_DIM, LATENT, LATENT_V = 128, 576, 512


@dataclass(frozen=True)
class IndexCase:
    """The index of one token over keys of a head of 128 in bfloat16."""

    name: str
    num_heads: int
    topk: int = 2048
    block: int = 1
    weighted: bool = True


INDEXES = (
    IndexCase("index of 64 heads (DeepSeek-V3.2)", 64),
    IndexCase("index of 32 heads", 32),
    IndexCase("index of 16 heads", 16),
    IndexCase("index of 4 heads", 4),
    IndexCase("index of 4 heads, 16 blocks of 128 each (MiniMax-M3)", 4, 16, 128, False),
)


def run_index(case: IndexCase, length: int, seconds: float, peak: float) -> dict[str, Any]:
    """`peak`: products of bfloat16 in a second that the core could make."""
    generator = torch.Generator().manual_seed(0)
    num_sets = InputArena.num_sets(2 * length * HEAD_DIM)
    shape = (1, 1, length, HEAD_DIM)
    sets = [torch.randn(shape, generator=generator).bfloat16() for _ in range(num_sets)]
    q = torch.randn(1, case.num_heads, 1, HEAD_DIM, generator=generator).bfloat16()
    weights = torch.randn(1, case.num_heads, 1, generator=generator) if case.weighted else None
    topk = min(case.topk, length // case.block)
    scale = HEAD_DIM**-0.5

    def ours(index: int, topk: int = topk) -> tuple[Tensor, Tensor]:
        return index_topk(q, sets[index], weights, topk=topk, block=case.block, scale=scale)

    def by_torch(index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # torch gets matrices here: with axes of batch and heads its product in bfloat16 takes a
        # hundred times as long.
        scores = (scale * (q[0, :, 0].to(dtype) @ sets[index][0, 0].to(dtype).mT)).float()
        if weights is not None:
            scores = weights[0, :, 0] @ scores.relu()
        if case.block > 1:
            scores = scores.unflatten(-1, (-1, case.block)).amax(-1)
        return scores.topk(topk).values, scores

    functions: dict[str, Callable[[int], Any]] = {
        OURS: ours,
        FIRST: lambda i: ours(i, 1),
        READING: lambda i: read_memory(sets[i]),
        TORCH: lambda i: by_torch(i, torch.bfloat16),
        TRANSFORMERS: lambda i: by_torch(i, torch.float32),
    }
    with Load() as load:
        samples = time_alternating(functions, num_sets=num_sets, seconds=seconds)
    scores, slots = ours(0)
    of_all, true_slots = reference.index_topk(
        q, sets[0], weights, topk=length // case.block, block=case.block, scale=scale
    )
    true = torch.empty_like(of_all).scatter_(-1, true_slots.long(), of_all)
    error = (scores.double() - true.gather(-1, slots.long())).abs().max().item()
    size = true.abs().max().item()
    # No key that was left out may have a better score, up to the errors of both.
    left_out = true.scatter(-1, slots.long(), -torch.inf).amax(-1)
    is_best = bool((left_out <= scores.double()[..., -1] + 2 * error).all())
    flops = 2 * case.num_heads * HEAD_DIM * length
    is_wrong = not is_best or error > 1e-5 * size
    ceilings = {"products": flops / peak, READING: samples[READING].median}
    return row_of(case.name, samples, load, error / size, is_wrong) | {
        "gflops": flops / samples[FIRST].median * 1e-9,
        "ceiling": to_ceiling(samples[OURS].median, ceilings),
        "choosing_us": (samples[OURS].median - samples[FIRST].median) * 1e6,
    }


def to_ceiling(seconds: float, ceilings: dict[str, float]) -> str:
    """A time as a multiple of the longest of those that nothing can beat, with its name."""
    name = max(ceilings, key=lambda name: ceilings[name])
    return f"{seconds / ceilings[name]:.2f} {name}"


def run_rows(num_heads: int, length: int, seconds: float) -> dict[str, Any]:
    """Latents: 2,048 rows of a cache as pages of one row, and the same rows side by side."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(1, 1, length, LATENT, generator=generator).bfloat16()
    q = torch.randn(1, num_heads, 1, LATENT, generator=generator).bfloat16()
    num_rows = min(2048, length)
    num_sets = InputArena.num_sets(2 * num_rows * LATENT)  # so that both are read from memory
    chosen = [torch.randperm(length, generator=generator)[:num_rows] for _ in range(num_sets)]
    rows = [x.sort().values.int().view(1, 1, 1, -1) for x in chosen]
    together = [cache[:, :, x.flatten().long()] for x in rows]
    pages = [by_rows(q, cache, cache[..., :LATENT_V], x) for x in rows]

    def gather(index: int) -> Tensor:
        return cache[:, :, rows[index].flatten().long()]

    def by_torch(index: int) -> Tensor:
        # Heads that share their keys are to torch tokens of one head.
        k = gather(index)
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, k[..., :LATENT_V])

    functions: dict[str, Callable[[int], Any]] = {
        OURS: lambda i: lean_decode(*pages[i][:4], page_table=pages[i][4]),
        "side by side": lambda i: lean_decode(q, together[i], together[i][..., :LATENT_V]),
        "making the pages": lambda i: by_rows(q, cache, cache[..., :LATENT_V], rows[i]),
        "torch's gather": gather,
        TORCH: by_torch,
    }
    with Load() as load:
        samples = time_alternating(functions, num_sets=num_sets, seconds=seconds)
    o = functions[OURS](0)[0].double()
    true = reference.attention(q, together[0], together[0][..., :LATENT_V])[0]
    error = ((o - true).abs().max() / true.abs().max()).item()
    name = f"{num_rows:,} rows of latents as pages, {num_heads} heads"
    return row_of(name, samples, load, error, error > 1e-2)


@dataclass(frozen=True)
class LayerCase:
    """Attention of a layer to one new token: index, choice, rows, pages and attention to them."""

    name: str
    index: IndexCase
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    local_blocks: int = 0


V32 = LayerCase("token of a layer of DeepSeek-V3.2", INDEXES[0], 128, 1, LATENT, LATENT_V)
M3 = LayerCase("token of a layer of MiniMax-M3", INDEXES[-1], 64, 4, 128, 128, local_blocks=1)


def run_layer(case: LayerCase, length: int, seconds: float) -> dict[str, Any]:
    """Ours for the chosen keys, and for all: which evicts the keys of the next call."""
    generator, index = torch.Generator().manual_seed(0), case.index

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    block = index.block
    topk, num_sets = min(index.topk, length // block), 8
    index_keys, keys = (
        randn(1, 1, length, HEAD_DIM),
        randn(1, case.num_heads_kv, length, case.head_dim),
    )
    is_latent = case.head_dim_v < case.head_dim
    values = keys[..., : case.head_dim_v] if is_latent else randn(*keys.shape)
    index_queries = [randn(1, index.num_heads, 1, HEAD_DIM) for _ in range(num_sets)]
    weights = torch.randn(1, index.num_heads, 1, generator=generator) if index.weighted else None
    q, layout = randn(1, case.num_heads, 1, case.head_dim), BlockCyclic(1)
    lengths = torch.tensor([[length]])
    positions = lengths - 1 if case.local_blocks else None

    def choose(i: int) -> Tensor:
        _, slots = index_topk(
            index_queries[i],
            index_keys,
            weights,
            topk=topk,
            block=block,
            scale=HEAD_DIM**-0.5,
            local_blocks=case.local_blocks,
            query_positions=positions,
        )
        return layout.local_rows(0, slots)  # or blocks, which are whole in a world of one

    def ours(i: int) -> tuple[Tensor, Tensor]:
        limit = lengths if block > 1 else None
        *arguments, page_table = by_rows(q, keys, values, choose(i), limit, block=block)
        return lean_decode(*arguments, page_table=page_table)

    functions: dict[str, Callable[[int], Any]] = {
        OURS: ours,
        "all keys, ours": lambda i: lean_decode(q, keys, values),
    }
    part = min(1024, length)
    if is_latent:
        # As transformers: keys and values of all heads are made of the latents of every token.
        expansion = randn(LATENT_V, case.num_heads * 2 * HEAD_DIM)
        dense_q = randn(1, case.num_heads, 1, HEAD_DIM)

        def expanded(i: int) -> Tensor:
            latents = keys[0, 0, i * part % length :, :LATENT_V][:part]
            made = (latents @ expansion).view(1, len(latents), case.num_heads, -1).transpose(1, 2)
            dense_k, dense_v = made.chunk(2, dim=-1)
            return F.scaled_dot_product_attention(dense_q, dense_k, dense_v)

        functions[TRANSFORMERS] = expanded
    with Load() as load:
        samples = time_alternating(functions, num_sets=num_sets, seconds=seconds)
    if is_latent:
        times = samples[TRANSFORMERS].seconds
        samples[TRANSFORMERS] = Samples([x * length / part for x in times])
    rows, o = (
        layout.local_rows(0, choose(0), block),
        ours(0)[0].double().reshape(1, case.num_heads_kv, -1, case.head_dim_v),
    )
    true = torch.cat(
        [
            reference.attention(
                q.unflatten(1, (case.num_heads_kv, -1))[:, head],
                keys[:, head, None, own[own >= 0].long()],
                values[:, head, None, own[own >= 0].long()],
            )[0]
            for head, own in enumerate(rows.expand(1, case.num_heads_kv, 1, -1)[0, :, 0])
        ],
        dim=1,
    ).view_as(o)
    error = ((o - true).abs().max() / true.abs().max()).item()
    return row_of(case.name, samples, load, error, error > 1e-2)


def on_ranks(ranks: Ranks, length: int = 131072) -> list[dict[str, Any]]:
    return [merge_on_rank(ranks), index_on_rank(ranks, length)]


def merge_on_rank(ranks: Ranks) -> dict[str, Any]:
    """A choice of 2,048 keys on each of two ranks."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(65536, generator=generator)[: 2048 * ranks.size].int()
    scores = torch.randn(ranks.size, 1, 1, 1, 2048, generator=generator)
    scores = scores.sort(dim=-1, descending=True).values
    parts = scores, slots.view_as(scores)
    own = [x[ranks.rank] for x in parts]
    comm = Communicator()
    functions: dict[str, Callable[[int], Any]] = {
        OURS: lambda i: comm.all_merge_topk(*own, topk=2048),
        "merge_topk": lambda i: merge_topk(*parts, topk=2048),
    }
    with Load() as load:
        samples = time_in_step(functions, num_sets=1, rounds=200)
    found, true = samples[OURS].result, reference.merge_topk(*parts, topk=2048)
    wrong = not all(map(torch.equal, found, true))
    wrong = any(ranks.gather(wrong))
    slowest = {name: slowest_rank(ranks, sample) for name, sample in samples.items()}
    name = f"all_merge_topk of {ranks.size} x 2,048, loopback"
    return row_of(name, slowest, load, 0.0, wrong)


def index_on_rank(ranks: Ranks, length: int) -> dict[str, Any]:
    """The index of 64 heads over keys that are split evenly, and over all of them on each rank."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 64, 1, HEAD_DIM, generator=generator).bfloat16()
    weights = torch.randn(1, 64, 1, generator=generator)
    num_sets, topk, share = 2, min(2048, length), length // ranks.size
    shape = (1, 1, length, HEAD_DIM)
    sets = [torch.randn(shape, generator=generator).bfloat16() for _ in range(num_sets)]
    begin = ranks.rank * share
    slots = torch.arange(begin, begin + share, dtype=torch.int32)
    comm = Communicator()

    def split(index: int) -> tuple[Tensor, Tensor]:
        own = sets[index][:, :, begin : begin + share]
        part = index_topk(q, own, weights, topk=topk, key_slots=slots)
        return comm.all_merge_topk(*part, topk=topk)

    # On all ranks, as one that did nothing would wait for the others in what is timed next.
    def alone(index: int) -> tuple[Tensor, Tensor]:
        return index_topk(q, sets[index], weights, topk=topk)

    # What the ranks would need if they did not share memory and caches: one works at a time.
    def unshared(index: int) -> tuple[Tensor, Tensor]:
        own = sets[index][:, :, begin : begin + share]
        if ranks.rank == 0:
            first = index_topk(q, own, weights, topk=topk, key_slots=slots)
        else:
            first = torch.zeros(1, 1, 1, topk), torch.full((1, 1, 1, topk), -1, dtype=torch.int32)
        return comm.all_merge_topk(*first, topk=topk)

    functions: dict[str, Callable[[int], Any]] = {
        OURS: split,
        "one rank": alone,
        "half, the other rank waiting": unshared,
        "both reading a half at once": lambda i: read_memory(sets[i][:, :, begin : begin + share]),
    }
    with Load() as load:
        samples = time_in_step(functions, num_sets=num_sets, rounds=31)
    wrong = False
    for index in range(num_sets):
        true = index_topk(q, sets[index], weights, topk=topk)
        wrong |= not all(map(torch.equal, split(index), true))
    wrong = any(ranks.gather(wrong))
    slowest = {name: slowest_rank(ranks, sample) for name, sample in samples.items()}
    name = f"index of 64 heads over {length:,} keys on {ranks.size} ranks"
    return row_of(name, slowest, load, 0.0, wrong)


def row_of(
    name: str, samples: dict[str, Samples], load: Load, error: float, wrong: bool
) -> dict[str, Any]:
    return {
        "name": name,
        "times": {other: sample.to_json() for other, sample in samples.items()},
        "ratios": {
            other: sample.median / samples[OURS].median for other, sample in samples.items()
        },
        "other_load": load.others,
        "error": error,
        "wrong": wrong,
    }


def measure(length: int, seconds: float, with_ranks: bool = True) -> Report:
    torch.set_num_threads(1)
    # First, because ranks may use the processors that the process which starts them may use.
    of_ranks = start_ranks(2, ["-m", "benchmarks.chosen", "--on-rank"]) if with_ranks else []
    cpus = pin_threads()
    peak = fma_peak()
    most = 2 * peak  # of products of pairs of bfloat16
    runs: list[Any] = [
        *(Run(case.name, partial(run_index, case, length, seconds, most)) for case in INDEXES),
        *(Run(f"rows, {n} heads", partial(run_rows, n, length, seconds)) for n in (128, 16)),
        *(Run(case.name, partial(run_layer, case, length, seconds)) for case in (V32, M3)),
    ]
    with torch.inference_mode(), progress_bar(True) as progress:
        rows = [run.measure() for run in shown(progress, runs)] + of_ranks
    return Report(
        name="chosen",
        title="Models that choose their keys",
        notes=NOTES,
        environment=environment(
            **{
                "keys": length,
                "pinned to CPUs": cpus or "not pinned",
                "float32 multiply-adds": f"{peak * 1e-9:.0f} GFLOP/s",
            }
        ),
        rows=rows,
        columns=columns_of(rows, COLUMNS),
        warnings=load_warnings([row["other_load"] for row in rows]),
    )


@dataclass(frozen=True)
class Run:
    name: str
    measure: Callable[[], dict[str, Any]]


def _others(row: dict[str, Any]) -> str:
    others = (name for name in row["times"] if name not in (OURS, READING, FIRST))
    return ", ".join(f"{name} {row['times'][name]['median_us']:,.0f}" for name in others)


def _reading(row: dict[str, Any]) -> str:
    return f"{1 / row['ratios'][READING]:.2f}" if READING in row["ratios"] else "-"


NOTES = (
    "A new token over keys in bfloat16 that are read from memory; medians of alternating runs "
    "through Python on one thread. GFLOP/s: of the products of the index, with topk 1. choosing: "
    "what topk adds to topk 1. /reading: ours as a multiple of reading the keys once, by the same "
    "thread in the same run; float32 multiply-adds is what the thread reaches in registers, of "
    "which pairs of bfloat16 make up to twice as many. /ceiling: ours, choice included, as a "
    "multiple of the larger of two times that no index can beat on this core: its products at that "
    "rate, and reading the keys once.",
    "torch: the products in bfloat16, and topk; transformers: the same in float32, to which it "
    "converts the keys of every token. For rows torch gathers them, which attention by ours does "
    "without, and attends to them; making the pages is done in each layer.",
    "A token of a layer: index, choice, local rows, pages and attention to them, without the "
    "layer's projections. all keys, ours: dense attention to the same cache. transformers: keys "
    "and values of all heads made of the latents, and attention to them, timed with 1,024 tokens "
    "and multiplied, without the index.",
    "The index on 2 ranks: the choice of each from half of the keys, and all_merge_topk; one "
    "rank: the choice from all keys, which both make at once, as ranks of one machine share its "
    "memory. half, the other rank waiting: the same half and exchange without that sharing, which "
    "two machines do not have.",
    "error is the largest of a score, relative to the largest score, or of o, against float64. A "
    "choice that leaves a better key out is WRONG.",
)

COLUMNS = {
    "case": lambda row: row["name"],
    "ours us": lambda row: f"{row['times'][OURS]['median_us']:,.0f}",
    "GFLOP/s": lambda row: f"{row['gflops']:.0f}" if "gflops" in row else "-",
    "choosing us": lambda row: f"{row['choosing_us']:,.0f}" if "choosing_us" in row else "-",
    "/reading": _reading,
    "/ceiling": lambda row: row.get("ceiling", "-"),
    "others us": _others,
    "error": lambda row: f"{row['error']:.1e}",
    "right": verdict,
}


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "chosen")
    parser.add_argument("--keys", type=int, default=65536, help="in the cache (default 65536)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a row (default 5)")
    parser.add_argument("--on-rank", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.on_rank is not None:
        run_rank(parsed.on_rank, on_ranks)
        return 0
    return finish(measure(parsed.keys, parsed.seconds), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
