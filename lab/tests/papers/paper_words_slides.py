# SPDX-License-Identifier: BSD-3-Clause
"""What lab/papers/README.md must say of the slides: words around numbers of results."""

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
        f"[for 16 buckets](../../benchmarks/results/lsh.md) the error of o falls from {one:.1f} "
        f"with one round to {sixteen:.2f} with 16"
    ]


def sorted_chunks() -> Words:
    lengths = 1024, 4096, 16384, 65536

    def ms(column: str) -> list[str]:
        found = [result("lsh_time", column, tokens=f"{n} tokens") for n in lengths]
        return [f"{x:.1f}" if x < 10 else f"{x:,.0f}" for x in found]

    chunks, everything = ms("sorted chunks ms"), ms("all keys ms")
    return [
        f"it takes {', '.join(chunks)} ms for {', '.join(f'{n:,}' for n in lengths)} tokens, and "
        f"attention to all keys {', '.join(everything)} ms",
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


def waste() -> Words:
    used = [
        result("cache_waste", "used", **{"at once": name})
        for name in (
            "the largest length",
            "the next power of two",
            "the final length, known ahead",
            "blocks of 16",
        )
    ]
    kinds = [
        result("cache_waste", kind, **{"at once": "the largest length"})
        for kind in ("reserved", "internal", "external")
    ]
    return [
        f"{used[0]:.1f} % used where each request gets the largest length ({kinds[0]:.1f} % "
        f"reserved, {kinds[1]:.1f} % internal, {kinds[2]:.1f} % external), {used[1]:.1f} % with "
        f"the next power of two, {used[2]:.1f} % with the final length known ahead, "
        f"{used[3]:.1f} % in blocks of 16",
    ]


def error(method: str, number: int, size: str = "1.0") -> str:
    wanted = {"method": method, "size": size, "features or keys": str(number)}
    return f"{result('survey_errors', 'relative error', **wanted):g}"


def linear() -> Words:
    few, many = (error("positive random features", x) for x in (64, 4096))
    half_few, half_many = (error("positive random features", x, "0.5") for x in (64, 4096))
    one, half = (error("elu(x) + 1", 64, x) for x in ("1.0", "0.5"))
    return [
        "[The error](../../benchmarks/results/survey_errors.md) of o against softmax is "
        f"{few} with 64 positive features and still {many} with 4,096, where scores have the "
        f"deviation 1; with 0.25 {half_few} and {half_many}. `elu(x) + 1` has {one} and {half}"
    ]


def low_rank() -> Words:
    few, many = (error("averages of neighbours", x) for x in (64, 512))
    return [
        f"the [error](../../benchmarks/results/survey_errors.md) is {few} with 64 keys for 1,024 "
        f"tokens that change slowly, and {many} with 512"
    ]


def extrapolation() -> Words:
    table = {row["positions"]: row for row in read_table("positions").rows}
    lengths = [int(name.removesuffix(" bytes")) for name in table["T5"] if name.endswith(" bytes")]
    first, last = min(lengths), max(lengths)

    def change(kind: str) -> str:
        return f"from {table[kind][f'{first} bytes']} to {table[kind][f'{last} bytes']} with"

    return [
        f"trained on {first} bytes, from there to {last} perplexity goes {change('sinusoidal')} "
        f"sinusoidal positions, {change('rotary')} rotary ones, {change('T5')} T5's buckets and "
        f"{change('ALiBi')} ALiBi"
    ]


# By the beginning of the title.
SAYS: dict[str, Callable[[], Words]] = {
    "Traffic": slow_memory,
    "Waste": waste,
    "Reformer: hash": lsh,
    "Reformer: its speed": sorted_chunks,
    "Linear attention": linear,
    "Low rank": low_rank,
    "Sparse patterns": sparse,
    "Positions: perplexity": extrapolation,
}
