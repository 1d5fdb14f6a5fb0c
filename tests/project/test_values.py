# SPDX-License-Identifier: BSD-3-Clause
"""Numbers in the prose of pages are those of benchmarks/results, which they name in a comment:
`took 25.4 ms<!-- value: NAME -->` is compared with `VALUES[NAME]`. Words are free."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.harness.results import number
from test_figures import NUMBER, ROOT, rounds_to

MARK = re.compile(r"<!--\s+value:\s+(\S+)\s+-->")
PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if MARK.search(page.read_text()))


def tables(name: str) -> list[list[dict[str, str]]]:
    """Return the rows of each table of benchmarks/results/NAME.md."""
    text = (ROOT / f"benchmarks/results/{name}.md").read_text()
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        rows = [[x.strip() for x in line.split("|")[1:-1]] for line in block.splitlines()]
        found.append([dict(zip(rows[0], row, strict=True)) for row in rows[2:]])
    return found


def cell(name: str, column: str, **cells: str) -> float:
    """Return the number in a column of the only row of a page that has these cells, in any of its
    columns."""
    found = [
        row[column]
        for table in tables(name)
        for row in table
        if column in row and all(text in row.values() for text in cells.values())
    ]
    assert len(found) == 1, f"{name}.md has {len(found)} rows with {cells} and {column!r}"
    return number(found[0].strip("*"))


def variant(first: str, column: str, *others: str) -> Callable[[], float]:
    cells = {str(i): text for i, text in enumerate((first, *others))}
    return lambda: cell("cpu_kernel_variants", column, **cells)


SHARE = "share of the read bandwidth"
PAIRS, PAGES_OF_16 = f"contiguous keys, {SHARE}", f"shuffled pages of 16, {SHARE}"
MANY, FEW = "AVX-512, many rows", "AVX-512, few rows"
KEPT = "products of pairs, one key at a time, lines two steps ahead fetched into the second level"
ONE_KEY = "products of pairs, one key at a time; values of two rows and 128 columns at a time"

OF_OURS = "time / time of `lean_decode`"


def compiled(column: str, *cells: str) -> Callable[[], float]:
    return lambda: cell("cuda_compiled", column, **{str(i): x for i, x in enumerate(cells)})


LINE_SHAPE = "1 x 8 heads, 16k keys + 16, 32 blocks"


def predicted(column: str, row: str) -> Callable[[], float]:
    return lambda: cell("cuda_predicted", column, row=row)


def run(call: str, column: str) -> Callable[[], float]:
    return lambda: cell("cuda_first_run", column, call=call)


def sums(file: str, way: str) -> Callable[[], float]:
    return lambda: cell(file, "us", KiB="4", way=way)


def auto(rule: str, pattern: str) -> Callable[[], float]:
    """A number of the notes of cluster.md on what a rule takes."""
    return lambda: float(noted("cluster", rf"{rule} is within 10 % of the best .*{pattern}"))


def noted(file: str, pattern: str) -> str:
    (found,) = re.findall(pattern, (ROOT / f"benchmarks/results/{file}.md").read_text())
    return found


WITHIN, WORST = r"in (\d+) of 36", r"at worst ([\d.]+) times"
RULE, CALIBRATED = "that the shipped rule takes", "the strategy that calibrated auto took"


BIG_BIRD = "B=1 65536 BigBird: first 64, window 192, 60 random blocks of 64"


def deterministic(ranks: int, row: str) -> Callable[[], float]:
    return lambda: cell(f"deterministic_{ranks}", "ms", deterministic=row)


ACCURACY = {"kv": "kv_dtype", "smol": "kv_dtype_smollm2-135m"}


def accuracy(file: str, dtype: str) -> Callable[[], float]:
    return lambda: cell(file, "same top %", prompt="8,000 tokens", dtype=dtype)


def step(cache: str) -> Callable[[], float]:
    return lambda: cell("step_cost", "ms a token", cache=cache)


def of_latents(column: str) -> Callable[[], float]:
    return lambda: cell("latent_model", column, context="8,192 tokens")


def unequal(hosts: str, column: str = "ms per token") -> Callable[[], float]:
    return lambda: cell("unequal", column, hosts=hosts)


VALUES: dict[str, Callable[[], float]] = {
    "cpu.first_share": variant("AVX-512 without fetching ahead", SHARE),
    "cpu.avx512_share": variant("AVX-512, bfloat16, windows alone", SHARE),
    "cpu.best_share": variant(
        "AMX, fetching spread, tiles and vectors of 4 rows instead of 16", SHARE
    ),
    "cpu.amx_16_rows": variant("AMX, fetching spread over all phases of the step", SHARE),
    "cpu.burst": variant("AMX, the next step fetched in one burst", SHARE),
    "cpu.far_lines": variant(
        "AMX, shuffled pages of 16 keys, far lines in the order of keys", SHARE
    ),
    "cpu.windows": variant(
        "AMX, shuffled pages of 16 keys, windows of eight pieces, addresses page by page", SHARE
    ),
    "cpu.disturbed_one": variant(
        "one sequence of 131,072 keys", "factor with one worker per thread"
    ),
    "cpu.disturbed_eight": variant(
        "one sequence of 131,072 keys", "factor with up to eight workers per thread"
    ),
    "cpu.pairs_four": variant("products of pairs, four keys and 64 columns at a time", PAIRS),
    "cpu.pairs_one": variant(ONE_KEY, PAIRS),
    "cpu.pairs_pages": variant(ONE_KEY, PAGES_OF_16),
    "cpu.pairs_pages_fetched": variant(f"{KEPT} (kept)", PAGES_OF_16),
    "cpu.pairs_16_rows": variant("products of pairs", "16 rows", "bfloat16", "Zen 4"),
    "cpu.float_16_rows": variant("AVX-512 with float32 products", "16 rows", "bfloat16"),
    "cpu.neon": variant("bfloat16", "`neon`"),
    "cpu.neon_bf16": variant("bfloat16", "`neon_bf16`"),
    "cpu.prompt_before": variant("2,048 tokens, bfloat16", FEW),
    "cpu.prompt_now": variant("2,048 tokens, bfloat16", MANY),
    "cpu.chunk_few": variant("the path of few rows, 128 rows at a time", "TFLOP/s"),
    "cpu.chunk_many": variant(
        "keys packed 256 at a time for 512 rows, the next keys fetched meanwhile", "TFLOP/s"
    ),
    "cpu.latents_first": variant("first version", "ms"),
    "cpu.latents_now": variant("V packed right after the first rows' scores", "ms"),
    "cpu.int8_converted": variant(
        "32 query and 8 KV heads, 32k keys", "int8 keys converted to bfloat16"
    ),
    "cpu.int8_digits": variant(
        "32 query and 8 KV heads, 32k keys", "int8 keys multiplied by digits"
    ),
    "cpu.weights_pairs": variant("by pairs of bfloat16 (kept)", "us"),
    "cpu.weights_torch": variant("torch's packed product", "us"),
    "cpu.weights_whole": variant("all at once", "ms"),
    "cpu.weights_parts": variant("1,024 outputs at a time (kept)", "ms"),
    "cuda.short": run("1k keys", "tree_attention"),
    "cuda.short_cudnn": run("1k keys", "cuDNN"),
    "cuda.latents_share": run("latents, 16 query heads and 1 KV head, 64k keys", "share"),
    "cuda.tile_8k": run("8k keys, 128 columns", OF_OURS),
    "cuda.tile_few_heads": run("8 query heads and 1 KV head, 8k keys, 128 columns", OF_OURS),
    "cuda.local_before": compiled("local before", "bfloat16, 256 columns"),
    "cuda.local_now": compiled("local now", "bfloat16, 256 columns"),
    "cuda.registers_8": compiled("registers sm_90, 8 rows", "bfloat16", "128"),
    "cuda.registers_16": compiled("registers sm_90, 16 rows", "bfloat16", "128"),
    "cuda.tile_8": compiled("instructions, 8 rows", "bfloat16", "128"),
    "cuda.tile_16": compiled("instructions, 16 rows", "bfloat16", "128"),
    "cuda.dram_by_heads": predicted("(sequence, head, block)", LINE_SHAPE),
    "cuda.dram_in_step": predicted("in step", LINE_SHAPE),
    "cuda.one_level": predicted("64 rows, one level", "264"),
    "cuda.two_levels": predicted("64 rows, two levels", "264"),
    "cuda.int8_bf16": compiled("int8", "widened to bfloat16, the first version"),
    "cuda.int8_f16": compiled("int8", "widened to float16, 16 rows"),
    **{
        f"deterministic_{ranks}.{name}": deterministic(ranks, row)
        for ranks in (1, 2)
        for name, row in (
            ("without", "without"),
            ("4096", "in blocks of 4096"),
            ("1024", "in blocks of 1024"),
        )
    },
    **{
        f"sparse.{name}": lambda column=column: cell("sparse", column, case=BIG_BIRD)
        for name, column in (
            ("ranges", "ours us"),
            ("all", "all keys us"),
            ("pages", "page list us"),
        )
    },
    **{
        f"{name}.{dtype}.same": accuracy(file, dtype)
        for name, file in ACCURACY.items()
        for dtype in ("int8", "fp8")
    },
    "restore.prefill": lambda: cell("restore", "prefill s", x="65,536 tokens, bfloat16"),
    "restore.load": lambda: cell("restore", "load s", x="65,536 tokens, bfloat16"),
    "step.eager": step("TreeCache(max_length), eager"),
    "step.compiled": step("TreeCache(max_length), compiled"),
    "step.static_eager": step("StaticCache, eager"),
    "step.static_compiled": step("StaticCache, compiled"),
    "latents.token": of_latents("ms per token"),
    "latents.token_theirs": of_latents("its ms"),
    "latents.prompt": of_latents("prefill s"),
    "latents.prompt_theirs": of_latents("transformers"),
    "groups.us": sums("groups", "ours"),
    "groups.gloo": sums("groups", "Gloo"),
    "groups_hosts.us": sums("groups_hosts", "ours"),
    "groups_hosts.gloo": sums("groups_hosts", "Gloo"),
    "cluster.rule_within": auto(RULE, WITHIN),
    "cluster.rule_worst": auto(RULE, WORST),
    "cluster.calibrated_within": auto(CALIBRATED, WITHIN),
    "cluster.calibrated_worst": auto(CALIBRATED, WORST),
    "unequal.alone": unequal("100 %, alone"),
    "unequal.even": unequal("100 % + 33 %, even"),
    "unequal.auto": unequal("100 % + 33 %, auto"),
    "unequal.of_sum": unequal("100 % + 33 %, auto", "of the sum of speeds"),
    "unequal.left_out": unequal("100 % + 10 %, auto"),
    "engines.eager": lambda: cell("engines", "decode ms", context="4096", engine="ours"),
    "engines.compiled": lambda: cell("engines", "decode ms", context="4096", x="ours_compiled"),
}


def marked(text: str) -> list[tuple[str, str]]:
    """Return each name with the last number before it."""
    assert not re.search(r"^\s*<!-- value", text, re.MULTILINE), "a comment would end the paragraph"
    found, end = [], 0
    for mark in MARK.finditer(text):
        numbers = NUMBER.findall(text[end : mark.start()].rpartition("\n\n")[2])
        assert numbers, f"no number stands before {mark[0]}"
        found.append((mark[1], numbers[-1].rstrip(",")))
        end = mark.end()
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_are_those_of_the_results(page: Path) -> None:
    for name, shown in marked(page.read_text()):
        found = VALUES[name]()
        assert rounds_to(found, shown), f"{page.name} says {shown} where {name} is {found}"


def test_every_value_is_shown() -> None:
    names = {name for page in PAGES for name, _ in marked(page.read_text())}
    assert names == VALUES.keys()


def test_a_wrong_number_is_found() -> None:
    text = "It took 3 rounds of 25.4 ms<!-- value: a -->, not 1,000\nus<!-- value: b -->."
    assert marked(text) == [("a", "25.4"), ("b", "1,000")]
    assert rounds_to(25.44, "25.4") and not rounds_to(25.46, "25.4")
