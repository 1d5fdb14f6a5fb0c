# SPDX-License-Identifier: BSD-3-Clause
"""Tree Attention, section 5.2, counted: the gradient of the energy costs as much as the energy.

python -m lab.papers.gradient_cost --out DIR
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.operations import Operations, counted
from benchmarks.harness.program import finish, parser_of
from benchmarks.harness.report import Columns, Report, columns_of, environment, verdict
from lab.papers.algorithms.tree import Shard, tree_energy, tree_gradient
from tree_attention.reference import attention

RANKS = (1, 8, 64, 512, 4096)
KEYS, HEAD_DIM = 16, 128  # of a rank; of Tree Attention's Figure 3


def by_backward(q: Tensor, zeta: Tensor, shards: Sequence[Shard]) -> Tensor:
    """The gradient of Algorithm 1 by automatic differentiation, with the pass that it needs."""
    zeta = zeta.clone().requires_grad_()
    with torch.enable_grad():
        shift, relative = tree_energy(q, zeta.expand(len(shards), *zeta.shape).unbind(), shards)
        (gradient,) = torch.autograd.grad((shift + relative).sum(), zeta)
    return gradient


def row_of(ranks: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 1, HEAD_DIM, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, 1, 1, ranks * KEYS, HEAD_DIM, dtype=torch.float64, generator=generator)
    shards = [Shard(*kv) for kv in zip(k.split(KEYS, 2), v.split(KEYS, 2), strict=True)]
    zeta = torch.zeros_like(q)
    (shift, relative), value = counted(lambda: tree_energy(q, zeta, shards))
    explicit, formula = counted(lambda: tree_gradient(q, zeta, shards))
    automatic, backward = counted(lambda: by_backward(q, zeta, shards))
    o, lse = attention(q, k, v)
    errors = [(a - o).abs().max() for a in (explicit, automatic)] + [(shift + relative - lse).abs()]
    costs = {"value": value, "Algorithm 2": formula, "backward": backward}
    wrong = not max(float(x.max()) for x in errors) < 1e-12
    return {"name": f"{ranks} ranks", "ranks": ranks, "costs": costs, "wrong": wrong}


def _columns(what: str) -> Columns:
    def ratio(name: str) -> Callable[[Any], str]:
        return lambda row: f"{row['costs'][name][what] / row['costs']['value'][what]:.2f}"

    first: Columns = {f"{what} of F": lambda row: f"{row['costs']['value'][what]:,}"}
    further = {f"{what}, {name} /F": ratio(name) for name in ("Algorithm 2", "backward")}
    return {**first, **further}


def run(ranks: Sequence[int]) -> Report:
    rows = [row_of(p) for p in ranks]
    columns: Columns = {"ranks": lambda row: f"{row['ranks']:,}"}
    columns = {**columns, **_columns("operations"), **_columns("depth"), "right": verdict}
    return Report(
        "gradient_cost",
        "Section 5.2: the gradient of the energy beside the energy, in operations and depth",
        [
            f"One query of one head of {HEAD_DIM}, {KEYS} keys on every rank. F: Algorithm 1. Its "
            "gradient at 0 is attention: by Algorithm 2, and by a pass of Algorithm 1 and one back "
            "through it; both contain the value.",
            " ".join((Operations.__doc__ or "").split()) + " Depth counts those along the longest "
            "chain, over all ranks.",
        ],
        environment(),
        rows,
        columns_of(rows, columns),
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "gradient_cost")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), metavar="N")
    parsed = parser.parse_args(arguments)
    return finish(run(parsed.ranks), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
