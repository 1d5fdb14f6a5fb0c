# SPDX-License-Identifier: BSD-3-Clause
"""LeanAttention's Algorithms 2, 3 and 4 (arXiv:2405.10480).

They take `q [..., seqlen_q, head_dim]`, `k [..., seqlen_k, head_dim]` and
`v [..., seqlen_k, head_dim_v]`, whose leading axes are equal, and every query sees every key. They
return `o` and `lse` as `attention` does. Queries are cut into blocks of `tile_m` rows and keys into
LeanTiles of `tile_n`; the paper takes 256 keys for a head_dim of 64 and 128 for one of 128.

Beside the indices of Algorithm 4 (`stream_k`) they mend what the paper misprints: the fold of
Algorithm 2 begins with the empty state and has all C_n tiles (its line 20 ends at C_n - 1, and its
line 24 does not assign O); LeanTile finds the head of its output tile (the column offset of line 11
is always 0); lines 34 and 35 of Algorithm 4 assign O; and scores are scaled.
"""

from functools import reduce

from torch import Tensor

from tree_attention.reference.papers.flash import blocks
from tree_attention.reference.papers.stream_k import Balanced, Schedule, run
from tree_attention.reference.running import State, add_tile, empty_state, normalise, rescale


def lean_attention_basic(
    q: Tensor, k: Tensor, v: Tensor, *, tile_m: int, tile_n: int
) -> tuple[Tensor, Tensor]:
    """Algorithm 2: every tile (i, j) of the scores for itself, then a fold over j for each i."""
    scale = q.shape[-1] ** -0.5
    o, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
    for rows in blocks(q.shape[-2], tile_m):
        empty = empty_state(q[..., rows, :], v)
        tiles = [
            add_tile(empty, q[..., rows, :], k[..., keys, :], v[..., keys, :], scale)
            for keys in blocks(k.shape[-2], tile_n)
        ]
        o[..., rows, :], lse[..., rows] = normalise(reduce(rescale, tiles, empty))
    return o, lse


def lean_tile(
    q: Tensor, k: Tensor, v: Tensor, begin: int, end: int, *, tile_n: int, scale: float
) -> State:
    """Algorithm 3: the state of iterations `[begin, end)` of one output tile, not normalised.

    q has the rows of that output tile, k and v all keys of its head.
    """
    state = empty_state(q, v)
    for i in range(begin, end):
        keys = slice(i * tile_n, (i + 1) * tile_n)
        state = add_tile(state, q, k[keys], v[keys], scale)
    return state


def lean_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tile_m: int,
    tile_n: int,
    ctas: int,
    schedule: type[Schedule] = Balanced,
) -> tuple[Tensor, Tensor]:
    """Algorithm 4: equal ranges of the LeanTiles of all heads and query blocks, on `ctas` workers.

    With as many CTAs as output tiles it is `flash_attention_2`, with s times as many, where s
    divides C_n, `flash_decoding`.

    Args:
        schedule: the index arithmetic, for instance `stream_k.AsPrinted`.

    Raises:
        RuntimeError: the schedule makes a CTA wait for a part that nobody leaves.
    """
    scale = q.shape[-1] ** -0.5
    heads = [x[None].flatten(0, -3) for x in (q, k, v)]
    tiles = [(head, rows) for head in range(len(heads[0])) for rows in blocks(q.shape[-2], tile_m)]

    def part(tile: int, begin: int, end: int) -> State:
        head, rows = tiles[tile]
        q_tile, k_head, v_head = heads[0][head, rows], heads[1][head], heads[2][head]
        return lean_tile(q_tile, k_head, v_head, begin, end, tile_n=tile_n, scale=scale)

    indices = schedule(len(tiles), -(-k.shape[-2] // tile_n), ctas)
    outputs, waiting = run(indices, part, rescale)
    if waiting:
        raise RuntimeError(
            f"lean_attention: schedule must be one whose CTAs all end, got {schedule.__name__}, "
            f"in which CTA {waiting[0]} waits forever"
        )
    o = q.new_zeros(*heads[0].shape[:-1], v.shape[-1])
    lse = q.new_full(heads[0].shape[:-1], float("-inf"))
    for tile, state in outputs.items():
        o[tiles[tile]], lse[tiles[tile]] = normalise(state)
    return o.view(*q.shape[:-1], v.shape[-1]), lse.view(q.shape[:-1])
