# SPDX-License-Identifier: BSD-3-Clause
"""The slow-memory traffic of FlashAttention (arXiv:2205.14135), beside Theta(N^2 d^2 / M).

python -m lab.papers.slow_memory --out DIR
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.program import finish, parser_of
from benchmarks.harness.report import Columns, Report, columns_of, environment, verdict
from lab.papers.algorithms.energy import softmax_weights
from lab.papers.algorithms.flash import SlowMemory, blocks, flash_attention_2
from tree_attention.reference import attention

# N queries and keys, head_dim d, fast memory M in elements, d <= M <= N d. The last three have the
# M of 192 KB of a processor in 2 bytes, of which line 1 makes blocks of 384 and 192 keys.
SHAPES = (
    (256, 16, 256),
    (256, 64, 1024),
    (512, 32, 4096),
    (1024, 64, 4096),
    (1024, 64, 16384),
    (2048, 64, 98304),
    (2048, 128, 98304),
    (4096, 64, 98304),
)


def standard_attention(
    q: Tensor, k: Tensor, v: Tensor, *, memory: SlowMemory | None = None
) -> tuple[Tensor, Tensor]:
    """Algorithm 0 of FlashAttention: the matrices S and P go to slow memory and come back.

    Each of its three steps is counted as if it loaded every matrix once, whatever the size of the
    fast memory, as FlashAttention's Theorem 2 counts it: `4 N^2 + 4 N d` elements.
    """
    scale, memory = q.shape[-1] ** -0.5, memory or SlowMemory()
    scores, weights = (q.new_empty(*q.shape[:-1], k.shape[-2]) for _ in range(2))
    o = q.new_empty(*q.shape[:-1], v.shape[-1])

    memory.store(scores, scale * memory.load(q) @ memory.load(k).mT)
    memory.store(weights, softmax_weights(memory.load(scores)))
    memory.store(o, memory.load(weights) @ memory.load(v))
    return o, torch.logsumexp(scores, dim=-1)


def flash_block_sizes(fast_memory: int, head_dim: int) -> tuple[int, int]:
    """Rows of a query block and keys of a key block by line 1 of FlashAttention's Algorithm 1."""
    keys = -(-fast_memory // (4 * head_dim))
    return min(keys, head_dim), keys


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, fast_memory: int, memory: SlowMemory | None = None
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 of FlashAttention: key blocks outside, query blocks inside.

    O, l and m live in slow memory and are read and written once for each key block. The traffic is
    Theta(N^2 d^2 / M) for d <= M <= N d elements of fast memory (Theorem 2). Scores must be finite.
    """
    scale, memory = q.shape[-1] ** -0.5, memory or SlowMemory()
    block_q, block_k = flash_block_sizes(fast_memory, q.shape[-1])
    o, l_sum, m = q.new_empty(*q.shape[:-1], v.shape[-1]), *q.new_empty(2, *q.shape[:-1])
    memory.store(o, torch.zeros_like(o))
    memory.store(l_sum, torch.zeros_like(l_sum))
    memory.store(m, torch.full_like(m, -torch.inf))

    for keys in blocks(k.shape[-2], block_k):
        k_j, v_j = memory.load(k[..., keys, :]), memory.load(v[..., keys, :])
        for rows in blocks(q.shape[-2], block_q):
            q_i, o_i = memory.load(q[..., rows, :]), memory.load(o[..., rows, :])
            l_i, m_i = memory.load(l_sum[..., rows]), memory.load(m[..., rows])
            scores = scale * q_i @ k_j.mT
            m_tile = scores.amax(-1)
            p_tile = torch.exp(scores - m_tile[..., None])
            l_tile = p_tile.sum(-1)
            m_new = torch.maximum(m_i, m_tile)
            before, now = torch.exp(m_i - m_new), torch.exp(m_tile - m_new)
            l_new = before * l_i + now * l_tile
            o_new = (l_i * before)[..., None] * o_i + now[..., None] * (p_tile @ v_j)
            memory.store(o[..., rows, :], o_new / l_new[..., None])
            memory.store(l_sum[..., rows], l_new)
            memory.store(m[..., rows], m_new)
    return o, m + l_sum.log()


def flash_traffic(seqlen: int, head_dim: int, fast_memory: int) -> int:
    """The elements that `flash_attention` moves for `seqlen` queries and as many keys.

    K and V pass once. O, l and m are initialised, and each of the T_c key blocks loads Q and
    exchanges O, l and m: `3 N d + 2 N + T_c (3 N d + 4 N)` elements with `T_c = N / (M / 4 d)`,
    so 12 N^2 d^2 / M for large d and N.
    """
    _, block_k = flash_block_sizes(fast_memory, head_dim)
    key_blocks = -(-seqlen // block_k)
    n_d = seqlen * head_dim
    return 3 * n_d + 2 * seqlen + key_blocks * (3 * n_d + 4 * seqlen)


def row_of(seqlen: int, head_dim: int, fast_memory: int) -> dict[str, Any]:
    q, k, v = torch.randn(3, 1, 1, seqlen, head_dim, dtype=torch.float64)
    truth, _ = attention(q, k, v)
    block_q, block_k = flash_block_sizes(fast_memory, head_dim)
    counted = {}
    wrong = False
    for name, algorithm, options in (
        ("standard", standard_attention, {}),
        ("flash", flash_attention, {"fast_memory": fast_memory}),
        ("flash_2", flash_attention_2, {"block_q": block_q, "block_k": block_k}),
    ):
        memory = SlowMemory()
        o, _ = algorithm(q, k, v, memory=memory, **options)
        wrong |= not (o - truth).abs().max() < 1e-12
        counted[name] = memory.traffic
    formula = flash_traffic(seqlen, head_dim, fast_memory)
    return {
        "name": f"N {seqlen}, d {head_dim}, M {fast_memory}",
        "theta": seqlen**2 * head_dim**2 / fast_memory,
        "formula": formula,
        "wrong": wrong or counted["flash"] != formula,
        **counted,
    }


COLUMNS: Columns = {
    "shape": lambda row: row["name"],
    "N2d2/M": lambda row: f"{row['theta']:,.0f}",
    "FlashAttention counted": lambda row: f"{row['flash']:,}",
    "its formula": lambda row: f"{row['formula']:,}",
    "/ N2d2/M": lambda row: f"{row['flash'] / row['theta']:.2f}",
    "FlashAttention-2": lambda row: f"{row['flash_2']:,}",
    "standard": lambda row: f"{row['standard']:,}",
    "standard /FlashAttention": lambda row: f"{row['standard'] / row['flash']:.2f}",
    "right": verdict,
}


def run(shapes: Sequence[tuple[int, int, int]]) -> Report:
    torch.manual_seed(0)
    rows = [row_of(*shape) for shape in shapes]
    return Report(
        "slow_memory",
        "Elements that pass between slow and fast memory, counted while the algorithms run",
        [
            "FlashAttention's Algorithm 1 reads and writes O for every block of M / 4 d keys: 12 "
            "N^2 d^2 / M, and l and m, of which each is an element per row.",
            "FlashAttention-2 reads Q and writes O once, and K and V for every block of queries. "
            "Its paper leaves the blocks open; here they are those of Algorithm 1, whose line 1 "
            "allows d queries at most, so with much fast memory it moves more.",
            "Standard attention is counted as if each of its three steps loaded its matrices once.",
        ],
        environment(),
        rows,
        columns_of(rows, COLUMNS),
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "slow_memory")
    parser.add_argument("--quick", action="store_true", help="the three smallest shapes")
    parsed = parser.parse_args(arguments)
    return finish(run(SHAPES[:3] if parsed.quick else SHAPES), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
