# SPDX-License-Identifier: BSD-3-Clause
"""Reformer's hashed attention: the error against the number of hashing rounds.

python -m benchmarks.papers.lsh --out DIR
"""

import sys
from typing import Any

import torch

from tree_attention.reference.papers.lsh import hash_rounds, lsh_attention, seen_keys

from ..harness.program import finish, parser_of
from ..harness.report import Columns, Report, columns_of, environment, verdict

ROUNDS = (1, 2, 4, 8, 16)
BUCKETS = (1, 4, 16, 64)
HEAD_DIM = 64
NORM = 96.0  # of the vectors: a score is a cosine times this / 8, so 12 at most


def rows_of(seqlen: int) -> list[dict[str, Any]]:
    """Vectors around 32 centres, so that there are near ones for the hash to find."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    centres = torch.randn(32, HEAD_DIM, **options)
    x = centres[torch.arange(seqlen) % 32] + 0.5 * torch.randn(seqlen, HEAD_DIM, **options)
    x = NORM * torch.nn.functional.normalize(x, dim=-1)
    v = torch.randn(seqlen, HEAD_DIM, **options)
    exact, _ = lsh_attention(x, v, seen_keys(torch.zeros(1, seqlen, dtype=torch.int64), seqlen))
    rows = []
    for num_buckets in BUCKETS:
        buckets = hash_rounds(x, num_buckets, max(ROUNDS), generator)
        for rounds in ROUNDS:
            seen = seen_keys(buckets[:rounds], max(1, 2 * seqlen // num_buckets))
            o, _ = lsh_attention(x, v, seen)
            of_union, _ = lsh_attention(x, v, seen.any(0)[None])
            error = ((o - exact).norm() / exact.norm()).item()
            rows.append(
                {
                    "name": f"{num_buckets} buckets, {rounds} rounds",
                    "buckets": num_buckets,
                    "rounds": rounds,
                    "seen": seen.any(0).double().mean().item(),
                    "error": error,
                    "wrong": not (o - of_union).abs().max() < 1e-12
                    or (num_buckets == 1 and not error < 1e-12),
                }
            )
    return rows


COLUMNS: Columns = {
    "buckets": lambda row: str(row["buckets"]),
    "rounds": lambda row: str(row["rounds"]),
    "keys seen": lambda row: f"{row['seen']:.1%}",
    "relative error": lambda row: f"{row['error']:.2g}",
    "right": verdict,
}


def run(seqlen: int) -> Report:
    rows = rows_of(seqlen)
    return Report(
        "lsh",
        f"Hashed attention of {seqlen} vectors of 64 around 32 centres, against attention to all",
        [
            "Chunks have twice the mean size of a bucket. The error is that of o in the Euclidean "
            "norm over all queries. A row is right if the merged rounds are attention over the "
            "union of what they see, to 1e-12."
        ],
        environment(),
        rows,
        columns_of(rows, COLUMNS),
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "lsh")
    parser.add_argument("--seqlen", type=int, default=1024, metavar="N")
    parsed = parser.parse_args(arguments)
    if parsed.seqlen < 64:
        parser.error("--seqlen is at least 64")
    return finish(run(parsed.seqlen), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
