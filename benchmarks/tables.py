# SPDX-License-Identifier: BSD-3-Clause
"""Writes the tables of measurements and estimates of README.md and docs/.

    python benchmarks/tables.py

A page has a region for each table, and `TABLES` says what stands there: words, and the cells of
`benchmarks/results` or of the planner that are shown. Run it after a new measurement.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness import regions
from benchmarks.harness.results import number, read_table, value
from benchmarks.pictures import AT_LINE_RATE, contexts
from tree_attention.planning.arithmetic import FORMS, TENSOR, Plan, Split, Work
from tree_attention.planning.machines import LINKS, MACHINES, Hosts
from tree_attention.planning.models import NAMED, Attention

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
WRITER = "benchmarks/tables.py"

Row = list[str]
Values = Sequence[float | None]  # None: was not measured


def figure(x: float) -> str:
    """A number with three significant digits, and with all digits before its point."""
    exponent = math.floor(math.log10(float(f"{x:.2e}")))
    return f"{x:,.{max(0, 2 - exponent)}f}"


def ratio(x: float) -> str:
    text = f"{x:.2f}"
    return text if float(text) < 10 else figure(x)


def best(
    values: Values, text: Callable[[float], str] = figure, better: Callable[..., float] = min
) -> Row:
    """The texts of values, of which the best is bold."""
    first = better(x for x in values if x is not None)
    texts = ["" if x is None else text(x) for x in values]
    return [f"**{text}**" if x == first else text for x, text in zip(values, texts, strict=True)]


def compared(name: str, values: Values) -> Row:
    """Times of this library and of others, and how many times as long these take."""
    ours, *others = values
    assert ours is not None
    return [name, *best(values), *("" if x is None else ratio(x / ours) for x in others)]


def versus(
    name: str, ours: float, *others: tuple[str, float], text: Callable[[float], str] = figure
) -> Row:
    """The time of this library, and those of others with their names in one cell."""
    first, *texts = best([ours, *(x for _, x in others)], text)
    named = (f"{label} {text}" for (label, _), text in zip(others, texts, strict=True))
    return [name, first, ", ".join(named)]


VERSUS = ("tree_attention", "compared with", "times as long")  # columns of `slower`


def slower(
    name: str, ours: float, label: str, theirs: float, text: Callable[[float], str] = figure
) -> Row:
    return [*versus(name, ours, (label, theirs), text=text), ratio(theirs / ours)]


# Attention of one process.

CASES = {
    "B=1 32768": "32k keys from memory",
    "B=1 32768 pages of 128": "32k keys in shuffled pages of 128",
    "B=1 32768 pages of 16": "32k keys in shuffled pages of 16",
    "B=8 ragged 1076-28930": "8 ragged sequences of 1k to 29k keys",
    "B=8 ragged 1076-28930 pages of 128": "8 ragged sequences in pages of 128",
    "B=1 32768 q=8": "8 query tokens, 32k keys",
    "B=1 4096 q=512": "512 query tokens after 3,584 keys",
    "B=1 33280 q=512": "512 query tokens after 32k keys",
    "B=1 2048 q=2048": "2,048 query tokens, no keys before",
    "B=1 512 warm": "512 keys that lie in the processor's cache",
}


def decode(file: str, case: str, *columns: str) -> Values:
    """Milliseconds of `lean_decode` and of others."""
    row = {"case": f"bf16 32/8 d128 {case}"}
    (cells,) = (x for x in read_table(file).rows if row.items() <= x.items())
    texts = (cells[f"{column} us"] for column in ("ours", *columns))
    return [None if text == "-" else number(text) / 1000 for text in texts]


def operator(file: str, name: str, peers: Sequence[str], cases: Sequence[str]) -> list[Row]:
    header = [name, "tree_attention", *peers, *(f"{x} / tree_attention" for x in peers)]
    return [header, *(compared(CASES[x], decode(file, x, *peers)) for x in cases)]


def peers_of_the_operator() -> list[Row]:
    cases = ["B=1 32768", "B=8 ragged 1076-28930", "B=1 32768 pages of 16"]
    cases += ["B=1 33280 q=512", "B=1 2048 q=2048"]
    table = operator("decode_peers_avx512_bf16", "`lean_decode`", ["SGLang", "vLLM"], cases)
    latents = {"case": "bf16 128/1 d576/512 B=1 16384"}
    times = [value("latent_operator", latents, f"{x} ms") for x in ("ours", "SGLang")]
    return [*table, compared("latents of 16k tokens, 128 heads", [*times, None])]


def eight_bits() -> list[Row]:
    header = "keys and values of 8 bits | tree_attention, 8 bits | tree_attention, bf16 | "
    header += "vLLM, bf16 | tree_attention, bf16 / 8 bits | vLLM, bf16 / tree_attention, 8 bits"
    long, ragged = "B=1 32768", "B=8 ragged 1076-28930"
    rows = [
        ("AVX-512 with BF16", "decode_avx512_bf16", "int8", long),
        ("AVX-512 with BF16", "decode_avx512_bf16", "int8", ragged),
        ("AVX-512 with BF16", "decode_avx512_bf16", "float8", long),
        ("AMX", "decode", "int8", long),
        ("AVX-512", "decode_avx512", "int8", long),
        ("AVX-512", "decode_avx512", "float8", long),
        ("AVX2", "decode_avx2", "float8", long),
    ]
    return [
        header.split(" | "),
        *(
            compared(
                f"{processor}: {dtype}, {CASES[case]}",
                decode(file, f"keys {dtype} {case}", "16-bit", "vLLM"),
            )
            for processor, file, dtype, case in rows
        ),
    ]


# Whole models.

TOKEN, PROMPT = "ms /token", "prefill s"
ENGINES = {
    "llama_cpp_flash": "llama.cpp",
    "openvino": "OpenVINO",
    "huggingface": "HuggingFace",
    "vllm": "vLLM",
}


def engine(context: int, name: str, column: str = "decode ms") -> float:
    return value("engines", {"context": str(context), "engine": name}, column)


def llama(method: str) -> float:
    return value("llama", {"context": "65536 tokens", "method": method}, TOKEN)


def tokens_of_engines() -> list[Row]:
    rows = [(4096, "4k", name) for name in ENGINES]
    rows += [(16384, "16k", name) for name in ("openvino", "vllm")]
    return [
        ["time per token, in ms", *VERSUS],
        *(
            slower(
                f"4 of 16 layers, {keys} keys",
                engine(context, "ours"),
                ENGINES[name],
                engine(context, name),
            )
            for context, keys, name in rows
        ),
        *(
            slower(
                "8 of 16 layers, 64k keys",
                llama("tree_attention, world 1"),
                f"HuggingFace's {name}",
                llama(f"sdpa, {name}"),
            )
            for name in ("StaticCache", "DynamicCache")
        ),
    ]


def prompts_of_engines() -> list[Row]:
    rows = [(4096, "4k", x) for x in ("vllm", "openvino", "huggingface", "llama_cpp_flash")]
    rows += [(16384, "16k", x) for x in ("vllm", "openvino")]
    table = [["a prompt, in tokens/s: more is better", *VERSUS[:2], "times as fast as it"]]
    for context, tokens, name in rows:
        rates = [engine(context, x, "prefill tokens/s") for x in ("ours", name)]
        first, second = best(rates, better=max)
        times = ratio(rates[0] / rates[1])
        table.append([f"{tokens} tokens", first, f"{ENGINES[name]} {second}", times])
    return table


def serving() -> list[Row]:
    def row(
        name: str, batch: int, ours: str, theirs: str, label: str, context: int = 4096
    ) -> list[str]:
        cells = {"context": str(context), "batch": str(batch)}
        times = [
            value("serving", {**cells, "engine": x}, "between tokens ms") for x in (ours, theirs)
        ]
        return slower(f"{context // 1024}k tokens{name}", times[0], label, times[1])

    def blocks(ours: int = 128, theirs: int = 128) -> tuple[str, str, str]:
        own = "vLLM's own attention"
        return f"ours, blocks of {ours}", f"vllm, blocks of {theirs}", own

    smallest = ", vLLM's own attention with its smallest blocks of 32"
    split, heads = "ours, TP 2, DCP 2", ("ours, TP 2", "heads split alone")
    two = ", two processes: context split (DCP 2)"
    return [
        ["time between tokens, in ms", *VERSUS],
        row(": one request", 1, *blocks()),
        row(": 8 requests", 8, *blocks()),
        row(": 8 requests, blocks of 32", 8, *blocks(32, 32)),
        row(": 32 requests", 32, *blocks()),
        row(": 32 requests, blocks of 32", 32, *blocks(32, 32)),
        row(f": 32 requests, blocks of 16{smallest}", 32, *blocks(16, 32)),
        row(f": one request, blocks of 16{smallest}", 1, *blocks(16, 32)),
        row(": one request", 1, *blocks(), context=16384),
        row(": 8 requests", 8, *blocks(), context=16384),
        row(": one request", 1, *blocks(), context=65536),
        row(f"{two}, one request", 1, split, *heads),
        row(f"{two}, 8 requests", 8, split, *heads),
        row(f"{two}, 32 requests", 32, split, *heads),
        row(f"{two}, one request", 1, split, *heads, context=16384),
    ]


def sums() -> list[Row]:
    def row(file: str, name: str, kib: int, way: str) -> Row:
        times = [value(file, {"KiB": str(kib), "way": x}, "us") for x in ("ours", way)]
        return slower(name, times[0], way, times[1], "{:,.0f}".format)

    link = "two emulated hosts, 0.1 ms, 10 Gb/s"
    return [
        ["an all-reduce, in us", *VERSUS],
        row("groups_hosts", f"4 KiB, {link}", 4, "Gloo"),
        row("groups_hosts", f"64 KiB, {link}", 64, "Gloo"),
        row("groups_hosts", f"4 MiB, {link}", 4096, "Gloo"),
        row("groups", "4 KiB, one host", 4, "vLLM's shared memory"),
    ]


FAST, SLOW = "0.1ms,10gbit", "1ms,1gbit"
OURS_ON_TWO, VLLM_ON_TWO, VLLM_ON_ONE = "ours, two hosts", "vllm, two hosts", "vllm, one host"
SPLIT_ON_TWO = f"{OURS_ON_TWO}, DCP 2"


def on_hosts(link: str, name: str, column: str = "between tokens ms") -> float:
    return value("two_hosts", {"link": link, "engine": name}, column)


def two_hosts() -> list[Row]:
    places = {FAST: "0.1 ms, 10 Gb/s", SLOW: "1 ms, 1 Gb/s"}

    def row(link: str, name: str, label: str, theirs: str, ours: str = OURS_ON_TWO) -> Row:
        column = f"between tokens{' of streams' if name.startswith(several) else ''} ms"
        times = (on_hosts(link, x, column) for x in (ours, theirs))
        return slower(f"{places[link]}: {name}", next(times), label, next(times))

    one, several, too = "one request", "several streams", ", the context split too (DCP 2)"
    own, alone = "vLLM's own", "vLLM's own on one host of one processor"
    split, heads = one + too, f"{own}, heads split alone"
    return [
        ["time between tokens, two emulated hosts, in ms", *VERSUS],
        row(FAST, one, own, VLLM_ON_TWO),
        row(FAST, several, own, VLLM_ON_TWO),
        row(FAST, split, heads, VLLM_ON_TWO, SPLIT_ON_TWO),
        row(FAST, one, alone, VLLM_ON_ONE),
        row(SLOW, one, own, VLLM_ON_TWO),
        row(SLOW, one, alone, VLLM_ON_ONE),
        row(SLOW, split, heads, VLLM_ON_TWO, SPLIT_ON_TWO),
        row(SLOW, split, alone, VLLM_ON_ONE, SPLIT_ON_TWO),
        row(SLOW, several, own, VLLM_ON_TWO),
        row(SLOW, several + too, heads, VLLM_ON_TWO, SPLIT_ON_TWO),
    ]


def vllm_on_links() -> list[Row]:
    links = {FAST: "10 Gb/s, delay of 0.1 ms", SLOW: "1 Gb/s, delay of 1 ms"}
    names = (VLLM_ON_ONE, VLLM_ON_TWO, OURS_ON_TWO, SPLIT_ON_TWO)
    return [
        [
            *("link", "vLLM alone, one host", "vLLM alone, two hosts"),
            "with the plug-in, two hosts",
            "with the plug-in and `--decode-context-parallel-size 2`",
        ],
        *(
            [name, *best([on_hosts(link, x) for x in names], lambda x: f"{figure(x)} ms")]
            for link, name in links.items()
        ),
    ]


# Two ranks.

ONE, TWO = "1 process, 1 thread", "1 process, 2 threads"
BY_HEADS = "weights split, tensor_parallel_size 2"
BY_TOKENS = "weights split, tensor_parallel_size 1"
REPLICATED = "weights whole, prompt split"


def scaling(column: str, place: str, form: str, file: str = "scaling") -> float:
    return value(file, {"place/ranks": place, "form": form}, column)


def two_ranks() -> list[Row]:
    others = {ONE: "one rank of one thread", TWO: "one process of two threads"}
    units = {TOKEN: "ms per token", PROMPT: "prompt, seconds"}
    places = {"bare/2": "two ranks", "lan/2": "two emulated hosts, 0.1 ms, 10 Gb/s"}
    rows = [("bare/2", ONE), ("bare/2", TWO), ("lan/2", ONE)]
    return [
        ["split weights, T = 2", *VERSUS],
        *(
            slower(
                f"{places[place]}: {units[column]}",
                scaling(column, place, BY_HEADS),
                others[form],
                scaling(column, "bare/1", form),
            )
            for place, form in rows
            for column in (TOKEN, PROMPT)
        ),
    ]


def speed_up(column: str, place: str, form: str, file: str = "scaling", suffix: str = "") -> float:
    """How many times as fast as one process of one thread."""
    one = scaling(column, "bare/1", ONE + suffix, file)
    return one / scaling(column, place, form + suffix, file)


def forms_of_two_ranks() -> list[Row]:
    forms = {
        BY_HEADS: "two ranks, split weights, T = 2",
        BY_TOKENS: "two ranks, split weights, T = 1",
        REPLICATED: "two ranks, replicated weights, split prompt",
    }
    columns = [(column, place) for place in ("bare/2", "lan/2") for column in (PROMPT, TOKEN)]
    threads = [ratio(speed_up(column, "bare/1", TWO)) for column in (PROMPT, TOKEN)]
    places = [
        f"{what}, {where}"
        for where in ("one machine", "two emulated hosts")
        for what in ("prompt", "new token")
    ]
    return [
        ["what runs", *places],
        *(
            [name, *(ratio(speed_up(column, place, form)) for column, place in columns)]
            for form, name in forms.items()
        ),
        ["one process with two threads", *threads, "", ""],
    ]


def shapes_of_models() -> list[Row]:
    names = {
        "llama-3.2-1b": "Llama 3.2 1B, 16",
        "qwen3-30b-a3b": "Qwen3-30B-A3B, 4 of 48",
        "gpt-oss-20b": "GPT-OSS-20B, 2 of 24",
        "deepseek-v2-lite": "DeepSeek-V2-Lite, 4 of 27",
    }
    things = {
        "prompt": (PROMPT, ""),
        "token": (TOKEN, ""),
        "token in int8": (TOKEN, ", int8"),
        "token in int4": (TOKEN, ", int4"),
    }

    def cell(file: str, column: str, suffix: str) -> str:
        runs = (("bare/2", BY_HEADS), ("bare/1", TWO))
        gains = [speed_up(column, place, form, file, suffix) for place, form in runs]
        return ", ".join(best(gains, ratio, max))

    return [
        ["shape, layers", *(f"{thing}: ranks, threads" for thing in things)],
        *(
            [
                f"[{name}](../benchmarks/results/scaling_{file}.md)",
                *(cell(f"scaling_{file}", *thing) for thing in things.values()),
            ]
            for file, name in names.items()
        ),
    ]


def engines_with_small_weights() -> list[Row]:
    """Both rounds; bold is what was better in either than all others in both."""
    engines = {
        "16 bits": ("ours", "vllm", "openvino", "llama_cpp_flash"),
        "int8": ("ours_int8", "vllm_w8a8", "openvino_int8", "llama_cpp_q8_0"),
        "int4": ("ours_int4", None, "openvino_int4", "llama_cpp_q4_0"),
    }
    columns = {
        "ms per token": ("decode ms", min),
        "a prompt in tokens/s": ("prefill tokens/s", max),
    }
    measured = {row["engine"]: row for row in read_table("engines_weights").rows}
    table = [["weights, what was timed", "tree_attention", "vLLM", "OpenVINO", "llama.cpp"]]
    for what, (column, better) in columns.items():
        for bits, names in engines.items():
            texts = ["" if x is None else measured[x][column] for x in names]
            rounds = [[float(x) for x in re.findall(r"[\d.]+", text)] for text in texts]
            # The rounds of an engine are in order of their times, not of their runs.
            (first, *others) = sorted(filter(None, rounds), key=better, reverse=better is max)
            is_best = all(better(x, y) == x != y for z in others for x in first for y in z)
            marked = [
                f"**{text}**" if is_best and x == first else text
                for text, x in zip(texts, rounds, strict=True)
            ]
            table.append([f"{bits}, {what}", *marked])
    return table


# More ranks.

ON_EIGHT = "metro p=8 B=1 n=65536"
TREE, PASS_Q = "auto: two_phase", "ring, passing queries"


def method(file: str, case: str, name: str, column: str = "ms", unit: int = 1) -> float:
    return value(file, {"case": case, "method": name}, column, unit)


def line_rate() -> float:
    """Milliseconds of the ring of 64k keys on 8 hosts, at the full rate of their links."""
    return contexts()["metro p=8"][AT_LINE_RATE][-1][1]


def rings() -> list[Row]:
    def row(file: str, name: str, ours: float, label: str, theirs: float) -> Row:
        return [*slower(name, ours, label, theirs), f"[{file}](../benchmarks/results/{file}.md)"]

    eight, tree = "8 emulated hosts, 1 ms, 1 Gb/s", method("contexts", ON_EIGHT, TREE)
    steps = {
        "pass-Q": method("contexts", ON_EIGHT, PASS_Q),
        "ring at line rate": line_rate(),
        "ring as measured": method("contexts", ON_EIGHT, "ring"),
    }
    two, four = "bf16 32/8 d128 B=1 65536", "metro p=4 L=32768"
    of_two = [method("tree_2", two, x, "us", 1000) for x in ("auto", "ring")]
    of_four = [method("generation", four, x, TOKEN) for x in ("tree", "ring")]
    exchange = [
        method("cluster_metro", "metro p=8 B=1 n=256", x) for x in ("butterfly", "tree_allreduce")
    ]
    return [
        ["a step, in ms", *VERSUS, "from"],
        *(row("contexts", f"{eight}, 64k keys each", tree, *x) for x in steps.items()),
        row("tree_2", "two processes on two cores, 64k keys", of_two[0], "ring", of_two[1]),
        row(
            *("cluster_metro", f"the exchange alone on {eight}", exchange[0]),
            *("the paper's algorithm, `tree_allreduce`", exchange[1]),
        ),
        row(
            "generation",
            "a token on 4 emulated hosts, 1 ms, 1 Gb/s, 4 layers, 32k keys in all",
            *(of_four[0], "ring", of_four[1]),
        ),
    ]


def memory_of_a_step() -> list[Row]:
    def held(name: str) -> float:
        return method("memory", "p=4 n=131072", name, "allocated bytes")

    names, ring = ("two_phase", "all_gather"), held("ring")
    return [
        [
            *("what a rank holds", *(f"`{x}`" for x in names), "ring"),
            *(f"ring / `{x}`" for x in names),
        ],
        [
            *("bytes", *(f"{held(x):,.0f}" for x in names), f"{ring:,.0f}"),
            *(ratio(ring / held(x)) for x in names),
        ],
    ]


def strategies() -> list[Row]:
    import torch

    from tree_attention.exchange.strategies import STRATEGIES, StateLayout, Topology

    of_messages = "Algorithm 3 by messages of this library, log₂ p steps for each all-reduce"
    names = {
        "all_gather": "`all_gather`",
        "two_phase": "`two_phase`",
        "butterfly": "`butterfly`",
        "tree_allreduce": of_messages,
        "three_allreduce": "`three_allreduce`, Algorithm 3 over Gloo",
    }
    cases = ("metro p=8 B=1 n=256", "metro p=8 B=64 n=4")
    times = [best([method("cluster_metro", case, name) for name in names]) for case in cases]
    header = "strategy | steps | messages | kB, one sequence | kB, 64 sequences | "
    header += "ms, one sequence | ms, 64 sequences"
    table = [header.split(" | ")]
    for (name, words), *ms in zip(names.items(), *times, strict=True):
        if name in STRATEGIES:
            layout, topology = StateLayout((64, 32, 1), 128, torch.float32), Topology.of("abcdefgh")
            steps = STRATEGIES[name].traffic(layout, topology, torch.bfloat16, False).steps
        else:
            steps = int(method("cluster_metro", cases[0], name, "rounds"))
        # A rank sends to all others in a step, or to one.
        messages = steps * (7 if name in ("all_gather", "two_phase") else 1)
        kb = (figure(method("cluster_metro", x, name, "bytes sent", 1000)) for x in cases)
        table.append([words, str(steps), str(messages), *kb, *ms])
    return table


def merges() -> list[Row]:
    table = [["ranks, each on a host of its own", "one merge"]]
    for row in read_table("cluster").rows:
        found = re.fullmatch(r"lan p=(\d+) B=1 n=256", row["case"])
        if found and row["method"].startswith("auto: "):
            table.append([found[1], f"{1000 * number(row['ms']):,.0f} µs"])
    return table


def deterministic() -> list[Row]:
    names = {"None": "without", "4096": "in blocks of 4096", "1024": "in blocks of 1024"}
    return [
        ["`deterministic`", "one rank, two threads", "two ranks of one thread"],
        *(
            [
                name,
                *(
                    figure(value(f"deterministic_{ranks}", {"deterministic": row}, "ms"))
                    for ranks in (1, 2)
                ),
            ]
            for name, row in names.items()
        ),
    ]


# README.md: a row of each kind.


def front_page() -> list[Row]:
    def row(name: str, ours: float, *others: tuple[str, float]) -> Row:
        return versus(name, ours, *others, text=lambda x: f"{figure(x)} ms")

    file, labels = "decode_avx512", ("vLLM", "SDPA")
    ours, *peers = (x for x in decode(file, "B=1 32768", *labels) if x is not None)
    hosts = [on_hosts(FAST, x) for x in (OURS_ON_TWO, VLLM_ON_TWO, VLLM_ON_ONE)]
    short = "one new token, 4 layers, 16k cached tokens"
    return [
        ["What was timed", "tree_attention", "others"],
        row(
            "attention for one new token, 32k cached tokens",
            ours,
            *zip(("vLLM", "PyTorch SDPA"), peers, strict=True),
        ),
        row(
            short,
            engine(16384, "ours"),
            *((ENGINES[x], engine(16384, x)) for x in ("vllm", "openvino")),
        ),
        row(
            "one new token, 8 layers, 64k cached tokens",
            llama("tree_attention, world 1"),
            ("HuggingFace StaticCache", llama("sdpa, StaticCache")),
            ("DynamicCache", llama("sdpa, DynamicCache")),
        ),
        row(
            f"{short}, two ranks of one thread each",
            scaling(TOKEN, "bare/2", BY_HEADS),
            ("one rank of one thread", scaling(TOKEN, "bare/1", ONE)),
            ("one rank of two threads", scaling(TOKEN, "bare/1", TWO)),
        ),
        row(
            "one new token of vLLM's engine on two hosts, with our plug-in",
            hosts[0],
            ("vLLM's own attention and exchange on two hosts", hosts[1]),
            ("on one host of one core", hosts[2]),
        ),
        row(
            "one attention step on 8 hosts, 64k tokens on each",
            method("contexts", ON_EIGHT, TREE),
            ("queries passed around a ring", method("contexts", ON_EIGHT, PASS_Q)),
            ("keys passed around a ring", line_rate()),
        ),
    ]


# Estimates.

CPU_HOSTS = Hosts(MACHINES["cpu"], LINKS["10gbe"])


def token_ms(split: Split, hosts: Hosts = CPU_HOSTS) -> float:
    return 1e3 * split.token_seconds(hosts).total


def prompt_seconds(split: Split, hosts: Hosts = CPU_HOSTS) -> float:
    return split.prefill_seconds(hosts).total


def plan_of(model: str, context: int, ranks: int) -> Plan:
    return Plan(NAMED[model], CPU_HOSTS, ranks, Work(context))


def fastest(plan: Plan) -> Split:
    form = plan.best()
    assert form is not None
    return plan.split(form)


def hosts_of_glm() -> list[Row]:
    def times(split: Split | None) -> Row:
        if split is None:
            return ["not possible", "not possible"]
        return [f"{token_ms(split):.0f} ms", f"{prompt_seconds(split) / 60:.1f} minutes"]

    header = "hosts | weights and cache on each host | time per new token | "
    header += "new token by tensor parallelism alone | time to read the prompt | "
    header += "prompt by tensor parallelism alone"
    table = [header.split(" | ")]
    for ranks in (1, 2, 4, 8):
        plan = plan_of("glm-4.7-flash", 192 << 10, ranks)
        split = fastest(plan)
        tensor = None if plan.refusal(TENSOR) else plan.split(TENSOR)
        columns = zip(times(split), times(tensor), strict=True)
        held = f"{split.held_bytes / 1e9:.1f} GB"
        table.append([str(ranks), held, *(text for both in columns for text in both)])
    return table


def heads_or_tokens() -> list[Row]:
    """Splitting by heads next to the fastest way to split tokens."""
    rows = [("glm-4.7-flash", 192, 2), ("qwen3-30b-a3b", 256, 8)]
    rows += [("llama-3.1-8b", 1024, 16), ("llama-3.1-8b", 128, 2)]
    header = "model and context | KV heads | hosts | cache on each host, heads split | "
    header += "cache on each host, tokens split | new token, heads split | new token, tokens split"
    table = [header.split(" | ")]
    for name, thousands, ranks in rows:
        plan = plan_of(name, thousands << 10, ranks)
        splits = [plan.split(form) for form in FORMS]
        by_tokens = [x for x in splits if x.tensor_parallel_size < ranks]
        both = [plan.split(TENSOR), min(by_tokens, key=token_ms)]
        latent = " latent" if any(x.latent for x in plan.model.attention) else ""
        table.append(
            [
                f"{plan.model.name}, {thousands:,}k tokens",
                f"{plan.model.kv_heads}{latent}",
                str(ranks),
                *(f"{x.cache_bytes / 1e9:.1f} GB" for x in both),
                *best([token_ms(x) for x in both], lambda ms: f"{ms:.0f} ms"),
            ]
        )
    return table


def two_servers() -> list[Row]:
    header = "servers | context | weights on each server | cache on each server | "
    header += "reading the prompt | time per new token"
    table = [header.split(" | ")]
    for context in (32 << 10, 128 << 10):
        for servers in (1, 2):
            plan = plan_of("llama-3.1-8b", context, servers)
            split = fastest(plan)
            table.append(
                [
                    *(str(servers), f"{context:,} tokens"),
                    *(f"{figure(x / 1e9)} GB" for x in (split.weights_bytes, split.cache_bytes)),
                    *(f"{figure(prompt_seconds(split))} s", f"{figure(token_ms(split))} ms"),
                ]
            )
    return table


def two_servers_in_8_bits() -> list[Row]:
    model = NAMED["llama-3.1-8b"]
    small = replace(model, kv_dtype="int8", weights=model.weights.quantised("int8"))
    dtypes = {
        "": ("bfloat16", model),
        'kv_dtype="int8", weights="int8"': ("8 bits and scales", small),
    }
    header = "servers | arguments | weights and cache | memory of each server, 131,072 tokens | "
    header += "time per new token"
    table = [header.split(" | ")]
    for servers in (1, 2):
        for arguments, (words, shape) in dtypes.items():
            plan = replace(plan_of("llama-3.1-8b", 128 << 10, servers), model=shape)
            split = fastest(plan)
            given = ["tensor_parallel_size=2"] * (servers - 1) + [arguments] * bool(arguments)
            table.append(
                [
                    *(str(servers), f"`{', '.join(given)}`" if given else "none", words),
                    f"{figure(split.held_bytes / 1e9)} GB",
                    f"{figure(token_ms(split))} ms",
                ]
            )
    return table


# Bytes of caches.


def bytes_of_a_token() -> list[Row]:
    """Half of what a layer with one head of keys and one of values keeps."""
    what = {
        "bf16": ("`None`", "the model's dtype: 2d bytes in 16 bits"),
        "int8": ('`"int8"`', "d bytes and a float32 scale"),
        "fp8": ('`"fp8"`', "d bytes (float8_e4m3fn) and a float32 scale"),
    }
    heads = [Attention(1, 1, 1, columns, columns) for columns in (64, 128)]
    header = "`kv_dtype` | a key or value of `head_dim` d | bytes at d = 64 | bytes at d = 128 | "
    header += "compared with bfloat16 at d = 64 | compared with bfloat16 at d = 128"
    table = [header.split(" | ")]
    for dtype, words in what.items():
        found = [x.token_bytes(dtype) for x in heads]
        shares = [x.token_bytes(dtype) / x.token_bytes("bf16") for x in heads]
        table.append([*words, *(f"{x / 2:.0f}" for x in found), *(f"{x:.2f}" for x in shares)])
    return table


def bytes_with_windows() -> list[Row]:
    """Gemma 3 1B: 26 layers, 22 of them with a window of 512, and one head of 256."""
    from tree_attention.hf.cache.window import MARGIN, STEP

    slot = Attention(1, 1, 1, 256, 256).token_bytes("bf16") / 1e6
    table = [["tokens", "ranks", "if all keys were kept", "at most kept", "share"]]
    for tokens in (8 << 10, 128 << 10):
        for ranks in (1, 2):
            every = 26 * tokens / ranks * slot
            kept = (4 * tokens / ranks + 22 * ((512 + MARGIN) / ranks + STEP)) * slot
            held = (f"{every:,.1f}", f"{kept:.1f}", f"{100 * kept / every:.0f} %")
            table.append([f"{tokens:,}", str(ranks), *held])
    return table


def bytes_of_latents() -> list[Row]:
    latent = Attention(1, 128, 1, 192, 128, latent=(512, 64))
    eight = "8 bits: 576 bytes and a scale of 4 bytes, and 4 bytes that are allocated and unused"
    rows = {
        "16 bits, for any number of heads": latent.token_bytes("bf16"),
        eight: latent.token_bytes("int8"),
        "for comparison, keys and values of 128 heads in 16 bits": Attention(
            1, 128, 128, 192, 128
        ).token_bytes("bf16"),
    }
    header = ["row of 512 + 64 columns", "bytes per token and layer"]
    return [header, *([name, f"{found:,.0f}"] for name, found in rows.items())]


def of_processor(file: str, name: str, *cases: str) -> Callable[[], list[Row]]:
    return lambda: operator(file, name, ["vLLM", "SDPA"], cases)


RAGGED, PAGES_OF_16 = "B=8 ragged 1076-28930", "B=1 32768 pages of 16"
PREFILL = "B=1 2048 q=2048"

TABLES: dict[str, Callable[[], list[Row]]] = {
    "plan": hosts_of_glm,
    "heads or tokens": heads_or_tokens,
    "front page": front_page,
    "AVX-512 with BF16": of_processor(
        *("decode_avx512_bf16", "`lean_decode`", "B=1 32768", "B=1 32768 pages of 128"),
        *(PAGES_OF_16, RAGGED, f"{RAGGED} pages of 128", "B=1 32768 q=8", PREFILL, "B=1 512 warm"),
    ),
    "peers": peers_of_the_operator,
    "AMX": of_processor(
        *("decode", "`lean_decode` with AMX", "B=1 32768", PAGES_OF_16, RAGGED, PREFILL),
        "B=1 512 warm",
    ),
    "AVX-512": of_processor(
        *("decode_avx512", "`lean_decode` with AVX-512", "B=1 32768", PAGES_OF_16, RAGGED),
        *("B=1 32768 q=8", "B=1 4096 q=512", PREFILL, "B=1 512 warm"),
    ),
    "AVX2": of_processor(
        *("decode_avx2", "`lean_decode` with AVX2", "B=1 32768", PAGES_OF_16, RAGGED),
        *("B=1 4096 q=512", "B=1 512 warm"),
    ),
    "8 bits": eight_bits,
    "tokens of engines": tokens_of_engines,
    "prompts of engines": prompts_of_engines,
    "serving": serving,
    "sums": sums,
    "vLLM on two hosts": two_hosts,
    "two ranks": two_ranks,
    "rings": rings,
    "memory of a step": memory_of_a_step,
    "forms of two ranks": forms_of_two_ranks,
    "shapes of models": shapes_of_models,
    "engines with small weights": engines_with_small_weights,
    "strategies": strategies,
    "merges": merges,
    "deterministic": deterministic,
    "vLLM on links": vllm_on_links,
    "two servers": two_servers,
    "two servers in 8 bits": two_servers_in_8_bits,
    "bytes of a token": bytes_of_a_token,
    "bytes with windows": bytes_with_windows,
    "bytes of latents": bytes_of_latents,
}


def markdown(rows: list[Row]) -> str:
    """A table in which columns of numbers are aligned to the right."""
    header, *body = rows
    a_number = re.compile(r"(\*\*)?\d\S*( (?!tokens$)\S+)?|not possible|")
    rules = [
        "---:" if all(a_number.fullmatch(cell) for cell in column) else "---"
        for column in zip(*body, strict=True)
    ]
    lines = ([f" {x} " if x else " " for x in line] for line in (header, rules, *body))
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def names_of(page: str) -> list[str]:
    """The tables of a page."""
    return re.findall(regions.mark(f"{WRITER}: (.*)"), page)


def written(page: str) -> str:
    """Return a page with the tables of today's results."""
    for name in names_of(page):
        page = regions.written(page, f"{WRITER}: {name}", markdown(TABLES[name]()))
    return page


def main(arguments: list[str]) -> int:
    description = "Writes the tables of README.md and docs/ from benchmarks/results."
    argparse.ArgumentParser(prog=WRITER, description=description).parse_args(arguments)
    for page in PAGES:
        page.write_text(written(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
