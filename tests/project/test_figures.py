# SPDX-License-Identifier: BSD-3-Clause
"""The figures in tables of measurements are those of benchmarks/results.

`PAGES` says for every row of these tables, in order, which cells of which results it shows: our
value, the others', and then how many times as long these take. After a new measurement the failing
row says what it should show. Words, and the order of columns of words, are free.
"""

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from benchmarks.harness.results import number, read_table
from benchmarks.pictures import AT_LINE_RATE, contexts

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.])")


def value(file: str, row: dict[str, str], column: str, unit: float = 1) -> float:
    """Return a cell of benchmarks/results/FILE.md, of the only row with these cells."""
    found = [x for x in read_table(file).rows if row.items() <= x.items()]
    assert len(found) == 1, f"{file}.md has {len(found)} rows with {row}"
    return number(found[0][column]) / unit


def decode(case: str, *columns: str, file: str = "decode_avx512_bf16") -> list[float]:
    cells = {"case": f"bf16 32/8 d128 {case}"}
    return slower([value(file, cells, f"{column} us", 1000) for column in ("ours", *columns)])


def decode_peers(case: str, *columns: str) -> list[float]:
    return decode(case, *columns, file="decode_peers_avx512_bf16")


def latents(heads: int, *columns: str) -> list[float]:
    cells = {"case": f"bf16 {heads}/1 d576/512 B=1 16384"}
    return slower([value("latent_operator", cells, f"{x} ms") for x in ("ours", *columns)])


def decode_amx(case: str, *columns: str) -> list[float]:
    return decode(case, *columns, file="decode")


def decode_avx512(case: str, *columns: str) -> list[float]:
    return decode(case, *columns, file="decode_avx512")


def decode_avx2(case: str, *columns: str) -> list[float]:
    return decode(case, *columns, file="decode_avx2")


def engines(context: int, *names: str, column: str = "decode ms") -> list[float]:
    return [value("engines", {"context": str(context), "engine": x}, column) for x in names]


def llama(*methods: str) -> list[float]:
    names = ("tree_attention, world 1", *methods)
    return [value("llama", {"context": "65536 tokens", "method": x}, "ms /token") for x in names]


def serving(batch: int, ours: str, other: str, context: int = 4096) -> list[float]:
    cells = {"context": str(context), "batch": str(batch)}
    found = [value("serving", {**cells, "engine": x}, "between tokens ms") for x in (ours, other)]
    return slower(found)


def sums(file: str, kib: int, other: str) -> list[float]:
    return slower([value(file, {"KiB": str(kib), "way": x}, "us") for x in ("ours", other)])


def two_hosts(link: str, ours: str, other: str, column: str = "between tokens ms") -> list[float]:
    return slower([value("two_hosts", {"link": link, "engine": x}, column) for x in (ours, other)])


def scaling(column: str, ours: str, form: str) -> list[float]:
    rows = {"place/ranks": ours, "form": SPLIT}, {"place/ranks": "bare/1", "form": form}
    return [value("scaling", row, column) for row in rows]


def methods(file: str, case: str, *names: str, column: str = "ms", unit: int = 1) -> list[float]:
    return [value(file, {"case": case, "method": x}, column, unit) for x in names]


TOKEN, PROMPT = "ms /token", "prefill s"
ONE, TWO = "1 process, 1 thread", "1 process, 2 threads"
SPLIT = "weights split, tensor_parallel_size 2"
REPLICATED = "weights whole, prompt split"
LAN, OURS_ON_TWO, VLLM_ON_TWO = "0.1ms,10gbit", "ours, two hosts", "vllm, two hosts"
HOSTS = "metro p=8 B=1 n=65536"
LEVELS = round(math.log2(8))
TREE, PASS_Q = "auto: two_phase", "ring, passing queries"
DYNAMIC, STATIC = "sdpa, DynamicCache", "sdpa, StaticCache"
RAGGED = "B=8 ragged 1076-28930"


def line_rate() -> float:
    """Return ms of the ring of 64k keys on 8 hosts at line rate, from the notes of contexts.md."""
    return contexts()["metro p=8"][AT_LINE_RATE][-1][1]


def slower(values: list[float]) -> list[float]:
    """Append how many times as long the others take as ours, the first."""
    return values + [x / values[0] for x in values[1:]]


def fewer(values: list[float]) -> list[float]:
    """Append how many times as many tokens a second ours has, the first."""
    return values + [values[0] / x for x in values[1:]]


def step(*names: str) -> list[float]:
    return methods("contexts", HOSTS, TREE, *names)


def memory() -> list[float]:
    names = ("two_phase", "all_gather", "ring")
    ours, gather, ring = methods("memory", "p=4 n=131072", *names, column="allocated bytes")
    return [ours, gather, ring, ring / ours, ring / gather]


def prompts(context: int, name: str) -> list[float]:
    return fewer(engines(context, "ours", name, column="prefill tokens/s"))


def speed_up(
    ours: str, file: str = "scaling", suffix: str = "", place: str = "bare/2"
) -> list[float]:
    """How many times as fast prompts and new tokens are as in one process of one thread."""
    row = {"place/ranks": "bare/1" if ours == TWO else place, "form": ours + suffix}
    one = {"place/ranks": "bare/1", "form": ONE + suffix}
    return [value(file, one, x) / value(file, row, x) for x in (PROMPT, TOKEN)]


def shape(name: str) -> list[float]:
    """Ranks and threads: the prompt, then the token in 16, 8 and 4 bits."""
    times = [
        [speed_up(form, f"scaling_{name}", suffix) for form in (SPLIT, TWO)]
        for suffix in ("", ", int8", ", int4")
    ]
    return [x[0] for x in times[0]] + [x[1] for both in times for x in both]


def strategy(name: str, steps: int, messages: int) -> list[float]:
    """Of 8 hosts: steps and messages, which follow from the number of hosts, then kB of the rank
    that sends most, and ms, of one sequence and of 64."""
    cases = [f"metro p=8 B={batch} n={n}" for batch, n in ((1, 256), (64, 4))]
    columns = ("bytes sent", 1e3), ("ms", 1)
    return [steps, messages] + [
        value("cluster_metro", {"case": case, "method": name}, column, unit)
        for column, unit in columns
        for case in cases
    ]


def merge_of(ranks: int) -> list[float]:
    """us of the merge of one sequence by the strategy that auto takes."""
    case = f"lan p={ranks} B=1 n=256"
    rows = [x for x in read_table("cluster").rows if x["case"] == case]
    (ms,) = (x["ms"] for x in rows if x["method"].startswith("auto: "))
    return [1e3 * number(ms)]


def quantised(dtype: str, column: str) -> list[float]:
    names = {
        "": ("ours", "vllm", "openvino", "llama_cpp_flash"),
        "int8": ("ours_int8", "vllm_w8a8", "openvino_int8", "llama_cpp_q8_0"),
        "int4": ("ours_int4", "openvino_int4", "llama_cpp_q4_0"),
    }
    return [value("engines_weights", {"engine": x}, column) for x in names[dtype]]


Rows = list[Callable[[], list[float]]]

PAGES: dict[str, Rows] = {
    "README.md": [
        lambda: decode_avx512("B=1 32768", "vLLM", "SDPA")[:3],
        lambda: engines(16384, "ours", "vllm", "openvino"),
        lambda: llama(STATIC, DYNAMIC),
        lambda: [*scaling(TOKEN, "bare/2", ONE), scaling(TOKEN, "bare/2", TWO)[1]],
        lambda: [
            *two_hosts(LAN, OURS_ON_TWO, VLLM_ON_TWO)[:2],
            two_hosts(LAN, OURS_ON_TWO, "vllm, one host")[1],
        ],
        lambda: [*step(PASS_Q), line_rate()],
    ],
    "docs/measured.md": [
        lambda: decode("B=1 32768", "vLLM", "SDPA"),
        lambda: decode("B=1 32768 pages of 128", "vLLM"),
        lambda: decode("B=1 32768 pages of 16", "vLLM"),
        lambda: decode(RAGGED, "vLLM", "SDPA"),
        lambda: decode(f"{RAGGED} pages of 128", "vLLM"),
        lambda: decode("B=1 32768 q=8", "vLLM", "SDPA"),
        lambda: decode("B=1 2048 q=2048", "vLLM", "SDPA"),
        lambda: decode("B=1 512 warm", "vLLM", "SDPA"),
        lambda: decode("keys int8 B=1 32768", "16-bit", "vLLM"),
        lambda: decode(f"keys int8 {RAGGED}", "16-bit", "vLLM"),
        lambda: decode("keys float8 B=1 32768", "16-bit", "vLLM"),
        *(
            lambda case=case: decode_peers(case, "SGLang", "vLLM")
            for case in (
                *("B=1 32768", RAGGED, "B=1 32768 pages of 16"),
                *("B=1 33280 q=512", "B=1 2048 q=2048"),
            )
        ),
        lambda: latents(128, "SGLang"),
        lambda: decode_amx("B=1 32768", "vLLM", "SDPA"),
        lambda: decode_amx("B=1 32768 pages of 16", "vLLM"),
        lambda: decode_amx(RAGGED, "vLLM", "SDPA"),
        lambda: decode_amx("B=1 2048 q=2048", "vLLM", "SDPA"),
        lambda: decode_amx("B=1 512 warm", "vLLM", "SDPA"),
        lambda: decode_amx("keys int8 B=1 32768", "16-bit"),
        lambda: decode_avx512("B=1 32768", "vLLM", "SDPA"),
        lambda: decode_avx512("B=1 32768 pages of 16", "vLLM"),
        lambda: decode_avx512(RAGGED, "vLLM", "SDPA"),
        lambda: decode_avx512("B=1 32768 q=8", "vLLM", "SDPA"),
        lambda: decode_avx512("B=1 4096 q=512", "vLLM", "SDPA"),
        lambda: decode_avx512("B=1 2048 q=2048", "vLLM", "SDPA"),
        lambda: decode_avx512("B=1 512 warm", "vLLM", "SDPA"),
        lambda: decode_avx512("keys int8 B=1 32768", "16-bit"),
        lambda: decode_avx512("keys float8 B=1 32768", "16-bit"),
        lambda: decode_avx2("B=1 32768", "vLLM", "SDPA"),
        lambda: decode_avx2("B=1 32768 pages of 16", "vLLM"),
        lambda: decode_avx2(RAGGED, "vLLM", "SDPA"),
        lambda: decode_avx2("B=1 4096 q=512", "vLLM", "SDPA"),
        lambda: decode_avx2("B=1 512 warm", "vLLM", "SDPA"),
        lambda: decode_avx2("keys float8 B=1 32768", "16-bit"),
        *(
            lambda name=name: slower(engines(4096, "ours", name))
            for name in ("llama_cpp_flash", "openvino", "huggingface", "vllm")
        ),
        *(lambda name=name: slower(engines(16384, "ours", name)) for name in ("openvino", "vllm")),
        lambda: slower(llama(STATIC)),
        lambda: slower(llama(DYNAMIC)),
        *(
            lambda name=name: prompts(4096, name)
            for name in ("vllm", "openvino", "huggingface", "llama_cpp_flash")
        ),
        *(lambda name=name: prompts(16384, name) for name in ("vllm", "openvino")),
        lambda: serving(1, "ours, blocks of 128", "vllm, blocks of 128"),
        lambda: serving(8, "ours, blocks of 128", "vllm, blocks of 128"),
        lambda: serving(8, "ours, blocks of 32", "vllm, blocks of 32"),
        lambda: serving(32, "ours, blocks of 128", "vllm, blocks of 128"),
        lambda: serving(32, "ours, blocks of 32", "vllm, blocks of 32"),
        lambda: serving(32, "ours, blocks of 16", "vllm, blocks of 32"),
        lambda: serving(1, "ours, blocks of 16", "vllm, blocks of 32"),
        *(
            lambda batch=batch, context=context: serving(
                batch, "ours, blocks of 128", "vllm, blocks of 128", context=context
            )
            for batch, context in ((1, 16384), (8, 16384), (1, 65536))
        ),
        lambda: serving(1, "ours, TP 2, DCP 2", "ours, TP 2"),
        lambda: serving(8, "ours, TP 2, DCP 2", "ours, TP 2"),
        lambda: serving(32, "ours, TP 2, DCP 2", "ours, TP 2"),
        lambda: serving(1, "ours, TP 2, DCP 2", "ours, TP 2", context=16384),
        *(lambda kib=kib: sums("groups_hosts", kib, "Gloo") for kib in (4, 64, 4096)),
        lambda: sums("groups", 4, "vLLM's shared memory"),
        lambda: two_hosts(LAN, OURS_ON_TWO, VLLM_ON_TWO),
        lambda: two_hosts(LAN, OURS_ON_TWO, VLLM_ON_TWO, "between tokens of streams ms"),
        lambda: two_hosts(LAN, f"{OURS_ON_TWO}, DCP 2", VLLM_ON_TWO),
        lambda: two_hosts(LAN, OURS_ON_TWO, "vllm, one host"),
        *(
            lambda other=other: two_hosts("1ms,1gbit", OURS_ON_TWO, other)
            for other in (VLLM_ON_TWO, "vllm, one host")
        ),
        lambda: slower(scaling(TOKEN, "bare/2", ONE)),
        lambda: slower(scaling(PROMPT, "bare/2", ONE)),
        lambda: slower(scaling(TOKEN, "bare/2", TWO)),
        lambda: slower(scaling(PROMPT, "bare/2", TWO)),
        lambda: slower(scaling(TOKEN, "lan/2", ONE)),
        lambda: slower(scaling(PROMPT, "lan/2", ONE)),
        lambda: slower(step(PASS_Q)),
        lambda: slower([*step(), line_rate()]),
        lambda: slower(step("ring")),
        lambda: slower(
            methods("tree_2", "bf16 32/8 d128 B=1 65536", "auto", "ring", column="us", unit=1000)
        ),
        lambda: slower(
            methods("cluster_metro", "metro p=8 B=1 n=256", "butterfly", "tree_allreduce")
        ),
        lambda: slower(
            methods("generation", "metro p=4 L=32768", "tree", "ring", column="ms /token")
        ),
        memory,
    ],
    "docs/parallelism.md": [
        *(
            lambda form=form: speed_up(form) + speed_up(form, place="lan/2")
            for form in (SPLIT, "weights split, tensor_parallel_size 1", REPLICATED)
        ),
        lambda: speed_up(TWO),
        *(
            lambda name=name: shape(name)
            for name in ("llama-3.2-1b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite")
        ),
        *(
            lambda dtype=dtype, column=column: quantised(dtype, column)
            for column in ("decode ms", "prefill tokens/s")
            for dtype in ("", "int8", "int4")
        ),
    ],
    "docs/exchange.md": [
        lambda: strategy("all_gather", 1, 7),
        lambda: strategy("two_phase", 2, 2 * 7),
        lambda: strategy("butterfly", LEVELS, LEVELS),
        lambda: strategy("tree_allreduce", 3 * LEVELS, 3 * LEVELS),
        lambda: strategy("three_allreduce", 3 * 2 * 7, 3 * 2 * 7),
    ],
    "docs/engine_reference.md": [lambda p=p: merge_of(p) for p in (2, 4, 8, 16)],
}
# The heading of the section with the tables, where that is not the whole page.
SECTIONS = {
    "README.md": "## Measured",
    "docs/parallelism.md": "## Measured",
    "docs/exchange.md": "### Compared with three all-reduces",
    "docs/engine_reference.md": "## What one merge costs",
}


def table_rows(page: str) -> list[str]:
    """Return the rows of a page's tables of measurements but for their headings."""
    text = (ROOT / page).read_text()
    if page in SECTIONS:
        text = re.split(r"\n##+ ", text.split(f"\n{SECTIONS[page]}\n")[1])[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {i for i, line in enumerate(lines) if set(line) <= set("|-: ")}
    return [line for i, line in enumerate(lines) if not {i, i + 1} & heads]


def shown(row: str) -> list[str]:
    """Return the numbers of all cells but the first, without those in links and code."""
    cells = row.strip().strip("|").split("|")[1:]
    return NUMBER.findall(re.sub(r"\[[^\]]*\]\([^)]*\)|`[^`]*`|\*\*", "", "|".join(cells)))


def rounds_to(number: float, text: str) -> bool:
    """Say whether a number with as many decimals is the text: 1,297 or 0.93."""
    plain = text.replace(",", "")
    decimals = len(plain.partition(".")[2])
    return abs(float(plain) - number) <= 0.5000001 * 10.0**-decimals


def misfits(row: str, values: Iterable[float]) -> list[tuple[str, float]]:
    return [
        (text, found)
        for text, found in zip(shown(row), values, strict=True)
        if not rounds_to(found, text)
    ]


@pytest.mark.parametrize(
    "page, index", [(page, i) for page, rows in PAGES.items() for i in range(len(rows))]
)
def test_row_shows_its_results(page: str, index: int) -> None:
    row, values = table_rows(page)[index], PAGES[page][index]()
    assert len(shown(row)) == len(values), f"{row} shows {shown(row)}, its results are {values}"
    assert not misfits(row, values), f"{row} does not show {values}"


@pytest.mark.parametrize("page", PAGES)
def test_every_row_is_compared(page: str) -> None:
    assert len(table_rows(page)) == len(PAGES[page])


def test_a_wrong_figure_is_found() -> None:
    row = "| 32k keys | 5.0 | vLLM **5.9** | 1.16 | [16 and `17`](18.md) |"
    assert not misfits(row, [5.04, 5.851, 1.162])
    assert misfits(row, [5.06, 5.851, 1.162]) == [("5.0", 5.06)]
    assert misfits(row, [5.04, 6.0, 1.166]) == [("5.9", 6.0), ("1.16", 1.166)]
    assert rounds_to(1297.04, "1,297") and not rounds_to(1297.6, "1,297")
