# SPDX-License-Identifier: BSD-3-Clause
"""What docs/papers.md must say of the slides: words around numbers, made of the results."""

from collections.abc import Callable

from benchmarks.harness.results import number, read_table
from paper_results import Words, result


def slow_memory() -> Words:
    table = read_table("slow_memory").rows
    assert len(table) == 8
    times = [number(row["/ N2d2/M"]) for row in table]
    return [f"for eight shapes: {min(times):.1f} to {max(times):.1f} times"]


def lsh() -> Words:
    one, sixteen = (result("lsh", "relative error", buckets="16", rounds=x) for x in ("1", "16"))
    return [
        f"[for 16 buckets](../benchmarks/results/lsh.md) the error of o falls from {one:.1f} with "
        f"one round to {sixteen:.2f} with 16"
    ]


def sparse() -> Words:
    first, window, blocks = (
        f"B=1 65536 {x}"
        for x in ("first 4, window 2044", "window 4096", "every eighth block of 64")
    )

    def ms(case: str, column: str = "ours us") -> float:
        return result("sparse", column, case=case) / 1000

    seen = {case: result("sparse", "keys", case=case) for case in (first, window)}
    return [
        f"all 65,536 take {ms(first, 'all keys us'):.1f} ms, a window of {seen[window]} % "
        f"{ms(window):.2f} ms, first tokens and a window of {seen[first]} % {ms(first):.2f} ms; an "
        f"eighth of them in blocks of 64 {ms(blocks):.2f} ms as ranges and "
        f"{ms(blocks, 'page list us'):.2f} ms as a list of pages"
    ]


# By the beginning of the title.
SAYS: dict[str, Callable[[], Words]] = {
    "Traffic": slow_memory,
    "Reformer": lsh,
    "Sparse patterns": sparse,
}
