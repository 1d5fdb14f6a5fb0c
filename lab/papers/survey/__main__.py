# SPDX-License-Identifier: BSD-3-Clause
"""Errors of approximate attention, memory that reservations waste, and hashed attention's time.

python -m lab.papers.survey errors --out DIR
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.measure import pin_threads, time_alternating
from benchmarks.harness.program import finish, parser_of
from benchmarks.harness.report import Columns, Report, columns_of, environment, verdict
from tree_attention.reference import attention

from ..lsh import around_centres, hash_rounds
from . import OURS, kernels, low_rank, waste
from .sorted_chunks import sorted_lsh_attention

NUMBERS = (64, 256, 1024, 4096)
SHARDS = (300, 0, 500, 224)
LENGTHS = (1024, 4096, 16_384, 65_536)  # of hashed attention


def error_rows(size: float) -> list[dict[str, Any]]:
    """The errors for queries and keys of standard deviation `size`."""
    rows: list[dict[str, Any]] = []
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3, 64, sum(SHARDS) + 15, dtype=torch.float64, generator=generator)
    q = size * noise[:1, None, :, 15:].mT
    k, v = 4 * torch.nn.functional.avg_pool1d(noise[1:], 16, stride=1).mT[:, None, None]
    k = size * k
    truth, _ = attention(q, k, v)

    def add(name: str, number: int, whole: Tensor, of_shards: Tensor) -> None:
        error = ((whole - truth).norm() / truth.norm()).item()
        # Features of either sign nearly cancel in some denominators, which magnifies rounding.
        close = torch.allclose(whole, of_shards, rtol=1e-9, atol=1e-9)
        row = {"name": name, "number": number, "size": size, "error": error, "wrong": not close}
        rows.append(row)

    def add_kernel(name: str, phi_q: Tensor, phi_k: Tensor) -> None:
        shards = list(zip(phi_k.split(SHARDS, 2), v.split(SHARDS, 2), strict=True))
        whole = kernels.read(phi_q, kernels.kernel_state(phi_k, v))
        add(name, phi_k.shape[-1], whole, kernels.tree_linear_attention(phi_q, shards))

    add_kernel("elu(x) + 1", kernels.elu_features(q), kernels.elu_features(k))
    for name, per, of in (
        ("positive random features", 1, kernels.positive_features),
        ("trigonometric random features", 2, kernels.trigonometric_features),
    ):
        for number in NUMBERS:
            omega = kernels.directions(number // per, 64, generator, orthogonal=True)
            add_kernel(name, of(kernels.scaled(q), omega), of(kernels.scaled(k), omega))
    for stride in (16, 4, 2):
        e = low_rank.averages(sum(SHARDS), stride)
        parts = [*(x.split(SHARDS, 2) for x in (k, v)), *[e.split(SHARDS, 1)] * 2]
        shards = [low_rank.Projected(*part) for part in zip(*parts, strict=True)]
        of_shards, _ = low_rank.low_rank_attention(q, shards)
        add("averages of neighbours", len(e), attention(q, e @ k, e @ v)[0], of_shards)
    return rows


def errors() -> Report:
    rows = [row for size in (1.0, 0.5) for row in error_rows(size)]
    columns: Columns = {
        "method": lambda row: row["name"],
        "size": lambda row: str(row["size"]),
        "features or keys": lambda row: str(row["number"]),
        "relative error": lambda row: f"{row['error']:.2g}",
        "right": verdict,
    }
    note = (
        "1,024 normal queries, and as many keys and values that change slowly, of 64 columns. Size "
        "is the standard deviation of queries and keys, whose square is that of the scores. The "
        "error is that of o against softmax attention in the Euclidean norm. A row is right if "
        "four uneven shards over a tree give what all keys give at once, to 1e-9."
    )
    title = "Approximate attention against softmax attention"
    return Report("survey_errors", title, [note], environment(), rows, columns_of(rows, columns))


def wasted() -> Report:
    sizes = {"slots": 32_768, "largest": 2048, "steps": 8000, "seed": 0}
    memories = {name: waste.reserved_memory(f, **sizes) for name, f in waste.RESERVATIONS.items()}
    memories |= {f"blocks of {n}": waste.paged_memory(n, **sizes) for n in (1, 16, 64, 256)}
    rows: list[dict[str, Any]] = [
        {"name": name, "wrong": not abs(sum(x.values()) - 1) < 1e-9, **x}
        for name, x in memories.items()
    ]
    columns: Columns = {
        "at once": lambda row: row["name"],
        "used": lambda row: f"{row['used']:.1%}",
        "reserved": lambda row: f"{row['reserved']:.1%}",
        "internal": lambda row: f"{row['internal']:.1%}",
        "external": lambda row: f"{row['external']:.1%}",
        "right": verdict,
    }
    note = (
        "Prompts and answers are log-normal (medians of 148 tokens, 2,048 at most together) in a "
        "memory of 32,768 slots, with a queue that never ends; means over 4,000 steps."
    )
    title = "Slots of a cache, by what they are used for"
    return Report("cache_waste", title, [note], environment(), rows, columns_of(rows, columns))


def timed(x: Tensor, v: Tensor, buckets: Tensor | None, _: int) -> tuple[Tensor, Tensor]:
    if buckets is None:
        return OURS.attend(*(y[None, None] for y in (x, x, v)))
    return sorted_lsh_attention(x, v, buckets, 128, operators=OURS)


def chunks() -> Report:
    rows: list[dict[str, Any]] = []
    pin_threads()
    for seqlen in LENGTHS:
        x, v, generator = around_centres(seqlen)
        x, v = x.float(), v.float()
        buckets = hash_rounds(x, seqlen // 64, 1, generator)
        functions: dict[str, Callable[[int], Any]] = {
            "chunks": partial(timed, x, v, buckets),
            "all": partial(timed, x, v, None),
        }
        samples = time_alternating(functions, num_sets=1, seconds=2.0)
        times = {name: sample.median for name, sample in samples.items()}
        o, _ = sorted_lsh_attention(x.double(), v.double(), buckets, 128)
        close = torch.allclose(samples["chunks"].result[0].double(), o, rtol=1e-4, atol=1e-4)
        rows.append({"name": f"{seqlen} tokens", "wrong": not close, **times})
    columns: Columns = {
        "tokens": lambda row: row["name"],
        "sorted chunks ms": lambda row: f"{row['chunks'] * 1e3:,.1f}",
        "all keys ms": lambda row: f"{row['all'] * 1e3:,.1f}",
        "times faster": lambda row: f"{row['all'] / row['chunks']:.1f}",
        "right": verdict,
    }
    note = (
        "One head of 64 columns in float32, one round, buckets of 64 keys on average, chunks of "
        "128; sorting is in the time, hashing is not. Right: as the definition in float64, to 1e-4."
    )
    title = "Hashed attention in sorted chunks beside attention to all keys"
    return Report("lsh_time", title, [note], environment(), rows, columns_of(rows, columns))


REPORTS = {"errors": errors, "waste": wasted, "chunks": chunks}


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "NAME")
    parser.add_argument("report", choices=REPORTS)
    parsed = parser.parse_args(arguments)
    return finish(REPORTS[parsed.report](), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
