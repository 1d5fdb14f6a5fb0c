# SPDX-License-Identifier: BSD-3-Clause
"""Predicted times of `lean_decode` on a GPU, by arithmetic alone, beside measured ones.

    python -m benchmarks.cuda.predict            # the table of results/cuda_predicted.md
    python -m benchmarks.cuda.predict --write    # puts it there, with what benchmarks/results has
    python -m benchmarks.cuda.predict --take OUT/results.tar.gz --write    # of scripts/gpu_check.sh

A launch takes its fixed latencies, and between them the longest of: all bytes at the rate of the
memory; the tiles of the busiest multiprocessor at the rate of its shared memory, issue slots or
tensor cores; the tiles of one block at the rate at which a warp's instructions follow each other.
The model knows queries of 16 bits, up to 128 packed rows, and head_dims up to 128, and latents of
576 columns.
"""

import argparse
import json
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tree_attention.planning.machines import MACHINES

from ..harness.report import ROOT, commit
from .cases import (
    EIGHT_BITS,
    LATENTS,
    MANY_ROWS,
    OURS,
    PAPERS,
    QUERIES,
    CudaCase,
    K,
    quick_cases,
)
from .peers import WORKERS

RESULTS = ROOT / "benchmarks" / "results"
PAGE = RESULTS / "cuda_predicted.md"
BEGIN = "<!-- the table of python -m benchmarks.cuda.predict --write -->\n"
BEGIN_RUN = "<!-- what predict.py says of the run on an H100, by the same --write -->\n"
BEGIN_WGMMA = "<!-- what predict.py says of the kernel by wgmma, by the same --write -->\n"
END = "<!-- its end -->\n"
# What scripts/gpu_check.sh measures for benchmarks/results: reports, and whether their rows are
# kept as well.
REPORTS = {
    **dict.fromkeys(("decode_cuda_quick", "decode_cuda", "stamps_cuda"), True),
    **dict.fromkeys(("lost_device_cuda", "profile_cuda"), True),
    "tune_cuda": False,
}
PEERS = ("cuDNN us", "FlashInfer us", "FA3 us", "FlashMLA us", "flash us")
# Tables of the page that are those of reports, with all columns where none are named.
SHOWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "peers": ("decode_cuda_quick", ("case", "ours us", "% read", "best /ours", *PEERS, "right")),
    "workers": ("decode_cuda_quick", ("case", "ours us", *WORKERS)),
    "stretches": ("stamps_cuda", ()),
    "profile": ("profile_cuda", ()),
    "lost device": ("lost_device_cuda", ()),
}
OVERHEAD_TILES, MIN_WORKER_TILES = 1, 2  # csrc/cuda/decode/schedule.cuh
MOST_WHOLE_TILES = 4  # csrc/cuda/decode/plan.cu
MAX_MERGED_PARTS, MAX_MERGED_ROWS, RADIX = 36, 8, 16  # csrc/common/fixup.h


@dataclass(frozen=True)
class Gpu:
    """A GPU. All from `read_efficiency` on is assumed: profiles are to correct it.
    `clocks_per_step` and `publish_us` place the fixed times of the run on an H100."""

    multiprocessors: int
    clock: float  # under load, Hz
    read_bandwidth: float  # of a kernel that only reads, bytes per second
    shared_bytes: int = 128  # per clock of a multiprocessor, as the next three
    l2_bytes: int = 64  # that come to a multiprocessor per clock
    issue_slots: int = 4
    products: int = 1300  # multiply-adds of 16 bits by mma.sync
    wgmma_products: int = 2048  # the same by wgmma: 989 TFLOPS of 132 at 1.83 GHz (datasheet)
    read_efficiency: float = 0.96  # share of read_bandwidth that a long launch keeps
    clocks_per_instruction: float = 4.0  # of a warp that waits for nothing but its own results
    clocks_per_step: float = (
        5.0  # of an instruction outside the loop, where each waits for the last
    )
    launch_us: float = 2.2  # between kernels of a graph, with the start and end of the blocks
    memory_us: float = 0.8  # from the first request to its data
    l2_us: float = 0.2  # a load of what another block has stored
    publish_us: float = 1.35  # storing a partial state, the fence, the counter, two barriers
    # Two barriers of a cluster and two loads from another multiprocessor's shared memory between
    # them: about 180 clocks for each load (arXiv:2402.13499), and as many for a barrier.
    cluster_us: float = 4 * 180 / 1.755e3


@dataclass(frozen=True)
class Step:
    """Instructions of one warp for 16 keys and all of its rows."""

    fragments: int  # mma and ldmatrix of 128 columns
    softmax: int
    widening: Mapping[str, int]  # 8 bits to 16 of 128 columns, and the scales


@dataclass(frozen=True)
class Code:
    """Instructions of one warp that masks nothing, for sm_90, and the serial steps of a launch."""

    addresses: int  # for a quarter of the requests of a tile
    page_addresses: int  # what pages add
    # Instructions outside the loop, one after the other: before the first request; from the last
    # product to the fence; of a merge from its arrival to the weights, for each level of a tree of
    # lse, and for each turn of loads; of a merge in a cluster.
    prologue: int
    end: int
    merge: int
    merge_level: int
    merge_turn: int
    cluster_merge: int
    merge_loads: int  # parts that a merge asks for at a time
    lse_trips: int  # to memory for the weights of a merge, before the first parts come
    steps: Mapping[int, Step]  # by the rows of a warp
    merges_by_rows: bool  # whether parts of many rows are merged in smaller groups
    two_levels: bool  # whether workers are so few that two levels of merges do
    clusters: bool  # whether a worker is a cluster of blocks where outputs have several each
    in_step: bool  # whether blocks of rows read the same keys at the same time (line_order.py)
    requests: int = 16  # a quarter of those of a tile
    loop: int = 55  # of a tile, with the maxima and sums of its rows
    # A whole tile of latents, by its rows: of contiguous keys, and of pages.
    latents: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    # A whole tile of the kernel by wgmma whose maxima stay, by columns and rows. Others have none.
    wgmma: Mapping[tuple[int, int], int] = field(default_factory=dict)


# Share of the peak that a kernel which only reads reaches: 4.3 of 4.8 TB/s, an assumption until the
# probe of `python benchmarks/decode.py --device cuda` has run.
READ_SHARE = 4.3 / 4.8
H200 = Gpu(
    MACHINES["h200"].multiprocessors,
    clock=1.755e9,
    read_bandwidth=READ_SHARE * MACHINES["h200"].memory_bandwidth,
)
# The shortest way around the tile loop that copies and multiplies: 468 instructions, and 646 with
# pages (tests/cuda/sass_paths.py).
BEFORE = Code(
    addresses=225,
    page_addresses=178,
    prologue=575 + 2 * 84,
    end=251 + 2 * 84,
    merge=120,
    merge_level=100,
    merge_turn=150,
    cluster_merge=0,
    merge_loads=8,
    lse_trips=1,
    steps={16: Step(48, 124, {"int8": 438, "fp8": 502})},
    merges_by_rows=False,
    two_levels=False,
    clusters=False,
    in_step=False,
)
# What ran on the H100, at 51e5468: 300 and 363 with 8 rows, 333 and 384 with 16. 16 keys have 297
# instructions for int8 and 216 for float8 with 8 rows, 390 and 308 with 16.
RAN = replace(
    BEFORE,
    addresses=90,
    page_addresses=51,
    prologue=349 + 84,
    lse_trips=0,
    steps={
        8: Step(32, 107, {"int8": 158, "fp8": 77}),
        16: Step(48, 124, {"int8": 218, "fp8": 136}),
    },
    merges_by_rows=True,
    in_step=True,
    latents={16: (585, 666), 64: (768, 803)},
)
# The shortest ways of the code for 8 rows and 128 columns, where the host knows the line.
NOW = replace(
    RAN,
    prologue=266,
    end=221,
    merge=190,
    merge_level=0,
    merge_turn=100,
    cluster_merge=350,
    two_levels=True,
    clusters=True,
    steps={
        8: Step(32, 115, {"int8": 158, "fp8": 77}),
        16: Step(48, 131, {"int8": 218, "fp8": 136}),
    },
    latents={16: (613, 689), 64: (789, 819)},
)
# The kernel by wgmma (csrc/cuda/decode/lean_decode_wgmma.cuh), of workers that are single blocks.
WGMMA = replace(
    NOW,
    clusters=False,
    wgmma={
        **{(64, 32): 459, (64, 64): 783, (128, 32): 526, (128, 64): 850},
        **{(576, 16): 749, (576, 32): 923},
    },
)

# By the read rate of its probe; and what `RAN` took there, in us.
H100 = replace(H200, read_bandwidth=3.12e12)
H100_RUN = {
    **{"bf16 32/8 d128 B=1 1k": 11.9, "bf16 32/8 d128 B=1 16k": 35.0},
    **{"bf16 32/8 d128 B=1 64k": 100.0, "bf16 32/8 d128 B=8 8k": 97.1},
    **{"bf16 32/8 d128 B=1 1M": 1396.0, "bf16 8/1 d128 B=1 128k": 42.0},
    **{"bf16 32/8 d128 B=64 63x1k+1M packed": 1499.0, "bf16 32/8 d128 B=8 16k q=4": 192.0},
    **{"bf16 32/8 d128 B=1 64k q=16": 160.0, "bf16 32/8 d128 B=8 16k page 16": 191.0},
    **{"bf16/int8 32/8 d128 B=1 64k": 58.9, "bf16 56/56 d64 B=1 64k": 313.0},
    **{"bf16 16/1 d576/512 B=1 64k": 113.0},
}


@dataclass(frozen=True)
class Tile:
    """As csrc/cuda/decode/tile_config.cuh and plan.cu choose it."""

    rows: int
    warps: int
    blocks: int  # on a multiprocessor
    keys: int
    num_bytes: int  # of K and V, or of latents
    column_groups: int = 1

    @staticmethod
    def of(case: CudaCase, least_rows: int = 8) -> "Tile":
        if (case.head_dim, case.latent_dim, case.kv_dtype) == (576, 512, ""):
            num_bytes = 32 * case.head_dim * case.cached_dtype.itemsize
            if packed_rows(case) <= 16:
                return Tile(16, 4, 2, 32, num_bytes, column_groups=4)
            return Tile(64, 8, 1, 32, num_bytes, column_groups=2)
        if case.dtype == "fp32" or case.head_dim > 128 or case.latent_dim:
            raise ValueError(f"{case.name}: the model has no such kernel")
        sizes = (8, 16, 64) if case.kv_dtype else (8, 16, 32, 64, 128)
        rows = next((n for n in sizes if n >= max(packed_rows(case), least_rows)), sizes[-1])
        columns = columns_of(case)
        keys = 1 << (16 * K // (columns * case.cached_dtype.itemsize)).bit_length() - 1
        warps = 8 if rows > 64 else 4
        num_bytes = 2 * keys * case.head_dim * case.cached_dtype.itemsize
        return Tile(rows, warps, 2 if warps == 4 else 1, keys, num_bytes)

    @staticmethod
    def by_wgmma(case: CudaCase) -> "Tile":
        """As csrc/cuda/decode/wgmma_config.cuh chooses it."""
        least = 16 if case.latent_dim else 32
        rows = least if packed_rows(case) <= least else 2 * least
        blocks = 2 if rows * (case.latent_dim or columns_of(case)) <= 64 * 64 else 1
        columns = case.head_dim if case.latent_dim else 2 * case.head_dim
        return Tile(rows, 4, blocks, 64, 64 * columns * case.cached_dtype.itemsize)

    @property
    def row_groups(self) -> int:
        return self.rows // self.warp_rows

    @property
    def warp_rows(self) -> int:
        return min(self.rows, 16)


def columns_of(case: CudaCase) -> int:
    """Columns of the kernel: those beyond head_dim are not read, and computed with as zeros."""
    return 64 if case.head_dim <= 64 else 128


def in_step(workers: int, row_blocks: int) -> int:
    """Rounded as csrc/cuda/decode/plan.cu does it for blocks of rows that read the same keys."""
    rest = workers % row_blocks
    return workers - rest if 16 * rest <= workers else workers


def workers_of(
    case: CudaCase, tile: Tile, blocks: int, resident: int, max_merged: int
) -> tuple[int, int]:
    """Return the blocks of a worker, and the workers, as csrc/cuda/decode/plan.cu chooses them
    where so many blocks are resident and have work."""
    outputs = case.heads[1] * -(-packed_rows(case) // tile.rows) * len(case.lengths)
    of_output = blocks // outputs
    in_eights = resident - resident // 9
    if tile.rows > 16 or of_output < 2:
        return 1, blocks
    if of_output > max_merged:
        return 8, min(blocks, in_eights) // 8
    size = min(8, 1 << of_output.bit_length() - 1)
    fits = size < 8 or size * outputs <= in_eights
    tiles = -(-max(case.lengths) // tile.keys)
    most_tiles = -(-tiles // size)
    if fits and (8 * size * outputs >= 7 * blocks or most_tiles <= MOST_WHOLE_TILES):
        return size, outputs
    return 1, blocks


def packed_rows(case: CudaCase) -> int:
    return case.heads[0] // case.heads[1] * case.seqlen_q


@dataclass(frozen=True)
class Prediction:
    us: float
    share: float  # of the read bandwidth
    bound: str  # what takes the most of the time


def bytes_of_products(case: CudaCase, tile: Tile) -> float:
    """Return the bytes that wgmma reads from shared memory for one tile: K and the queries, then V
    and for each 64 of its columns the weights."""
    values = case.latent_dim or case.head_dim
    keys_and_values = tile.keys * 2 * (case.head_dim + values)
    return keys_and_values + 2 * tile.rows * (case.head_dim + tile.keys * -(-values // 64))


def shared_bytes(case: CudaCase, tile: Tile) -> float:
    """Return the bytes that shared memory moves for one tile."""
    if not case.latent_dim:
        return tile.num_bytes * (1 + tile.row_groups)
    # K and V are read by each row group, 64 rows of queries again for each step of 16 keys. Each
    # warp leaves its products, and reads those of the other column group, or of all four.
    keys_and_values = tile.num_bytes * (1 + case.latent_dim / case.head_dim) * tile.row_groups
    queries = 2 * tile.rows * case.head_dim * 2 if tile.rows > 16 else 0
    products = 4 * tile.rows * tile.keys * tile.column_groups
    readings = 1 if tile.column_groups == 2 else tile.column_groups
    return tile.num_bytes + keys_and_values + queries + products * (1 + readings)


def instructions(case: CudaCase, tile: Tile, code: Code) -> float:
    """Return the number of instructions that one warp executes for one tile."""
    if code.wgmma:
        return code.wgmma[case.head_dim if case.latent_dim else columns_of(case), tile.rows]
    if case.latent_dim:
        return code.latents[tile.rows][case.page_size > 0]
    quarter = 4 / tile.warps
    steps = tile.keys * tile.row_groups // tile.warps / 16
    addresses = code.addresses + (code.page_addresses if case.page_size else 0)
    step = code.steps[tile.warp_rows]
    products = step.fragments + step.widening.get(case.kv_dtype, 0)
    of_step = products * columns_of(case) / 128 + step.softmax
    return quarter * (addresses + code.requests) + code.loop + steps * of_step


def steps_us(instructions: float, machine: Gpu) -> float:
    return instructions * machine.clocks_per_step / machine.clock * 1e6


def merges_of(parts: int, max_merged: int) -> list[int]:
    """Return the parts of each merge on the way to an output, as fix_up of csrc/common/fixup.h
    takes its levels."""
    merges = []
    while parts > max_merged:
        merges.append(RADIX)
        parts = -(-parts // RADIX)
    return [*merges, parts]


def fixup_us(
    parts: int, code: Code, machine: Gpu, part_bytes: int = 0, max_merged: int = MAX_MERGED_PARTS
) -> float:
    """Merging the parts of one output, level by level: their lse, then their o. One block merges
    the parts of a step, and all of them come to its multiprocessor."""
    us = 0.0
    for n in merges_of(parts, max_merged):
        turns = -(-n // code.merge_loads)
        waits = (code.lse_trips + turns) * machine.l2_us
        transfer = n * part_bytes / machine.l2_bytes / machine.clock * 1e6
        levels = (n - 1).bit_length() * code.merge_level
        serial = steps_us(code.merge + levels + turns * code.merge_turn, machine)
        us += machine.publish_us + serial + max(waits, transfer)
    return us


def clocks_of(
    case: CudaCase, tile: Tile, code: Code, machine: Gpu, resident: int
) -> dict[str, float]:
    """Return the clocks of a tile by what may bound them, where so many blocks are resident on a
    multiprocessor. With wgmma a block's products and its softmax follow one another."""
    of_warp = instructions(case, tile, code)
    columns = case.head_dim + (case.latent_dim or case.head_dim)
    latency = of_warp * machine.clocks_per_instruction
    products = tile.keys * columns * tile.rows
    if code.wgmma:
        read = bytes_of_products(case, tile)
        moved = tile.num_bytes + read + 2 * tile.rows * tile.keys
        tensor_cores = products / machine.wgmma_products
        latency += max(tensor_cores, read / machine.shared_bytes)
    else:
        moved = shared_bytes(case, tile)
        tensor_cores = products / machine.products
    return {
        "shared memory": moved / machine.shared_bytes * resident,
        "issue slots": of_warp * tile.warps / machine.issue_slots * resident,
        "tensor cores": tensor_cores * resident,
        "instruction latency": latency,
    }


def predict(case: CudaCase, code: Code = NOW, machine: Gpu = H200) -> Prediction:
    tile = Tile.by_wgmma(case) if code.wgmma else Tile.of(case, min(code.steps))
    row_blocks = -(-packed_rows(case) // tile.rows)
    outputs = case.heads[1] * row_blocks  # of a sequence
    tiles = [-(-n // tile.keys) - case.first_key(n) // tile.keys for n in case.lengths]
    line = outputs * sum(OVERHEAD_TILES + n for n in tiles)
    resident_blocks = tile.blocks * machine.multiprocessors
    rows = min(packed_rows(case), tile.rows)
    max_merged = RADIX if code.merges_by_rows and rows > MAX_MERGED_ROWS else MAX_MERGED_PARTS
    # The host knows shapes alone: it plans for the longest sequence, without its window.
    longest_line = outputs * len(tiles) * (OVERHEAD_TILES + -(-max(case.lengths) // tile.keys))
    workers = min(in_step(resident_blocks, row_blocks), -(-longest_line // MIN_WORKER_TILES))
    size = 1
    if code.clusters:
        size, workers = workers_of(case, tile, workers, resident_blocks, max_merged)
    workers = min(workers, -(-line // MIN_WORKER_TILES))
    if code.two_levels:
        workers = min(workers, RADIX * max_merged * outputs * len(case.lengths))
    range_of_worker = -(-line // workers)  # of the line
    # A single block has outputs' overhead in its range; blocks of a cluster share out tiles alone.
    longest = range_of_worker if size == 1 else -(-(range_of_worker - OVERHEAD_TILES) // size)
    resident = -(-workers * size // machine.multiprocessors)  # blocks of a multiprocessor
    clocks = clocks_of(case, tile, code, machine, resident)
    times = {name: longest * count / machine.clock * 1e6 for name, count in clocks.items()}
    reads_once = code.in_step and workers % row_blocks == 0
    read = case.read_bytes * (1 if reads_once else row_blocks)
    times["DRAM"] = read / (machine.read_bandwidth * machine.read_efficiency) * 1e6

    most_parts = min(workers, -(-max(tiles) // range_of_worker) + 1)
    is_whole = max(tiles) + OVERHEAD_TILES == range_of_worker  # every output, by one worker
    part_bytes = 4 * (case.latent_dim or case.head_dim) * rows
    fixup = 0.0 if is_whole else fixup_us(most_parts, code, machine, part_bytes, max_merged)
    serial = steps_us(code.prologue + code.end, machine)
    if size > 1:
        serial += steps_us(code.cluster_merge, machine) + machine.cluster_us
    fixed = machine.launch_us + machine.memory_us + serial + fixup

    bound = max(times, key=lambda name: times[name])
    us = fixed + times[bound]
    share = case.io_bytes / us * 1e6 / machine.read_bandwidth
    return Prediction(us, share, "launch and fix-up" if fixed > times[bound] else bound)


def shapes() -> list[CudaCase]:
    """The benchmark's quick cases, and those that other parts of a multiprocessor bound."""
    more = [CudaCase(lengths=(32 * K,) * 8)]
    more += [CudaCase(QUERIES, lengths=(16 * K,) * 8, seqlen_q=n) for n in (8, 16)]
    more += [CudaCase(QUERIES, heads=(64, 8), lengths=(16 * K,) * 8, seqlen_q=16)]
    more += [CudaCase(EIGHT_BITS, kv_dtype="fp8", lengths=(8 * K,) * 8)]
    more += [
        CudaCase(PAPERS, heads=(24, 24), head_dim=64, lengths=(n * K,) * 4) for n in (1, 64, 512)
    ]
    return list(dict.fromkeys([*quick_cases(), *more, *LATENTS]))


def measured(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Right rows of the CUDA benchmark by name; those of the longer runs where both have one."""
    rows: dict[str, Mapping[str, Any]] = {}
    for path in sorted(folder.glob("decode_cuda*.json"), reverse=True):
        for row in json.loads(path.read_text())["rows"]:
            if not row["wrong"] and OURS in row["times"]:
                rows[row["name"]] = row
    return rows


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown. The last three columns are empty where nothing was measured."""
    lines = [
        "| shape | predicted before, us | predicted, us | predicted share of the read rate "
        "| bound by | measured, us | measured share of the read rate "
        "| measured share of reading as many bytes |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for case in shapes():
        now = predict(case, NOW)
        before = "" if case.latent_dim else _us(predict(case, BEFORE).us)
        found = ["", "", ""]
        if (row := rows.get(case.name)) is not None:
            shares = (row.get(name) for name in ("ceiling_share", "read_share"))
            found = [_us(row["times"][OURS]["median_us"])]
            found += ["" if share is None else _percent(share) for share in shares]
        predicted = [before, _us(now.us), _percent(now.share), now.bound]
        cells = [case.name, *predicted, *found]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table_of_the_run() -> str:
    """Markdown: the model of the code that ran on the H100 beside what it took, and of the code of
    now there."""
    lines = ["| shape | predicted, us | measured, us | measured / predicted | predicted now, us |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for case in shapes():
        if (measured_us := H100_RUN.get(case.name)) is not None:
            ran = predict(case, RAN, H100).us
            cells = [_us(ran), _us(measured_us), f"{measured_us / ran:.2f}"]
            cells += [_us(predict(case, NOW, H100).us)]
            lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table_of_wgmma() -> str:
    """Markdown: the kernel by wgmma, where every instruction waits for the one before it and where
    two of them overlap, beside the kernel that it is to replace."""
    overlapping = replace(H200, clocks_per_instruction=H200.clocks_per_instruction / 2)
    lines = [
        "| shape | every instruction waits, us | bound by | two overlap, us | bound by "
        "| the kernel of now, us | the same on the H100, measured, us |",
        "| --- | ---: | --- | ---: | --- | ---: | ---: |",
    ]
    rows = [MANY_ROWS, replace(MANY_ROWS, head_dim=64)]
    rows += [replace(case, seqlen_q=8) for case in rows]
    for case in (*LATENTS, *rows):
        waits, overlaps = (predict(case, WGMMA, machine) for machine in (H200, overlapping))
        cells = [_us(waits.us), waits.bound, _us(overlaps.us), overlaps.bound]
        cells += [_us(predict(case).us), _us(H100_RUN[case.name]) if case.name in H100_RUN else ""]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def begin_of(what: str) -> str:
    return f"<!-- {what}: of {SHOWN[what][0]}.md of the results, by the same --write -->\n"


def table_of_report(page: Path, columns: Sequence[str]) -> str:
    """Markdown: those columns of a report's table that it has, and the rows that have something in
    the ones of implementations."""
    if not page.exists():
        return "Not measured yet.\n"
    first, _, *others = (x for x in page.read_text().splitlines() if x.startswith("| "))
    cells = [line.strip("|").split(" | ") for line in (first, *others)]
    heading = [cell.strip() for cell in cells[0]]
    kept = [i for i, name in enumerate(heading) if not columns or name in columns]
    rows = [[row[i].strip() for i in kept] for row in cells]
    of_workers = [j for j, i in enumerate(kept) if heading[i] in WORKERS]
    rows = [row for row in rows if not of_workers or any(row[j] != "-" for j in of_workers)]
    rows.insert(1, ["---", *["---:"] * (len(kept) - 1)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def filled(page: str, folder: Path) -> str:
    """The page with the tables between their marks."""
    tables = {BEGIN: table(measured(folder)), BEGIN_RUN: table_of_the_run()}
    tables[BEGIN_WGMMA] = table_of_wgmma()
    tables |= {
        begin_of(what): table_of_report(folder / f"{name}.md", columns)
        for what, (name, columns) in SHOWN.items()
    }
    for begin, text in tables.items():
        head, rest = page.split(begin)
        page = head + begin + text + END + rest.split(END, 1)[1]
    return page


def take(archive: Path, folder: Path) -> None:
    """Puts the reports of results.tar.gz into the folder. Where they were measured there may have
    been no checkout: the sources are those of this one."""
    with tarfile.open(archive) as found:
        names = found.getnames()
        for name, keeps_rows in REPORTS.items():
            if f"{name}.md" not in names:
                print(f"{archive} has no {name}.md: it was not measured, or not to its end")
                continue
            for suffix in (".md", ".json") if keeps_rows else (".md",):
                file = found.extractfile(f"{name}{suffix}")
                assert file is not None
                text = file.read().decode()
                for mark in ("commit: ", '"commit": "'):
                    text = text.replace(f"{mark}not a checkout", f"{mark}{commit()}")
                (folder / f"{name}{suffix}").write_text(text)


def _us(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Predicts the times of lean_decode on a GPU.")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default here")
    parser.add_argument(
        "--take", type=Path, nargs="+", default=[], metavar="FILE",
        help="results.tar.gz of scripts/gpu_check.sh, whose reports go into the results",
    )  # fmt: skip
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    parsed = parser.parse_args(arguments)
    for archive in parsed.take:
        take(archive, parsed.results)
    if parsed.write:
        PAGE.write_text(filled(PAGE.read_text(), parsed.results))
    else:
        print(table(measured(parsed.results)), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
