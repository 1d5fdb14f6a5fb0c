# SPDX-License-Identifier: BSD-3-Clause
"""Which form of split pays where, by arithmetic: Llama 3.1 on several hosts and links.

    python -m lab.simulation.parallelism

It writes the table of docs/parallelism.md and draws the picture of that page.

Times are those of bandwidths, of arithmetic at the rate that is given, and of rounds of messages.
Nothing overlaps and nobody waits, so that they are bounds of a kind: their order says which form to
take, not how long it takes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import regions
from benchmarks.pictures import DOCS, FIRST, LIGHT_GREY, OURS, SECOND, THIRD, picture
from tree_attention.planning.arithmetic import (
    FORMS,
    SPLIT,
    SPLIT_BY_HEADS,
    WHOLE,
    Split,
    Work,
)
from tree_attention.planning.machines import LINKS, MACHINES, Hosts
from tree_attention.planning.models import NAMED

WORK = Work(context=128 << 10)  # in the chunks that `plan` and `enable` take
WORLDS = (2, 4, 8, 16)
MODELS = (NAMED["llama-3.1-8b"], NAMED["llama-3.1-70b"])
HOSTS = {
    "1 GbE": Hosts(MACHINES["cpu"], LINKS["1gbe"]),
    "10 GbE": Hosts(MACHINES["cpu"], LINKS["10gbe"]),
    "NVLink": Hosts(MACHINES["h100"], LINKS["nvlink"]),
}
DECODING = (WHOLE, SPLIT, SPLIT_BY_HEADS)  # prompts are split while there is one


def rows() -> Iterator[list[str]]:
    for model in MODELS:
        for link, hosts in HOSTS.items():
            for p in WORLDS:
                splits = {form: Split(model, form, p, WORK) for form in FORMS}
                token, prefill = {}, {}
                for form, split in splits.items():
                    fits = split.held_bytes <= hosts.machine.memory
                    prefill[form] = split.prefill_seconds(hosts).total if fits else math.inf
                    if form in DECODING:
                        token[form] = 1e3 * split.token_seconds(hosts).total if fits else math.inf
                yield [
                    *(model.name, link, str(p)),
                    *(f"{splits[form].held_bytes / 1e9:,.0f}" for form in DECODING),
                    *_marked(token),
                    *_marked(prefill),
                ]


def _marked(times: dict[str, float]) -> list[str]:
    """Return the times, the first of those within 1 % of the least in bold."""
    least = min(times.values())
    winner = next(form for form, time in times.items() if time <= 1.01 * least)
    texts = {form: _text(time) for form, time in times.items()}
    if least < math.inf:
        texts[winner] = f"**{texts[winner]}**"
    return list(texts.values())


HEADINGS = (
    *("model", "link", "hosts"),
    *("GB: replicated weights", "GB: split weights, T = 1", "GB: largest T"),
    *("ms per token: replicated weights", "split weights, T = 1", "largest T"),
    *("prefill s: replicated weights", "split prompts", "split weights, T = 1", "largest T"),
)


def table() -> str:
    lines = [HEADINGS, ["---"] * 2 + ["---:"] * 11, *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def written(page: str) -> str:
    """Return docs/parallelism.md with today's table."""
    return regions.written(page, "python -m lab.simulation.parallelism", table().rstrip())


def _text(value: float) -> str:
    if value == math.inf:
        return "does not fit"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def pieces(p: int, rank: int, size: int | None) -> dict[str, tuple[int, int]]:
    """Return the number of pieces of each thing that a rank holds, and the rank's piece.

    `size` is tensor_parallel_size; None: weights are replicated.
    """
    whole, size_or_one = (1, 0), size or 1
    num_contexts = p // size_or_one
    context, tensor = divmod(rank, size_or_one)
    heads = (size_or_one, tensor)
    return {
        "projections q, k, v": heads,
        "projection o": whole if size is None else (p, tensor * num_contexts + context),
        "MLP, each expert": whole if size is None else (p, rank),
        "embedding, LM head": whole if size is None else (p, rank),
        "out of latents (kv_b)": heads,
        "into latents (kv_a)": whole,
        "cache: heads": heads,
        "cache: tokens": (num_contexts, context),
        "cache of latents": (num_contexts, context),
    }


P = 4  # ranks of the picture
COLOURS = (OURS, FIRST, SECOND, THIRD)


def who_holds_what() -> dict[str, list[dict[str, tuple[int, int]]]]:
    """Return, for each form and rank, the parts and the held one of every tensor."""
    names: dict[int | None, str] = {None: "replicated weights"}
    names |= {size: f"split weights,\ntensor_parallel_size {size}" for size in (1, 2, 4)}
    return {name: [pieces(P, rank, size) for rank in range(P)] for size, name in names.items()}


def draw_who_holds_what(path: Path) -> None:
    """Draw ranks and, for each form, the part of every tensor that each of them holds."""
    data = who_holds_what()
    title = f"What each of {P} ranks holds: the coloured part of a gray tensor. Less is less memory"
    with picture(path, data, (1, len(data)), (9, 5), sharey=True) as (panels,):
        for axes, (name, ranks) in zip(panels, data.items(), strict=True):
            for rank, held in enumerate(ranks):
                for place, (count, piece) in enumerate(held.values()):
                    box = {"height": 0.6, "align": "edge"}
                    left, width = rank + 0.1, 0.8 / count
                    axes.barh(place, 0.8, left=left, color=LIGHT_GREY, **box)
                    axes.barh(place, width, left=left + piece * width, color=COLOURS[rank], **box)
            axes.set_xticks([rank + 0.5 for rank in range(P)], list(range(P)))
            axes.set(xlabel="rank")
            axes.set_title(name, fontsize=10)
            axes.set_frame_on(False)
            axes.tick_params(length=0, labelsize=10)
        tensors = [*pieces(P, 0, None)]
        panels[0].set_yticks([place + 0.3 for place in range(len(tensors))], tensors)
        panels[0].invert_yaxis()
        panels[0].figure.suptitle(title, fontsize=11)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.simulation.parallelism")
    parser.add_argument(
        "--out",
        type=Path,
        default=DOCS,
        metavar="DIR",
        help="the folder whose parallelism.md and picture are written (default: docs)",
    )
    parsed = parser.parse_args(arguments)
    page = parsed.out / "parallelism.md"
    page.write_text(written(page.read_text()))
    draw_who_holds_what(page.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
