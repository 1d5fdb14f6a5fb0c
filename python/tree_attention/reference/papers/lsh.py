# SPDX-License-Identifier: BSD-3-Clause
"""Reformer's attention by locality-sensitive hashing (arXiv:2001.04451), whose rounds are parts.

Queries and keys are the same vectors. In each round a random rotation hashes them into buckets;
sorted by bucket and position they are cut into chunks, and a query sees the keys of its bucket in
its own chunk and in the one before it (section 2). It sees itself only if it sees nothing else.

Each round gives a partial state of `(o, lse)`, and the rounds are merged as shards are. A key that
several rounds find would count so many times, for the merge is not idempotent; its scores are
therefore lowered by the logarithm of that number (the paper's appendix on multi-round attention).
The merged state is then attention over the union of what the rounds see: exact where that is
everything, and with more rounds it is nearer to everything.

The keys that a query sees are a matrix here, which takes more work than attention saves.
"""

import torch
from torch import Tensor

from tree_attention.reference.attention import merge_states
from tree_attention.reference.papers.energy import softmax_weights


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
