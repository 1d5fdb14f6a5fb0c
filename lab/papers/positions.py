# SPDX-License-Identifier: BSD-3-Clause
"""Perplexity beyond the trained length by kind of positions: Figure 1 of ALiBi (arXiv:2108.12409).

python -m lab.papers.positions --out DIR                      # takes some minutes

Small models of bytes learn this project's pages and sources in windows of 128 bytes, a tenth of the
files held out. They are evaluated on longer windows by the library's attention, and on one window
of each length also by a matrix of scores, with which they were trained.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness.program import finish, parser_of, progress_bar
from benchmarks.harness.report import ROOT, Columns, Report, columns_of, environment, verdict
from tree_attention import lean_decode
from tree_attention.options import AttentionOptions
from tree_attention.positions import alibi_slopes, decode_with_range_bias, t5_ranges

KINDS = ("sinusoidal", "rotary", "T5", "ALiBi")
TRAINED, LENGTHS = 128, (128, 256, 512, 1024)
LAYERS, HEADS, HEAD_DIM, BUCKETS = 2, 4, 32, 32
HIDDEN = HEADS * HEAD_DIM
BATCH, HELD_OUT_BYTES, TOLERANCE = 16, 1 << 15, 1e-3

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [batch, heads, n, head_dim]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        projected = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, HEAD_DIM))
        q, k, v = projected.permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A decoder of bytes with one kind of positions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.norm = nn.Embedding(256, HIDDEN), nn.LayerNorm(HIDDEN)
        nn.init.normal_(self.embedding.weight, std=HIDDEN**-0.5)  # it makes the logits as well
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.buckets = nn.Parameter(torch.zeros(HEADS, BUCKETS)) if kind == "T5" else None

    def forward(self, tokens: Tensor, attend: Callable[["Model"], Attend]) -> Tensor:
        x = math.sqrt(HIDDEN) * self.embedding(tokens)
        if self.kind == "sinusoidal":
            angles = angles_of(tokens.shape[1], HIDDEN)
            x = x + torch.cat([angles.sin(), angles.cos()], -1)
        how = attend(self)

        def attend_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return how(turned(q), turned(k), v) if self.kind == "rotary" else how(q, k, v)

        for block in self.blocks:
            x = block(x, attend_in_place)
        return F.linear(self.norm(x), self.embedding.weight)


def angles_of(n: int, columns: int) -> Tensor:
    """Angles of n positions in half as many frequencies as columns, `[n, columns / 2]`."""
    frequencies = 1e4 ** (-torch.arange(0, columns, 2) / columns)
    return torch.arange(n)[:, None] * frequencies


def turned(x: Tensor) -> Tensor:
    angles, (a, b) = angles_of(x.shape[2], HEAD_DIM), x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def by_scores(model: Model) -> Attend:
    """Attention that has gradients: a matrix of scores with the bias of the positions."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots = torch.arange(q.shape[2])
        distances = slots[:, None] - slots
        bias = torch.zeros(1, *distances.shape)
        if model.kind == "ALiBi":
            bias = -alibi_slopes(HEADS)[:, None, None] * distances
        elif model.buckets is not None:
            begins, ends = t5_ranges(slots[None], num_buckets=BUCKETS)[0].unbind(-1)
            keys = slots[:, None]
            is_in = (begins[:, None] <= keys) & (keys < ends[:, None])  # [query, key, bucket]
            bias = torch.einsum("qkb,hb->hqk", is_in.float(), model.buckets)
        return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(distances < 0, -torch.inf))

    return attend


def by_library(model: Model) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots = torch.arange(q.shape[2]).expand(len(q), -1)
        if model.buckets is not None:
            ranges = t5_ranges(slots, num_buckets=BUCKETS)
            return decode_with_range_bias(q, k, v, ranges, model.buckets)[0]
        ranges = torch.stack([torch.zeros_like(slots), slots + 1], -1).int()
        options: AttentionOptions = {}
        if model.kind == "ALiBi":
            options = {"alibi_slopes": alibi_slopes(HEADS), "query_positions": slots}
        return lean_decode(q, k, v, ranges, **options)[0]

    return attend


def texts() -> tuple[Tensor, Tensor]:
    """Bytes to learn and bytes held out."""
    files = [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("python/**/*.py"))]

    def joined(chosen: Sequence[Any]) -> Tensor:
        text = bytearray().join(file.read_bytes() for file in chosen)
        return torch.frombuffer(text, dtype=torch.uint8).long()

    learned = [file for i, file in enumerate(files) if i % 10]
    return joined(learned), joined(files[::10])[:HELD_OUT_BYTES]


def train(kind: str, text: Tensor, steps: int, advance: Callable[[], object]) -> Model:
    torch.manual_seed(0)
    model = Model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        begins = torch.randint(len(text) - TRAINED, (BATCH, 1))
        window = text[begins + torch.arange(TRAINED + 1)]
        logits = model(window[:, :-1], by_scores)
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        advance()
    return model


@torch.no_grad()
def evaluate(model: Model, text: Tensor, n: int) -> tuple[float, float]:
    """Perplexity of a byte in windows of n, and the largest difference of ways in logits."""
    windows = text[: (len(text) - 1) // n * n].view(-1, n)
    following = text[1 : windows.numel() + 1].view(-1, n)
    losses = [  # sums, as the last group may have fewer windows
        F.cross_entropy(model(x, by_library).flatten(0, 1), y.flatten(), reduction="sum").item()
        for x, y in zip(windows.split(4096 // n), following.split(4096 // n), strict=True)
    ]
    one = windows[:1]
    difference = model(one, by_library) - model(one, by_scores)
    return math.exp(sum(losses) / windows.numel()), difference.abs().max().item()


def row_of(model: Model, text: Tensor) -> dict[str, Any]:
    found = {n: evaluate(model, text, n) for n in LENGTHS}
    error = max(difference for _, difference in found.values())
    return {
        "name": model.kind,
        "perplexity": {str(n): perplexity for n, (perplexity, _) in found.items()},
        "error": error,
        "wrong": not error < TOLERANCE,
    }


def _perplexity(n: int, row: dict[str, Any]) -> str:
    return f"{row['perplexity'][str(n)]:.2f}"


COLUMNS: Columns = {
    "positions": lambda row: row["name"],
    **{f"{n} bytes": partial(_perplexity, n) for n in LENGTHS},
    "difference": lambda row: f"{row['error']:.1e}",
    "right": verdict,
}


def run(steps: int, progress: Progress) -> Report:
    learned, held_out = texts()
    rows = []
    for kind in KINDS:
        task = progress.add_task(kind, total=steps)
        model = train(kind, learned, steps, partial(progress.advance, task))
        rows.append(row_of(model.eval(), held_out))
    return Report(
        "positions",
        f"Perplexity of a byte by length of the window, of models trained on {TRAINED} bytes",
        [
            f"{LAYERS} layers, {HEADS} heads of {HEAD_DIM}, {steps:,} steps of {BATCH} windows of "
            f"{len(learned):,} bytes; windows of {len(held_out):,} bytes held out do not overlap.",
            "difference: the largest of logits, between the library's attention and a matrix of "
            "scores. T5's buckets end at a distance of 128.",
        ],
        environment(),
        rows,
        columns_of(rows, COLUMNS),
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "positions")
    parser.add_argument("--steps", type=int, default=500, metavar="N")
    parsed = parser.parse_args(arguments)
    if parsed.steps < 2:
        parser.error(f"argument --steps: must be at least 2, got {parsed.steps}")
    with progress_bar(root=True) as progress:
        report = run(parsed.steps, progress)
    return finish(report, parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
