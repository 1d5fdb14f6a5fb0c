# SPDX-License-Identifier: BSD-3-Clause
"""Reformer's attention by locality-sensitive hashing (arXiv:2001.04451), by hashing rounds.

python -m lab.papers.lsh --out DIR

Queries and keys are the same vectors. In each round a random rotation hashes them into buckets;
sorted by bucket and position they are cut into chunks, and a query sees the keys of its bucket in
its own chunk and in the one before it (section 2). It sees itself only if it sees nothing else.

Each round gives a partial state of `(o, lse)`, and the rounds are merged as shards are. A key that
several rounds find would count so many times, for the merge is not idempotent; its scores are
therefore lowered by the logarithm of that number (the paper's appendix on multi-round attention).
The keys that a query sees are a matrix here, which takes more work than attention saves.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.program import finish, parser_of
from benchmarks.harness.report import Columns, Report, columns_of, environment, verdict
from lab.papers.algorithms.energy import softmax_weights
from tree_attention.reference import merge_states

ROUNDS = (1, 2, 4, 8, 16)
BUCKETS = (1, 4, 16, 64)
HEAD_DIM = 64
NORM = 96.0  # of the vectors: a score is a cosine times this / 8, so 12 at most


def hash_rounds(x: Tensor, num_buckets: int, num_rounds: int, generator: torch.Generator) -> Tensor:
    """The bucket of every vector in every round: `argmax([xR; -xR])` for a random rotation R.

    Args:
        x: `[seqlen, head_dim]`.
        num_buckets: even, or 1 for a bucket of everything.

    Returns:
        `[num_rounds, seqlen]`.
    """
    if num_buckets == 1:
        return torch.zeros(num_rounds, len(x), dtype=torch.int64)
    shape = (num_rounds, x.shape[1], num_buckets // 2)
    rotated = x @ torch.randn(shape, dtype=x.dtype, generator=generator)
    return torch.cat([rotated, -rotated], dim=-1).argmax(-1)


def seen_keys(buckets: Tensor, chunk: int, *, causal: bool = False) -> Tensor:
    """Which keys each query sees in each round.

    Args:
        buckets: `[rounds, seqlen]`.
        chunk: keys of a chunk, in the paper twice the mean size of a bucket.

    Returns:
        bool `[rounds, seqlen, seqlen]`; a row sees itself if no round shows it another key.
    """
    # place[r, i]: where vector i stands when round r has sorted by bucket, then by position.
    place = buckets.argsort(dim=1, stable=True).argsort(dim=1)
    behind = (place // chunk)[:, :, None] - (place // chunk)[:, None, :]
    seen = (buckets[:, :, None] == buckets[:, None, :]) & ((behind == 0) | (behind == 1))
    if causal:
        seen = seen.tril()
    itself = torch.eye(buckets.shape[1], dtype=torch.bool)
    seen = seen & ~itself
    alone = ~seen.any(0).any(-1)
    return seen | (itself & alone[:, None])


def lsh_attention(x: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of one head in rounds, each a partial state, merged in canonical order.

    Args:
        x: `[seqlen, head_dim]`, the queries; the keys are these vectors with length 1.
        v: `[seqlen, head_dim_v]`.
        seen: `[rounds, seqlen, seqlen]`, as from `seen_keys`.

    Returns:
        o and lse of attention over the union of the rounds.
    """
    scale = x.shape[-1] ** -0.5
    keys = torch.nn.functional.normalize(x, dim=-1)
    scores = scale * (x @ keys.mT) - seen.sum(0).clamp(min=1).to(x.dtype).log()
    of_rounds = torch.where(seen, scores, -torch.inf)
    return merge_states(softmax_weights(of_rounds) @ v, torch.logsumexp(of_rounds, dim=-1))


def around_centres(seqlen: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Vectors around 32 centres, so that there are near ones for the hash to find, and values."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    centres = torch.randn(32, HEAD_DIM, **options)
    x = centres[torch.arange(seqlen) % 32] + 0.5 * torch.randn(seqlen, HEAD_DIM, **options)
    x = NORM * torch.nn.functional.normalize(x, dim=-1)
    return x, torch.randn(seqlen, HEAD_DIM, **options), generator


def rows_of(seqlen: int) -> list[dict[str, Any]]:
    x, v, generator = around_centres(seqlen)
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
