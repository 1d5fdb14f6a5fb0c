# SPDX-License-Identifier: BSD-3-Clause
"""Plain values that the pictures of `benchmarks/pictures.py` show.

Times are read from the tables in benchmarks/results; memory and schedules are computed.
"""

import re
from dataclasses import replace

import torch

from benchmarks.harness.results import number, read_table
from benchmarks.papers.algorithms.lean import AsPrinted, outcome
from tree_attention import lean_schedule
from tree_attention.planning.arithmetic import SPLIT_BY_HEADS, Split, Work
from tree_attention.planning.models import NAMED

Line = list[tuple[float, float]]  # points (x, y) in the order of x


def tokens() -> dict[str, dict[str, Line]]:
    """Return ms per token by context: HuggingFace's caches, other engines, and ours."""
    names = {
        "sdpa, DynamicCache": "HuggingFace, DynamicCache",
        "sdpa, StaticCache": "HuggingFace, StaticCache",
        "tree_attention, world 1": "ours",
    }
    engines = {"ours": "ours", "vllm": "vLLM", "openvino": "OpenVINO"}
    models: dict[str, dict[str, Line]] = {"8 of 16 layers": {}, "4 of 16 layers": {}}
    for row in read_table("llama").rows:
        if name := names.get(row["method"]):
            point = number(row["context"]), number(row["ms /token"])
            models["8 of 16 layers"].setdefault(name, []).append(point)
    for row in read_table("engines").rows:
        if name := engines.get(row["engine"]):
            point = number(row["context"]), number(row["decode ms"])
            models["4 of 16 layers"].setdefault(name, []).append(point)
    return models


CLUSTERS = {
    "lan p=4": "4 hosts, links of 0.1 ms and 10 Gb/s",
    "metro p=8": "8 hosts, links of 1 ms and 1 Gb/s",
}


def contexts() -> dict[str, dict[str, Line]]:
    """Return ms per step by keys per rank: ours, pass-Q, ring, and the ring at line rate."""
    table = read_table("contexts")
    clusters: dict[str, dict[str, Line]] = {}
    for cluster in CLUSTERS:
        methods: dict[str, Line] = {}
        for row in table.rows:
            found = re.fullmatch(rf"{cluster} B=1 n=(\d+)", row["case"])
            if found:
                name = {"ring": "ring", "ring, passing queries": "pass-Q"}.get(row["method"])
                point = float(found[1]), number(row["ms"])
                methods.setdefault(name or "ours", []).append(point)
        place = cluster.replace(" p=", "/")
        (note,) = (x for x in table.notes if x.startswith(f"{place}: ring / tree"))
        rate = {
            float(keys.replace(",", "")): float(ratio.replace(",", ""))
            for ratio, keys in re.findall(r"([\d.,]+) at ([\d,]*\d)", note.split("line rate: ")[1])
        }
        methods["ring at line rate"] = [(n, ms * rate[n]) for n, ms in methods["ours"]]
        clusters[cluster] = methods
    return clusters


FORMS = {
    "1 process, 2 threads": "one process,\ntwo threads",
    "weights whole, prompt split": "two ranks,\nweights whole",
    "weights split, tensor_parallel_size 1": "two ranks,\nweights split",
    "weights split, tensor_parallel_size 2": "two ranks,\nweights and\nheads split",
}


def two_ranks() -> dict[str, dict[str, Line]]:
    """Return gains over one process with one thread by place: (prompt, token) of each form."""
    rows = read_table("scaling").rows
    (one,) = (row for row in rows if row["form"] == "1 process, 1 thread")
    places: dict[str, dict[str, Line]] = {}
    for row in rows:
        place = row["place/ranks"].split("/")[0]
        if row["form"] in FORMS:
            gains = [number(one[key]) / number(row[key]) for key in ("prefill s", "ms /token")]
            places.setdefault(place, {})[FORMS[row["form"]]] = [(gains[0], gains[1])]
    return places


MODEL, CONTEXT, RANKS = NAMED["llama-3.1-70b"], 1 << 20, (2, 4, 8, 16, 32)


def cache_memory() -> dict[str, list[float]]:
    """Return GB on each of so many ranks: weights in bf16, and the cache in bf16 and int8."""
    work = Work(context=CONTEXT)
    shapes = {name: replace(MODEL, kv_dtype=name) for name in ("bf16", "int8")}
    return {
        "weights": [Split(MODEL, SPLIT_BY_HEADS, p, work).weights_bytes / 1e9 for p in RANKS],
        **{
            name: [Split(shape, SPLIT_BY_HEADS, p, work).cache_bytes / 1e9 for p in RANKS]
            for name, shape in shapes.items()
        },
    }


def schedules() -> dict[str, list[list[int]]]:
    """Return rows (worker, head, first tile, end) of LeanAttention's Figure 1: 5 tiles a head."""
    lean = lean_schedule(torch.tensor([5, 5], dtype=torch.int32), 5).tolist()
    return {
        "FlashAttention-2: one worker for a head": [[0, 0, 0, 5], [1, 1, 0, 5]],
        "FlashDecoding: a fixed split in two": [
            [0, 0, 0, 3],
            [1, 0, 3, 5],
            [2, 1, 0, 3],
            [3, 1, 3, 5],
        ],
        "LeanAttention, as lean_schedule deals it": lean,
    }


OUTPUTS, ITERATIONS, CTAS = (1, 2, 7), 24, 12


def algorithm_4() -> dict[str, list[list[str]]]:
    """Return outcomes of Algorithm 4 by iterations of a tile and CTAs, for numbers of tiles."""
    return {
        str(outputs): [
            [outcome(AsPrinted(outputs, tile, ctas)) for tile in range(1, ITERATIONS + 1)]
            for ctas in range(1, CTAS + 1)
        ]
        for outputs in OUTPUTS
    }
