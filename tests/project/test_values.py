# SPDX-License-Identifier: BSD-3-Clause
"""Numbers in the prose of pages are those of benchmarks/results or of the planner, which they name
in a comment: `took 25.4 ms<!-- value: NAME -->` is compared with `VALUES[NAME]`. Words are free.
The lab's tests compare names that begin with "lab."."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.harness.published_shapes import SHAPES
from benchmarks.harness.results import number, read_table, value
from benchmarks.tables import (
    BY_HEADS,
    CPU_HOSTS,
    FAST,
    ON_EIGHT,
    ONE,
    OURS_ON_TWO,
    PASS_Q,
    ROOT,
    SPLIT_ON_TWO,
    TOKEN,
    TREE,
    TWO,
    VLLM_ON_ONE,
    VLLM_ON_TWO,
    on_hosts,
    scaling,
    token_ms,
)
from tree_attention.planning.arithmetic import (
    DATA,
    PROMPTS,
    SPLIT,
    SPLIT_BY_HEADS,
    TENSOR,
    WHOLE,
    Plan,
    Split,
    Work,
)
from tree_attention.planning.machines import LINKS, MACHINES, Hosts, Link, Machine
from tree_attention.planning.models import NAMED
from tree_attention.planning.unequal import Group
from tree_attention.shares import EQUAL

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.])")
MARK = re.compile(r"<!--\s+value:\s+(\S+)\s+-->")
PAGES = [page for page in tables.PAGES if MARK.search(page.read_text())]


def all_tables(name: str) -> list[list[dict[str, str]]]:
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
        for table in all_tables(name)
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


def merged(method: str) -> Callable[[], float]:
    """ms of a merge of one sequence between two hosts."""
    return lambda: value("cluster", {"case": "lan p=2 B=1 n=256", "method": method}, "ms")


def auto(rule: str, pattern: str) -> Callable[[], float]:
    """A number of the notes of cluster.md on what a rule takes."""
    return lambda: float(noted("cluster", rf"{rule} is within 10 % of the best .*{pattern}"))


def noted(file: str, pattern: str) -> str:
    (found,) = re.findall(pattern, (ROOT / f"benchmarks/results/{file}.md").read_text())
    return found


FEW_LATENTS = r"path of few rows takes ([\d.]+) ms and the path of packed blocks ([\d.]+) ms"
WITHIN, WORST = r"in (\d+) of 36", r"at worst ([\d.]+) times"
RULE, CALIBRATED = "that the shipped rule takes", "the strategy that calibrated auto took"


BIG_BIRD = "B=1 65536 BigBird: first 64, window 192, 60 random blocks of 64"


ACCURACY = {"kv": "kv_dtype", "smol": "kv_dtype_smollm2-135m"}


def accuracy(file: str, dtype: str) -> Callable[[], float]:
    return lambda: cell(file, "same top %", prompt="8,000 tokens", dtype=dtype)


def step(cache: str) -> Callable[[], float]:
    return lambda: cell("step_cost", "ms a token", cache=cache)


def of_latents(column: str) -> Callable[[], float]:
    return lambda: cell("latent_model", column, context="8,192 tokens")


def unequal(hosts: str, column: str = "ms per token") -> Callable[[], float]:
    return lambda: cell("unequal", column, hosts=hosts)


def documents(case: str, column: str = "together /alone") -> Callable[[], float]:
    return lambda: cell("documents", column, case=case)


def bracket(text: str, index: int = 0) -> float:
    """A number in the brackets of a cell."""
    return float(text.partition("(")[2].rstrip(")").split(",")[index])


def serving(batch: int, engine: str, column: str, context: int = 4096) -> str:
    rows = read_table("serving").rows
    named = {"context": str(context), "batch": str(batch), "engine": engine}
    (row,) = (x for x in rows if named.items() <= x.items())
    return row[column]


def throughput(batch: int, context: int = 4096) -> Callable[[], float]:
    return lambda: bracket(serving(batch, "ours, TP 2, DCP 2", "new tokens/s", context))


def faster_hosts(theirs: str, ours: str = OURS_ON_TWO) -> float:
    return on_hosts(FAST, theirs) / on_hosts(FAST, ours)


def contexts(column: str, method: str, unit: float, case: str = ON_EIGHT) -> Callable[[], float]:
    return lambda: value("contexts", {"case": case, "method": method}, column, unit)


def passed(keys: int) -> float:
    """How many times as long as the tree a ring of queries takes."""
    case = f"metro p=8 B=1 n={keys}"
    rows = [x for x in read_table("contexts").rows if x["case"] == case]
    (tree,) = (number(x["ms"]) for x in rows if x["method"].startswith("auto"))
    return contexts("ms", PASS_Q, tree, case)()


def over_reductions() -> list[float]:
    """How many times as fast as `tree_allreduce` the best exchange of one sequence is, for each
    number of hosts."""
    notes = "\n".join(read_table("cluster_metro").notes)
    found = re.findall(r"B=1 n=256: \w+ is fastest, ([\d.]+) times as fast as tree_all", notes)
    assert len(found) == 4
    return [float(x) for x in found]


def of_two(method: str, unit: float) -> Callable[[], float]:
    row = {"case": "bf16 32/8 d128 B=1 65536", "method": method}
    return lambda: value("tree_2", row, "bytes sent", unit)


def grown(engine: str) -> Callable[[], float]:
    """MiB from the 1,000th answer to the 10,000th."""

    def after(answered: str) -> float:
        return value("arrivals", {"engine": engine, "answered": answered}, "memory MiB")

    return lambda: after("10,000") - after("1,000")


def threads(file: str, column: str, dtype: str) -> list[float]:
    """One process of two threads, with weights of 16 bits and of a dtype."""
    forms = ("1 process, 2 threads", f"1 process, 2 threads, {dtype}")
    return [value(f"scaling_{file}", {"form": form}, column) for form in forms]


def quantised(file: str, dtype: str, thing: str) -> Callable[[], float]:
    """How many times as fast a token is, or how many times as long a prompt takes."""

    def found() -> float:
        if thing == "token":
            wide, narrow = threads(file, "ms /token", dtype)
            return wide / narrow
        wide, narrow = threads(file, "prefill s", dtype)
        return narrow / wide

    return found


def round_of(dtype: str, is_second: bool) -> Callable[[], float]:
    """How many times as fast a token of `dtype` is as one of 16 bits, in a round of all engines."""

    def found() -> float:
        rows = {x["engine"]: x["decode ms"] for x in read_table("engines_weights").rows}
        read = bracket if is_second else number
        return read(rows["ours"]) / read(rows[f"ours_{dtype}"])

    return found


def experts(way: str) -> Callable[[], float]:
    return lambda: cell("experts", "over reading", x=way)


LLAMA_8B = NAMED["llama-3.1-8b"]


def planned(form: str) -> tuple[float, float]:
    """Seconds of a token and of a prompt on four hosts, in the table of docs/parallelism.md."""
    split = Split(LLAMA_8B, form, 4, Work(128 << 10))
    return split.token_seconds(CPU_HOSTS).total, split.prefill_seconds(CPU_HOSTS).total


def glm(ranks: int, form: str | None = None) -> Split:
    """GLM-4.7-Flash with 196,608 tokens on the hosts of README.md, split in the fastest way."""
    plan = Plan(NAMED["glm-4.7-flash"], CPU_HOSTS, ranks, Work(192 << 10))
    return plan.split(form or plan.best())


def prompt_minutes(split: Split) -> float:
    return split.prefill_seconds(CPU_HOSTS).total / 60


def enough_tokens() -> float:
    """New tokens after which four hosts that split tokens have caught up with tensor parallelism,
    which reads the prompt of GLM-4.7-Flash faster."""
    ours, theirs = glm(4), glm(4, TENSOR)
    lost = 60e3 * (prompt_minutes(ours) - prompt_minutes(theirs))
    return lost / (token_ms(theirs) - token_ms(ours))


def eight_h100(form: str) -> dict[str, float]:
    """A token of Qwen3 30B A3B with 262,144 tokens, and its cache on each GPU."""
    split = Split(NAMED["qwen3-30b-a3b"], form, 8, Work(256 << 10))
    seconds = split.token_seconds(Hosts(MACHINES["h100"], LINKS["nvlink"])).total
    return {"ms": 1e3 * seconds, "gb": split.cache_bytes / 1e9}


def on_two(link: Link) -> tuple[float, float]:
    """Milliseconds of a token and minutes of a prompt of 131,072 tokens of Llama 3.1 8B on the two
    servers of docs/two_servers.md, by tensor parallelism over this link."""
    hosts, split = Hosts(MACHINES["cpu"], link), Split(LLAMA_8B, TENSOR, 2, Work(128 << 10))
    return 1e3 * split.token_seconds(hosts).total, split.prefill_seconds(hosts).total / 60


def enough_for_prompts() -> float:
    """Gb/s from which on two servers read that prompt faster than one."""
    alone = Split(LLAMA_8B, WHOLE, 1, Work(128 << 10)).prefill_seconds(CPU_HOSTS).total / 60
    links = (replace(LINKS["10gbe"], bandwidth=rate * 1.25e7) for rate in range(1, 101))
    return next(link.bandwidth / 1.25e8 for link in links if on_two(link)[1] < alone)


def cache_gb(ranks: int, tokens: int = 1 << 20) -> float:
    """GB of the cache of Llama 3.1 8B on each of so many ranks."""
    return Split(LLAMA_8B, SPLIT, ranks, Work(tokens)).cache_bytes / 1e9


def state_kb() -> float:
    """kB of the state of all heads, o and lse in float32."""
    (layers,) = LLAMA_8B.attention
    return 4e-3 * layers.heads * (128 + 1)


def families() -> float:
    pytest.importorskip("transformers")
    from hf_families import CHOOSING, HYBRIDS, OWN_ATTENTION, WORKING

    return float(len(WORKING | HYBRIDS | CHOOSING | OWN_ATTENTION))


def planned_group() -> Group:
    machines = tuple(Machine("", read, 1e15, 512e9, "10gbe") for read in (60e9, 20e9))
    return Group(LLAMA_8B, SPLIT, machines, LINKS["10gbe"], Work(32 << 10))


def qwen3_token() -> float:
    """GB that a token of the layers in SHAPES reads."""
    import transformers

    from tree_attention.cli.models import from_config

    shape = SHAPES["qwen3-30b-a3b"]
    config = getattr(transformers, shape.config)(**shape.fields, num_hidden_layers=shape.layers)
    reading = Hosts(Machine("", 1e9, math.inf, math.inf, ""), LINKS["10gbe"])
    return Split(from_config("", config), WHOLE, 1, Work(1024)).token_seconds(reading).total


def qwen3_head() -> float:
    fields = SHAPES["qwen3-30b-a3b"].fields
    return float(2 * fields["vocab_size"] * fields["hidden_size"] / 1e9)


def example(pattern: str, index: int = 0) -> Callable[[], float]:
    """A number of what docs/planning.md prints, which the lab's tests compare with `plan`."""

    def found() -> float:
        page = (ROOT / "docs/planning.md").read_text()
        (line,) = re.findall(rf"^.*{pattern}(.*)$", page, re.MULTILINE)
        return float(
            NUMBER.findall(line.replace("k", "").replace("%", " "))[index].replace(",", "")
        )

    return found


def with_far_keys() -> tuple[float, float, float, float]:
    """Of the example with far keys in docs/planning.md: ms of a token, the least of an offloaded
    cache, seconds of the prompt, and of its copies."""
    hosts = Hosts(MACHINES["h100"], LINKS["nvlink"])
    plan = Plan(LLAMA_8B.with_far_keys(64 << 10), hosts, 1, Work(1 << 20))
    split, whole = plan.split(WHOLE), plan.split(DATA)
    token, prompt = split.token_seconds(hosts).total, split.prefill_seconds(hosts).total
    offloaded = whole.cache_bytes / hosts.machine.bus
    copies = prompt - whole.prefill_seconds(hosts).total
    return 1e3 * token, 1e3 * offloaded, prompt, copies


LARGEST = r"cache and weights, largest T \* "
BANDWIDTH = r"read bandwidth: ([\d.]+) to ([\d.]+) GB/s"


VALUES: dict[str, Callable[[], float]] = {
    "front.cache_gb": lambda: cache_gb(1),
    "front.rank_gb": lambda: cache_gb(4),
    "front.state_kb": state_kb,
    "front.glm_one_ms": lambda: token_ms(glm(1)),
    "front.glm_tensor_ms": lambda: token_ms(glm(4, TENSOR)),
    "front.glm_ours_ms": lambda: token_ms(glm(4)),
    "front.glm_tensor_gb": lambda: glm(4, TENSOR).cache_bytes / 1e9,
    "front.glm_ours_gb": lambda: glm(4).cache_bytes / 1e9,
    "front.glm_held_gb": lambda: glm(4).held_bytes / 1e9,
    "front.glm_ours_minutes": lambda: prompt_minutes(glm(4)),
    "front.glm_tensor_minutes": lambda: prompt_minutes(glm(4, TENSOR)),
    "front.glm_gain_ms": lambda: token_ms(glm(4, TENSOR)) - token_ms(glm(4)),
    "front.glm_enough": lambda: enough_tokens() / 1e3,
    "front.glm_enable_gb": lambda: glm(4, PROMPTS).held_bytes / 1e9,
    "front.glm_enable_ms": lambda: token_ms(glm(4, PROMPTS)),
    "front.glm_enable_minutes": lambda: prompt_minutes(glm(4, PROMPTS)),
    "front.glm_loaded_gb": lambda: glm(2, SPLIT).held_bytes / 1e9,
    "front.glm_loaded_ms": lambda: token_ms(glm(2, SPLIT)),
    "front.one_ms": lambda: token_ms(Split(LLAMA_8B, WHOLE, 1, Work(128 << 10))),
    "front.families": families,
    "faq.glm_ours_ms": lambda: token_ms(glm(2)),
    "faq.glm_tensor_ms": lambda: token_ms(glm(2, TENSOR)),
    "faq.ranks": lambda: scaling(TOKEN, "bare/2", BY_HEADS),
    "faq.threads": lambda: scaling(TOKEN, "bare/1", TWO),
    **{
        f"measured.read_{name}": lambda i=i: float(noted("decode_avx512_bf16", BANDWIDTH)[i])
        for i, name in enumerate(("least", "most"))
    },
    "measured.pages_16": lambda: value(
        "decode_peers_avx512_bf16",
        {"case": "bf16 32/8 d128 B=1 32768 pages of 16"},
        "ours /contiguous",
    ),
    "measured.amx_share": lambda: value("decode", {"case": "bf16 32/8 d128 B=1 32768"}, "% BW"),
    **{
        f"serving.tokens_{name}": lambda engine=engine: number(serving(1, engine, "tokens per GiB"))
        for name, engine in (("dcp", "ours, TP 2, DCP 2"), ("tp", "ours, TP 2"))
    },
    **{f"serving.dcp_{batch}": throughput(batch) for batch in (1, 8, 32)},
    "serving.dcp_16k": throughput(1, 16384),
    **{
        f"serving.load{which}{name}": lambda engine=engine, column=column, of=of: of(
            number(serving(8, f"{engine}, blocks of 128", column, 16384).partition(" ")[0])
        )
        for name, engine in (("", "ours"), ("_vllm", "vllm"))
        for which, column, of in (
            ("", "between tokens ms", float),
            ("_tokens", "between tokens ms", lambda ms: 8 * 1e3 / ms),
            ("_all", "new tokens/s", float),
        )
    },
    "hosts.over_gloo": lambda: faster_hosts(VLLM_ON_TWO),
    "hosts.over_gloo_dcp": lambda: faster_hosts(VLLM_ON_TWO, SPLIT_ON_TWO),
    "hosts.over_one": lambda: faster_hosts(VLLM_ON_ONE),
    "hosts.fast_dcp": lambda: on_hosts(FAST, SPLIT_ON_TWO),
    "hosts.gib_one": lambda: on_hosts(FAST, VLLM_ON_ONE, "GiB of a process"),
    "hosts.gib_two": lambda: on_hosts(FAST, OURS_ON_TWO, "GiB of a process"),
    "hosts.first_two": lambda: on_hosts(FAST, OURS_ON_TWO, "first request s"),
    "hosts.first_one": lambda: on_hosts(FAST, VLLM_ON_ONE, "first request s"),
    "contexts.kb_tree": contexts("bytes sent", TREE, 1e3),
    "contexts.kb_pass_q": contexts("bytes sent", PASS_Q, 1e3),
    "contexts.gb_ring": contexts("bytes sent", "ring", 1e9),
    "contexts.gbit_ring": contexts("Gb/s", "ring", 1),
    "contexts.pass_q_2k": lambda: passed(2048),
    "contexts.pass_q_8k": lambda: passed(8192),
    "tree_2.kb_tree": of_two("auto", 1e3),
    "tree_2.mb_ring": of_two("ring", 1e6),
    "metro.least": lambda: min(over_reductions()),
    "metro.most": lambda: max(over_reductions()),
    **{
        f"metro.wire_{method}": lambda method=method: value(
            "cluster_metro", {"case": "metro p=8 B=64 n=4", "method": method}, "bytes sent", 1.25e5
        )
        for method in ("two_phase", "all_gather")
    },
    "metro.formula_kb": lambda: 2 * 7 / 8 * state_kb(),
    "metro.three": lambda: value(
        "cluster_metro", {"case": "metro p=8 B=1 n=256", "method": "three_allreduce"}, "ms"
    ),
    "memory.shard": lambda: value(
        "memory", {"case": "p=4 n=131072", "method": "ring"}, "shard bytes", 1e9
    ),
    **{
        f"{name}.{dtype}_{thing}": quantised(file, dtype, thing)
        for name, file, things in (
            ("llama_1b", "llama-3.2-1b", ("token", "prompt")),
            ("deepseek", "deepseek-v2-lite", ("prompt",)),
        )
        for dtype in ("int8", "int4")
        for thing in things
    },
    **{
        f"rounds.{dtype}_{name}": round_of(dtype, name == "second")
        for dtype in ("int8", "int4")
        for name in ("first", "second")
    },
    **{f"experts.{dtype}": experts(f"ours, {dtype}") for dtype in ("bf16", "int8", "int4")},
    "experts.grouped": experts("grouped_mm, bf16"),
    "plan.prompt_split": lambda: planned(PROMPTS)[1],
    "plan.prompt_heads": lambda: planned(SPLIT_BY_HEADS)[1],
    "plan.token_split": lambda: 1e3 * planned(PROMPTS)[0],
    "plan.token_heads": lambda: 1e3 * planned(SPLIT_BY_HEADS)[0],
    "planned_shares.alone": lambda: 1e3 * planned_group().without([1]).seconds,
    "planned_shares.even": lambda: 1e3 * planned_group().token_seconds(EQUAL),
    "planned_shares.shares": lambda: 1e3 * planned_group().seconds,
    "qwen3.token_gb": qwen3_token,
    "qwen3.head_gb": qwen3_head,
    **{
        f"example.{name}": example(LARGEST, i)
        for i, name in enumerate(("weights", "cache", "longest", "token", "exchange", "prompt"))
    },
    **{
        f"far.{name}": lambda i=i: with_far_keys()[i]
        for i, name in enumerate(("token", "offloaded", "prefill", "copies"))
    },
    "example.shares": example(r"cache and weights, T = 1 \*  +3, 1; cache 15, 1"),
    "example.alone": example("The fastest alone, rank 0 .new., takes"),
    "example.even": example(r"cache and weights, T = 1 \*  +3, 1; cache 15, 1", 2),
    "example.even_heads": example("cache and weights, largest T +even "),
    "example.weights_old": example("1 .old.   "),
    "example.cache_old": example("1 .old.   ", 1),
    "example.cache_all": lambda: cache_gb(1, 32 << 10),
    "two.ms": lambda: on_two(LINKS["10gbe"])[0],
    "two.emulated": lambda: scaling(TOKEN, "lan/2", BY_HEADS),
    "two.one_core": lambda: scaling(TOKEN, "bare/1", ONE),
    "two.slow_ms": lambda: on_two(LINKS["1gbe"])[0],
    "two.slow_minutes": lambda: on_two(LINKS["1gbe"])[1],
    "two.enough": enough_for_prompts,
    "arrivals.vllm": grown("vllm, one host"),
    "arrivals.one": grown("ours, one host"),
    "arrivals.two": grown("ours, two hosts, TP 2"),
    "chosen.index": lambda: (
        cell("chosen", "ours us", case="index of 64 heads (DeepSeek-V3.2)") / 1e3
    ),
    "chosen.merge": lambda: cell("chosen", "ours us", case="all_merge_topk of 2 x 2,048, loopback"),
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
    **{
        f"cpu.latents_{name}": lambda i=i: float(noted("cpu_kernel_variants", FEW_LATENTS)[i])
        for i, name in enumerate(("few", "blocks"))
    },
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
    **{
        f"cuda.clusters_{name}": lambda shape=shape, bound=bound: cell(
            "cuda_predicted", "predicted, us", shape=shape, bound=bound
        )
        for name, shape, bound in (
            ("few", "bf16 32/8 d128 B=1 1k", "launch and fix-up"),
            ("one_head", "bf16 8/1 d128 B=1 128k", "DRAM"),
            ("latents", "bf16 16/1 d576/512 B=1 64k", "DRAM"),
        )
    },
    "cuda.one_level": predicted("64 rows, one level", "264"),
    "cuda.two_levels": predicted("64 rows, two levels", "264"),
    "cuda.int8_bf16": compiled("int8", "widened to bfloat16, the first version"),
    "cuda.int8_f16": compiled("int8", "widened to float16, 16 rows"),
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
    "merge.alone": merged("auto: all_gather"),
    "merge.three": merged("three_allreduce"),
    **{
        f"gpu.{name}_{unit}": lambda form=form, unit=unit: eight_h100(form)[unit]
        for name, form in (("tensor", TENSOR), ("tokens", SPLIT_BY_HEADS))
        for unit in ("ms", "gb")
    },
    "far.step_kb": lambda: state_kb() + 2e-3 * LLAMA_8B.attention[0].heads * 128,
    "far.token_kb": lambda: 1e6 * cache_gb(1, 1),
    "far.gb": lambda: cache_gb(1, 256 << 10),
    "far.cpu_ms": lambda: 1e3 * cache_gb(1, 256 << 10) / 200,
    "far.bus_ms": lambda: 1e3 * cache_gb(1, 256 << 10) / 50,
    "cluster.rule_within": auto(RULE, WITHIN),
    "cluster.rule_worst": auto(RULE, WORST),
    "cluster.calibrated_within": auto(CALIBRATED, WITHIN),
    "cluster.calibrated_worst": auto(CALIBRATED, WORST),
    "unequal.alone": unequal("100 %, alone"),
    "unequal.even": unequal("100 % + 33 %, even"),
    "unequal.given": unequal("100 % + 33 %, 3,1"),
    "unequal.auto": unequal("100 % + 33 %, auto"),
    "documents.cache": documents("Qwen3 0.6B, bf16"),
    "documents.small": documents("Llama 3.2 1B, bf16"),
    "documents.weights": documents("Llama 3.1 8B, int8"),
    "documents.memory": documents("Llama 3.1 8B, int8", "memory"),
    "cascade.bf16": lambda: cell(
        "cascade", "lean_decode /cascade", case="8 rows, 32768 keys, bf16"
    ),
    "cascade.int8": lambda: cell(
        "cascade", "lean_decode /cascade", case="8 rows, 32768 keys, int8"
    ),
    "cascade.short": lambda: cell("cascade", "lean_decode /cascade", case="2 rows, 512 keys, bf16"),
    "chosen.few": lambda: cell("chosen", "/reading", case="index of 4 heads"),
    "chosen.transformers": lambda: (
        float(read_table("chosen").rows[0]["others us"].rpartition(" ")[2].replace(",", "")) / 1e3
    ),
    "unequal.planned": unequal("100 % + 33 %, auto", "planned ms"),
    "unequal.very_slow": unequal("100 % + 10 %, auto"),
    "unequal.planned_very_slow": unequal("100 % + 10 %, auto", "planned ms"),
    "unequal.very_slow_even": unequal("100 % + 10 %, even"),
    "unequal.ceiling": unequal("100 % + 100 %, even", "of the sum of speeds"),
    "unequal.ceiling_again": unequal("100 % + 100 %, auto", "of the sum of speeds"),
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


def rounds_to(number: float, text: str) -> bool:
    """Say whether a number with as many decimals is the text: 1,297 or 0.93."""
    plain = text.replace(",", "")
    decimals = len(plain.partition(".")[2])
    return abs(float(plain) - number) <= 0.5000001 * 10.0**-decimals


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_are_those_of_the_results(page: Path) -> None:
    for name, shown in marked(page.read_text()):
        if name.startswith("lab."):
            continue
        found = VALUES[name]()
        assert rounds_to(found, shown), f"{page.name} says {shown} where {name} is {found}"


def test_every_value_is_shown() -> None:
    names = {name for page in PAGES for name, _ in marked(page.read_text())}
    assert {name for name in names if not name.startswith("lab.")} == VALUES.keys()


def test_a_wrong_number_is_found() -> None:
    text = "It took 3 rounds of 25.4 ms<!-- value: a -->, not 1,000\nus<!-- value: b -->."
    assert marked(text) == [("a", "25.4"), ("b", "1,000")]
    assert rounds_to(1297.04, "1,297") and not rounds_to(1297.6, "1,297")
    assert rounds_to(25.44, "25.4") and not rounds_to(25.46, "25.4")
