# SPDX-License-Identifier: BSD-3-Clause
"""The local operator on the CPU, beside PyTorch's attention and the machine's ceilings."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor

from tree_attention import _C, lean_decode
from tree_attention.reference.accuracy import check_against_float64

from ..harness.measure import (
    InputArena,
    Load,
    amx_peak,
    fma_peak,
    load_warnings,
    pin_threads,
    read_memory,
    time_alternating,
)
from ..harness.report import Column, Report, environment
from ..harness.shapes import DTYPES, log_uniform_lengths

# Reading less takes so little that the probe would time its own start.
MIN_PROBE_BYTES = 4 << 20
OURS, SDPA, FLEX, PROBE = "lean_decode", "SDPA", "flex_attention", "read probe"


@dataclass(frozen=True)
class DecodeCase:
    """One row. Queries are the last of each sequence and causal among themselves."""

    dtype: str = "bf16"
    heads: tuple[int, int] = (32, 8)  # query, key/value
    head_dim: int = 128
    lengths: tuple[int, ...] = (32768,)  # keys of each sequence of the batch
    seqlen_q: int = 1
    warm: bool = False
    flex: bool = False  # compiling for it takes several seconds
    page_size: int = 0  # keys in shuffled pages of so many; 0: contiguous
    instruction_set: str = ""  # the widest that the machine has, unless named

    @property
    def name(self) -> str:
        ragged = len(set(self.lengths)) > 1
        keys = f"{min(self.lengths)}-{max(self.lengths)}" if ragged else str(self.lengths[0])
        parts = [f"{self.dtype} {self.heads[0]}/{self.heads[1]} d{self.head_dim}"]
        parts += [f"B={len(self.lengths)}{' ragged' if ragged else ''} {keys}"]
        parts += [f"q={self.seqlen_q}"] if self.seqlen_q > 1 else []
        parts += [f"pages of {self.page_size}"] if self.page_size else []
        parts += [self.instruction_set] if self.instruction_set else []
        return " ".join(parts + (["warm"] if self.warm else []))

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Of each sequence."""
        return tuple(-(-length // self.page_size) for length in self.lengths)

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        if self.page_size:
            return sum(self.num_pages), self.heads[1], self.page_size, self.head_dim
        return len(self.lengths), self.heads[1], max(self.lengths), self.head_dim

    @property
    def num_keys(self) -> int:
        return sum(self.lengths)

    @property
    def io_bytes(self) -> int:
        """K and V up to each length, q and o: what every implementation must move once."""
        size, rows = DTYPES[self.dtype].itemsize, len(self.lengths) * self.heads[0] * self.seqlen_q
        return size * self.head_dim * (2 * self.heads[1] * self.num_keys + 2 * rows)

    @property
    def operations(self) -> int:
        """Multiply-adds count two: q.k and p.v over the visible keys of every query."""
        visible = sum(
            max(0, length - self.seqlen_q + 1 + i)
            for length in self.lengths
            for i in range(self.seqlen_q)
        )
        return 4 * self.heads[0] * self.head_dim * visible


def quick_cases() -> list[DecodeCase]:
    """A second or two in all: for trying the program."""
    return [
        DecodeCase(lengths=(256,), warm=True),
        DecodeCase(dtype="fp32", heads=(4, 2), head_dim=64, lengths=(1024,), seqlen_q=3),
        DecodeCase(heads=(4, 2), head_dim=64, lengths=(1, 300, 777)),
        DecodeCase(heads=(4, 2), head_dim=64, lengths=(33, 50), page_size=16),
    ]


def standard_cases() -> list[DecodeCase]:
    """The shapes that this library is about."""
    ragged = log_uniform_lengths(8, 512, 32768)
    return [
        DecodeCase(flex=True),
        DecodeCase(lengths=ragged),
        DecodeCase(heads=(8, 1), lengths=(65536,), flex=True),
        DecodeCase(heads=(32, 32), lengths=(16384,)),
        DecodeCase(dtype="fp32", flex=True),
        DecodeCase(dtype="fp16"),
        DecodeCase(lengths=(4096,) * 4),
        DecodeCase(dtype="fp32", lengths=(4096,) * 4),
        DecodeCase(seqlen_q=4),
        DecodeCase(seqlen_q=8),
        DecodeCase(lengths=(4096,), seqlen_q=512),
        DecodeCase(lengths=(4096,), seqlen_q=512, head_dim=64),
        DecodeCase(lengths=(2048,), seqlen_q=2048),
        DecodeCase(lengths=(2048,), seqlen_q=2048, head_dim=64),
        DecodeCase(lengths=(512,), warm=True),
        DecodeCase(lengths=(1,), warm=True),
        DecodeCase(page_size=128),
        DecodeCase(page_size=16),
        DecodeCase(head_dim=64),
        *narrower_cases(),
    ]


def narrower_cases() -> list[DecodeCase]:
    """The instruction sets below the one in use, each of which every x86-64 that has it has."""
    names = ["amx", "avx512", "avx2"]
    used = _C.cpu_instruction_set()
    narrower = names[names.index(used) + 1 :] if used in names else []
    return [DecodeCase(instruction_set=name) for name in narrower]


def full_cases() -> list[DecodeCase]:
    """Every dtype, head grouping and head_dim; every length; every small number of queries."""
    cases = standard_cases()
    for dtype in DTYPES:
        for heads in ((32, 8), (8, 1), (32, 32)):
            keys = 8192 if heads == (32, 32) else 32768
            cases += [DecodeCase(dtype, heads, d, (keys,)) for d in (128, 64)]
    cases += [DecodeCase(head_dim=d) for d in (96, 256)]
    cases += [DecodeCase(heads=heads) for heads in ((16, 8), (64, 8))]
    for page_size in (128, 32, 16):
        cases += [
            DecodeCase(page_size=page_size),
            DecodeCase(head_dim=64, page_size=page_size),
            DecodeCase(lengths=(4096,) * 32, page_size=page_size),
            DecodeCase(lengths=log_uniform_lengths(8, 512, 32768), page_size=page_size),
        ]
    cases += [DecodeCase(lengths=(4096,) * 32)]
    cases += [DecodeCase(lengths=(n,)) for n in (512, 4096, 65536)]
    cases += [DecodeCase(seqlen_q=n) for n in (2, 3, 5, 6, 7)]
    for queries in (512, 2048):
        for keys in (0, 4096, 32768):  # before the queries' own
            cases += [
                DecodeCase(lengths=(keys + queries,), seqlen_q=queries, head_dim=d)
                for d in (128, 64)
            ]
    for dtype in ("fp16", "fp32"):
        cases += [
            DecodeCase(dtype, lengths=log_uniform_lengths(8, 512, 32768)),
            DecodeCase(dtype, lengths=(4096,), seqlen_q=512),
            DecodeCase(dtype, lengths=(512,), warm=True),
            DecodeCase(dtype, lengths=(1,), warm=True),
        ]
    return list({case.name: case for case in reversed(cases)}.values())[::-1]


class Inputs:
    """A case's q and, for every set, K and V in the arena; all sets hold the same values."""

    def __init__(self, case: DecodeCase, arena: InputArena) -> None:
        dtype, batch = DTYPES[case.dtype], len(case.lengths)
        generator = torch.Generator().manual_seed(0)
        # Scores with a standard deviation of 3: a few keys dominate, many still count.
        q = 3.0 * torch.randn(
            batch, case.heads[0], case.seqlen_q, case.head_dim, generator=generator
        )
        self.q = q.to(dtype)
        self.num_sets = 1 if case.warm else arena.num_sets(kv_set_bytes(case))
        shape = case.kv_shape
        self.sets = [
            (arena.view(2 * i, shape, dtype), arena.view(2 * i + 1, shape, dtype))
            for i in range(self.num_sets)
        ]
        self.options: dict[str, Any] = {"page_table": page_table(case)} if case.page_size else {}
        for first, *others in zip(*self.sets, strict=True):
            first.normal_(generator=generator)
            for b, length in enumerate(case.lengths):  # unused slots
                if not case.page_size:
                    first[b, :, length:] = math.nan
                elif length % case.page_size:
                    last = self.options["page_table"][b, case.num_pages[b] - 1]
                    first[last, :, length % case.page_size :] = math.nan
            for other in others:
                other.copy_(first)
        ends = torch.tensor(case.lengths)[:, None] - torch.arange(case.seqlen_q - 1, -1, -1)
        ranges = torch.stack([torch.zeros_like(ends), ends], dim=-1)
        slots = max(case.num_pages) * case.page_size if case.page_size else max(case.lengths)
        full = case.seqlen_q == 1 and min(case.lengths) == slots
        self.key_ranges = None if full else ranges.to(torch.int32)


def page_table(case: DecodeCase) -> Tensor:
    """[batch, pages]: all pages in random order; entries past a sequence's end are out of range."""
    ids = torch.randperm(sum(case.num_pages), generator=torch.Generator().manual_seed(0))
    table = torch.full((len(case.lengths), max(case.num_pages)), -1, dtype=torch.int32)
    for row, pages in zip(table, ids.to(torch.int32).split(case.num_pages), strict=True):
        row[: len(pages)] = pages
    return table


def kv_set_bytes(case: DecodeCase) -> int:
    return 2 * DTYPES[case.dtype].itemsize * math.prod(case.kv_shape)


def visible(case: DecodeCase, *tensors: Tensor) -> list[Tensor]:
    """What must be read of K and V, as contiguous pieces; of pages, all slots."""
    if case.page_size or len(set(case.lengths)) == 1:
        return list(tensors)
    heads = range(case.heads[1])
    return [x[b, h, :n] for x in tensors for b, n in enumerate(case.lengths) for h in heads]


def sdpa(case: DecodeCase, inputs: Inputs) -> Callable[[int], Tensor]:
    """`scaled_dot_product_attention` at its best: without a mask where it needs none, and one call
    for each length of a ragged batch, because a mask makes it read the padding as well."""
    q = inputs.q
    if case.seqlen_q == 1:
        if len(set(case.lengths)) == 1:
            return lambda i: F.scaled_dot_product_attention(q, *inputs.sets[i], enable_gqa=True)

        def each_length(i: int) -> Tensor:
            k, v = inputs.sets[i]
            outputs = [
                F.scaled_dot_product_attention(
                    q[b : b + 1],
                    k[b : b + 1, :, :length],
                    v[b : b + 1, :, :length],
                    enable_gqa=True,
                )
                for b, length in enumerate(case.lengths)
            ]
            return torch.cat(outputs)

        return each_length
    assert inputs.key_ranges is not None
    # is_causal would align the first query with the first key; these are the last queries.
    mask = torch.arange(max(case.lengths)) < inputs.key_ranges[:, None, :, 1:]
    if len(set(case.lengths)) > 1:
        raise ValueError(f"{case.name}: ragged lengths are compared with one query only")
    return lambda i: F.scaled_dot_product_attention(
        q, *inputs.sets[i], attn_mask=mask, enable_gqa=True
    )


def flex_attention(inputs: Inputs) -> Callable[[int], Tensor] | str:
    """FlexAttention compiled for this shape, or why it is not available."""
    from torch.nn.attention.flex_attention import flex_attention

    # Where torch has CUDA and the machine has not, its build helper warns at every compilation.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def run(i: int) -> Tensor:
        return compiled(inputs.q, *inputs.sets[i], enable_gqa=True)

    try:
        run(0)
    except RuntimeError as error:  # also what the compiler does not implement
        return f"not available: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return run


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """The named instruction set; the one in use for an empty name."""
    before = _C.cpu_instruction_set()
    _C.set_cpu_instruction_set(name or before)
    try:
        yield
    finally:
        _C.set_cpu_instruction_set(before)


def run_case(
    case: DecodeCase,
    arena: InputArena,
    seconds: float,
    fma_per_second: float,
    amx_per_second: float,
) -> dict[str, Any]:
    """Times one case; returns its row as JSON values."""
    inputs = Inputs(case, arena)
    functions: dict[str, Callable[[int], Any]] = {
        OURS: lambda i: lean_decode(inputs.q, *inputs.sets[i], inputs.key_ranges, **inputs.options),
    }
    if not case.page_size:
        functions[SDPA] = sdpa(case, inputs)
    if not case.warm and kv_set_bytes(case) >= MIN_PROBE_BYTES:
        buffers = [visible(case, *kv) for kv in inputs.sets]
        functions[PROBE] = lambda i: read_memory(*buffers[i])
    unavailable = {}
    if case.flex:
        flex = flex_attention(inputs)
        if isinstance(flex, str):
            unavailable[FLEX] = flex
        else:
            functions[FLEX] = flex
    with Load() as load, instruction_set(case.instruction_set):
        samples = time_alternating(
            functions, num_sets=inputs.num_sets, seconds=seconds, warm=case.warm
        )
    ours = samples[OURS]
    queries = sorted({*range(0, case.seqlen_q, max(1, case.seqlen_q // 8)), case.seqlen_q - 1})
    k, v = inputs.sets[0]
    accuracy = check_against_float64(
        inputs.q, k, v, inputs.key_ranges, *ours.result, queries=queries, **inputs.options
    )
    row: dict[str, Any] = {
        "name": case.name,
        "case": asdict(case),
        "io_bytes": case.io_bytes,
        "operations": case.operations,
        "times": {name: sample.to_json() for name, sample in samples.items()},
        "unavailable": unavailable,
        "bandwidth": case.io_bytes / ours.median,
        "fma_share": case.operations / ours.median / fma_per_second,
        "amx_share": case.operations / ours.median / amx_per_second if amx_per_second else None,
        "sdpa_ratio": samples[SDPA].median / ours.median if SDPA in samples else None,
        "other_load": load.others,
        "accuracy": asdict(accuracy),
        "wrong": not accuracy.right,
    }
    if PROBE in samples:
        probe_bytes = sum(x.nbytes for x in buffers[0])
        row["probe_bandwidth"] = probe_bytes / samples[PROBE].median
        row["bandwidth_share"] = row["bandwidth"] / row["probe_bandwidth"]
    return row


def run(cases: Sequence[DecodeCase], progress: Progress, *, seconds: float) -> Report:
    """Runs the cases on pinned threads; `seconds` is the timed part of each."""
    cpus = pin_threads()
    set_bytes = [kv_set_bytes(case) for case in cases]
    sets = [
        1 if case.warm else InputArena.num_sets(n) for case, n in zip(cases, set_bytes, strict=True)
    ]
    arena_bytes = max(n * count for n, count in zip(set_bytes, sets, strict=True))
    arena = InputArena(arena_bytes)
    task = progress.add_task("decode", total=len(cases))
    rows = []
    with torch.inference_mode():
        peak, matrix_peak = fma_peak(), amx_peak()
        for case in cases:
            progress.update(task, description=case.name)
            rows.append(run_case(case, arena, seconds, peak, matrix_peak))
            progress.advance(task)
    probes = [row["probe_bandwidth"] / 1e9 for row in rows if "probe_bandwidth" in row]
    header = environment(
        **{
            "pinned to CPUs": cpus or "not pinned",
            "float32 multiply-add peak": f"{peak / 1e9:.0f} GFLOP/s",
            "bfloat16 peak of AMX": f"{matrix_peak / 1e9:.0f} GFLOP/s" if matrix_peak else "no AMX",
            "read bandwidth": (
                f"{min(probes):.1f} to {max(probes):.1f} GB/s over the rows" if probes else "none"
            ),
            "cold inputs rotate over": f"{arena_bytes >> 20} MiB",
        }
    )
    return Report(
        name="decode",
        title="lean_decode on one process",
        notes=NOTES,
        environment=header,
        rows=rows,
        columns=columns(rows),
        warnings=warnings(rows, cpus),
    )


NOTES = (
    "A row is named dtype, query/kv heads, head_dim, batch, keys, queries. Medians of alternating "
    "runs (ours, SDPA, probe, ...) through Python, allocation of the outputs included; p10 and p90 "
    "of all are in the JSON file.",
    "Cold: every call reads a set of K and V that was read longest ago, twice the last-level cache "
    "in between. Warm: the call before it read the same set.",
    "GB/s counts K and V up to each length, q and o, once. % BW is the share of a probe that only "
    "reads the same memory with all threads, in the same alternation. % FMA is the share of the "
    "vector units' float32 multiply-add peak; matrix units can exceed it. % AMX is the share of "
    "what AMX does with bfloat16 in registers.",
    "error is the largest of o over all rows, relative to the row's largest magnitude, against "
    "float64; more than twice that of plain PyTorch plus one rounding is WRONG.",
    "SDPA is scaled_dot_product_attention(enable_gqa=True) on the same K and V, with a mask only "
    "where several queries need one, and one call per sequence for ragged lengths. It takes no "
    "pages, which are shuffled.",
)


def columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    def time_of(row: dict[str, Any], name: str) -> str:
        if name in row["times"]:
            return f"{row['times'][name]['median_us']:,.1f}"
        return row["unavailable"].get(name, "-")

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.0f}"

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    def spread(times: dict[str, float]) -> str:
        return f"{times['p10_us']:,.0f}-{times['p90_us']:,.0f}"

    return [
        Column("case", [row["name"] for row in rows]),
        Column("ours us", [time_of(row, OURS) for row in rows]),
        Column("p10-p90", [spread(row["times"][OURS]) for row in rows]),
        Column("GB/s", [f"{row['bandwidth'] / 1e9:.1f}" for row in rows]),
        Column("% BW", [percent(row.get("bandwidth_share")) for row in rows]),
        Column("% FMA", [percent(row["fma_share"]) for row in rows]),
        Column("% AMX", [percent(row["amx_share"]) for row in rows]),
        Column("SDPA us", [time_of(row, SDPA) for row in rows]),
        Column("SDPA /ours", [ratio(row["sdpa_ratio"]) for row in rows]),
        Column("flex us", [time_of(row, FLEX) for row in rows]),
        Column("error", [f"{row['accuracy']['o_error']:.1e}" for row in rows]),
        Column("right", ["WRONG" if row["wrong"] else "yes" for row in rows]),
    ]


def warnings(rows: Sequence[dict[str, Any]], cpus: Sequence[int]) -> list[str]:
    messages = []
    times = [times for row in rows for times in row["times"].values()]
    left_out = sum(t["disturbed"] for t in times)
    if left_out:
        messages.append(
            f"other processes disturbed {left_out} of {left_out + sum(t['runs'] for t in times)} "
            "timed calls, which are left out"
        )
    if not cpus:
        messages.append("the threads could not be pinned; two may have shared a core")
    return messages + load_warnings([row["other_load"] for row in rows])
