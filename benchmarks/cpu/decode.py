# SPDX-License-Identifier: BSD-3-Clause
"""The local operator on the CPU, beside PyTorch's attention and the machine's ceilings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from tree_attention import _C, lean_decode

from ..harness.accuracy import Float64Check
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
from ..harness.program import shown
from ..harness.report import Column, Report, environment
from . import libraries
from .cases import DecodeCase, Inputs, kv_set_bytes, visible
from .libraries import HUB, SGLANG
from .peers import PEER_ERROR, VLLM_PAGE, Vllm, flex_attention, made, sdpa

# Reading less takes so little that the probe would time its own start.
MIN_PROBE_BYTES = 4 << 20
OURS, SDPA, FLEX, PROBE = "lean_decode", "SDPA", "flex_attention", "read probe"
SAME_DTYPE = "lean_decode, keys in q's dtype"
CONTIGUOUS = "lean_decode, contiguous keys"
VLLM = "vLLM"
PEERS = (VLLM, SGLANG, HUB)


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
    peers: Mapping[str, Callable[[DecodeCase, Inputs], Any]],
) -> dict[str, Any]:
    """Times one case; `peers` makes what is timed beside it. Returns the row as JSON values."""
    inputs = Inputs(case, arena)
    table = inputs.page_table

    def decode(i: int) -> tuple[Tensor, Tensor]:
        return lean_decode(inputs.q, *inputs.sets[i], inputs.key_ranges, page_table=table)

    def decode_8_bits(i: int) -> tuple[Tensor, Tensor]:
        k, v, scales = inputs.eight_bit_sets[i]
        return lean_decode(inputs.q, k, v, inputs.key_ranges, page_table=table, **scales)

    functions: dict[str, Callable[[int], Any]] = {OURS: decode}
    if case.kv_dtype:
        functions = {OURS: decode_8_bits, SAME_DTYPE: decode}
    if case.contiguous:
        copies = inputs.contiguous_sets()
        functions[CONTIGUOUS] = lambda i: lean_decode(inputs.q, *copies[i], inputs.key_ranges)
    if table is None:
        functions[SDPA] = sdpa(case, inputs)
    if not case.warm and kv_set_bytes(case) >= MIN_PROBE_BYTES:
        read: Sequence[tuple[Tensor, ...]] = inputs.sets
        if case.kv_dtype:
            read = [(k, v, *scales.values()) for k, v, scales in inputs.eight_bit_sets]
        buffers = [visible(case, *tensors) for tensors in read]
        functions[PROBE] = lambda i: read_memory(*buffers[i])
    if case.flex:
        peers = {FLEX: flex_attention, **peers}
    others, refusals = made(peers, case, inputs)
    functions |= others
    with Load() as load, instruction_set(case.instruction_set):
        samples = time_alternating(
            functions, num_sets=inputs.num_sets, seconds=seconds, warm=case.warm
        )
    ours = samples[OURS]
    queries = sorted({*range(0, case.seqlen_q, max(1, case.seqlen_q // 8)), case.seqlen_q - 1})
    empty: dict[str, Any] = {}
    k, v, scales = inputs.eight_bit_sets[0] if case.kv_dtype else (*inputs.sets[0], empty)
    check = Float64Check(
        inputs.q, k, v, inputs.key_ranges, queries=queries, page_table=table, **scales
    )
    accuracy = check.accuracy(*ours.result)
    row: dict[str, Any] = {
        "name": case.name,
        "case": asdict(case),
        "io_bytes": case.io_bytes,
        "operations": case.operations,
        "times": {name: sample.to_json() for name, sample in samples.items()},
        "refusals": refusals,
        "bandwidth": case.io_bytes / ours.median,
        "fma_share": case.operations / ours.median / fma_per_second,
        "amx_share": case.operations / ours.median / amx_per_second if amx_per_second else None,
        "ratios": {
            name: samples[name].median / ours.median
            for name in (SDPA, *PEERS, SAME_DTYPE, CONTIGUOUS)
            if name in samples
        },
        "other_load": load.others,
        "accuracy": asdict(accuracy),
        "peer_errors": {},
        "wrong": not accuracy.right,
    }
    for name in PEERS:
        if name in samples and not case.kv_dtype:  # they attend to the keys that were quantised
            peer = check.accuracy(samples[name].result)
            row["peer_errors"][name] = peer.o_error
            row["wrong"] |= not peer.o_error <= PEER_ERROR * peer.o_bound
    if PROBE in samples:
        probe_bytes = sum(x.nbytes for x in buffers[0])
        row["probe_bandwidth"] = probe_bytes / samples[PROBE].median
        row["bandwidth_share"] = row["bandwidth"] / row["probe_bandwidth"]
    return row


def run(
    cases: Sequence[DecodeCase],
    progress: Progress,
    *,
    seconds: float,
    paths: Sequence[Path] = (),
) -> Report:
    """Runs the cases on pinned threads; `seconds` is the timed part of each. `paths`: of the
    libraries with more peers."""
    peers = libraries.load(paths)
    if Vllm.version() is not None:
        peers[VLLM] = Vllm
    cpus = pin_threads()
    set_bytes = [kv_set_bytes(case) for case in cases]
    sets = [
        1 if case.warm else InputArena.num_sets(n) for case, n in zip(cases, set_bytes, strict=True)
    ]
    arena_bytes = max(n * count for n, count in zip(set_bytes, sets, strict=True))
    arena = InputArena(arena_bytes)
    with torch.inference_mode():
        peak, matrix_peak = fma_peak(), amx_peak()
        rows = [
            run_case(case, arena, seconds, peak, matrix_peak, peers)
            for case in shown(progress, cases)
        ]
    probes = [row["probe_bandwidth"] / 1e9 for row in rows if "probe_bandwidth" in row]
    header = environment(
        **{
            "pinned to CPUs": cpus or "not pinned",
            "float32 multiply-add peak": f"{peak / 1e9:.0f} GFLOP/s",
            "bfloat16 peak of AMX": f"{matrix_peak / 1e9:.0f} GFLOP/s" if matrix_peak else "no AMX",
            "read bandwidth": (
                f"{min(probes):.1f} to {max(probes):.1f} GB/s over the rows" if probes else "none"
            ),
            "vLLM": Vllm.version() or "not installed",
            **({"libraries of peers": ", ".join(path.name for path in paths)} if paths else {}),
            "cold inputs rotate over": f"{arena_bytes >> 20} MiB",
        }
    )
    return Report(
        name=name_of_results("decode_peers" if paths else "decode"),
        title="lean_decode on one process",
        notes=NOTES + (LIBRARY_NOTES if paths else ()),
        environment=header,
        rows=rows,
        columns=columns(rows),
        warnings=warnings(rows, cpus),
        summary=left_out(rows, [name for name in (SGLANG, HUB) if paths and name not in peers]),
    )


def left_out(rows: Sequence[dict[str, Any]], without_library: Sequence[str]) -> list[str]:
    """Sentences about the peers that are not there, and that do not take a case."""
    sentences = [f"{name} is left out: no library of --peers has it." for name in without_library]
    cases: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, why in row["refusals"].items():
            cases.setdefault((name, why), []).append(row["name"])
    return sentences + [
        f"{name} is left out of {'; '.join(names)}: {why}" for (name, why), names in cases.items()
    ]


def name_of_results(name: str = "decode") -> str:
    """Return the results' name: those of CPUs with and without AMX stand side by side."""
    instruction_set = _C.cpu_instruction_set()
    return name if instruction_set == "amx" else f"{name}_{instruction_set}"


NOTES = (
    "A row is named dtype, query/kv heads, head_dim, batch, keys, queries. Medians of alternating "
    "runs (ours, SDPA, probe, ...) through Python, allocation of the outputs included.",
    "Cold: every call reads a set of K and V that was read longest ago, twice the last-level cache "
    "in between. Warm: the call before it read the same set.",
    "GB/s counts K and V up to each length, q and o, once. % BW is the share of a probe that only "
    "reads the same memory with all threads, in the same alternation. % FMA is the share of the "
    "vector units' float32 multiply-add peak; matrix units can exceed it. % AMX is the share of "
    "what AMX does with bfloat16 in registers.",
    "error is the largest of o over all rows, relative to the row's largest magnitude, against "
    "float64; more than twice that of plain PyTorch plus one rounding is WRONG.",
    "Keys int8 or float8 have a float32 scale per token and head, which count as bytes. The column "
    "16-bit is the same call on the bfloat16 keys and values that were quantised, in the same "
    "alternation; SDPA and vLLM read those, too.",
    "SDPA is scaled_dot_product_attention(enable_gqa=True) on the same K and V, with a mask only "
    "where several queries need one, and one call per sequence for ragged lengths. It takes no "
    "pages.",
    "vLLM, where installed, is the call of its CPU attention on caches that it has packed, without "
    "the plan that a step makes for all layers; where our keys are contiguous its pages have "
    f"{VLLM_PAGE} keys. A peer's error may be {PEER_ERROR} times as large as ours before it is "
    "WRONG.",
)
LIBRARY_NOTES = (
    f"{SGLANG}: decode_attention_cpu over a pool of tokens, whose slots are in the order of our "
    "pages or keys, without storing the new token; for several queries extend_attention_cpu, which "
    "takes the last keys beside the pool. Outputs exist before the call.",
    f"{HUB}: the CPU backend of the hub's flash-attention package, varlen_fwd, on keys and values "
    "of all sequences end to end, into an output that exists.",
    "Contiguous: our call on the keys of the pages as contiguous tensors, with the same "
    "key_ranges, in the same alternation.",
)


def columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """The columns in which at least one row has something."""

    def time_of(row: dict[str, Any], name: str) -> str:
        return f"{row['times'][name]['median_us']:,.1f}" if name in row["times"] else "-"

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.0f}"

    def spread(times: dict[str, float]) -> str:
        return f"{times['p10_us']:,.0f}-{times['p90_us']:,.0f}"

    def ratio(row: dict[str, Any], name: str) -> str:
        return f"{row['ratios'][name]:.2f}" if name in row["ratios"] else "-"

    def share(row: dict[str, Any], name: str) -> str:
        return f"{1 / row['ratios'][name]:.2f}" if name in row["ratios"] else "-"

    def error(row: dict[str, Any], name: str) -> str:
        return f"{row['peer_errors'][name]:.1e}" if name in row["peer_errors"] else "-"

    peers = [
        column
        for name in PEERS
        for column in (
            Column(f"{name} us", [time_of(row, name) for row in rows]),
            Column(f"{name} /ours", [ratio(row, name) for row in rows]),
            Column(f"{name} error", [error(row, name) for row in rows]),
        )
    ]
    every = [
        Column("case", [row["name"] for row in rows]),
        Column("ours us", [time_of(row, OURS) for row in rows]),
        Column("p10-p90", [spread(row["times"][OURS]) for row in rows]),
        Column("GB/s", [f"{row['bandwidth'] / 1e9:.1f}" for row in rows]),
        Column("% BW", [percent(row.get("bandwidth_share")) for row in rows]),
        Column("% FMA", [percent(row["fma_share"]) for row in rows]),
        Column("% AMX", [percent(row["amx_share"]) for row in rows]),
        Column("SDPA us", [time_of(row, SDPA) for row in rows]),
        Column("SDPA /ours", [ratio(row, SDPA) for row in rows]),
        Column("flex us", [time_of(row, FLEX) for row in rows]),
        Column("16-bit us", [time_of(row, SAME_DTYPE) for row in rows]),
        Column("ours /16-bit", [share(row, SAME_DTYPE) for row in rows]),
        Column("contiguous us", [time_of(row, CONTIGUOUS) for row in rows]),
        Column("ours /contiguous", [share(row, CONTIGUOUS) for row in rows]),
        *peers,
        Column("error", [f"{row['accuracy']['o_error']:.1e}" for row in rows]),
        Column("right", ["WRONG" if row["wrong"] else "yes" for row in rows]),
    ]
    return [column for column in every if set(column.values) != {"-"}]


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
