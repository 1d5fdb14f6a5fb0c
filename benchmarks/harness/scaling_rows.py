# SPDX-License-Identifier: BSD-3-Clause
"""The rows of scaling.py beside one process, and what they mean."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from ..emulation.configuration import BARE
from ..emulation.tables import milliseconds
from .report import Column, columns_of, verdict

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
TRUTH = "float32"
_MIB = 1 << 20

NOTES = (
    "A row is named place/ranks: bare is this machine, and every emulated host is one rank. Each "
    "rank has one thread; a thread has a processor of its own where there are enough. prefill is "
    "the time to the first new token, and ms per token the median gap between the following ones, "
    "of the slowest rank. A short prompt is generated from before, untimed.",
    "of ideal: the time of one process with one thread, divided by the number of processors that "
    "the ranks or threads have, over the time of the row.",
    "Bytes are what the rank sent that sent most, for the prompt and for each further token; "
    "weights and key/value are what the largest rank keeps.",
    "The model has a published shape with fewer layers and random weights; activations are bf16, "
    "which rounds differently where a sum is cut differently: same tokens counts those before the "
    "first that differs from one process with one thread and the same dtype of weights. The head "
    "stays bf16. error is the largest error of the first token's logits relative to the largest "
    "logit, against float32 arithmetic; more than twice that of one process with the same dtype "
    "plus one rounding, or ranks that differ in a token, are WRONG.",
)


def name_of(row: dict[str, Any]) -> str:
    dtype = "" if row["dtype"] == "bf16" else f", {row['dtype']}"
    if row["world_size"] == 1:
        return f"1 process, {row['threads']} thread{'s' * (row['threads'] > 1)}{dtype}"
    if row["weights"] == "split":
        return f"weights split, tensor_parallel_size {row['tensor_parallel_size']}{dtype}"
    return f"weights whole, prompt {row['prefill']}"


def judged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each beside one process with one thread, as far as that was measured."""
    bare = [row for row in rows if row["link"] == BARE]
    truth = next((row for row in bare if _is_one(row, TRUTH)), None)
    ones = {row["dtype"]: row for row in bare if _is_one(row, "whole")}
    result = []
    for row in rows:
        row, one = {**row, "wrong": not row["ranks_agree"]}, ones.get(row["dtype"])
        if truth is not None and one is not None and row is not truth:
            error, bound = (_error(x["logits"], truth["logits"]) for x in (row, one))
            row["error"] = error
            row["wrong"] |= not error <= 2 * bound + torch.finfo(torch.bfloat16).eps
        if one is not None and row["gaps"]:
            cores = min(CORES, row["world_size"] * row["threads"])
            pairs = zip(row["tokens"], one["tokens"], strict=True)
            row |= {
                "prefill_of_ideal": one["prefill_seconds"] / cores / row["prefill_seconds"],
                "token_of_ideal": one["token_seconds"] / cores / row["token_seconds"],
                "same_tokens": len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))),
            }
        result.append(row)
    return result


def _is_one(row: dict[str, Any], weights: str) -> bool:
    threads = CORES if weights == TRUTH else 1
    return (row["world_size"], row["weights"], row["threads"]) == (1, weights, threads)


def _error(logits: Sequence[float], truth: Sequence[float]) -> float:
    """The largest error of a logit relative to the largest logit."""
    found, expected = torch.tensor(logits), torch.tensor(truth)
    return ((found - expected).abs().max() / expected.abs().max()).item()


def columns(rows: list[dict[str, Any]]) -> list[Column]:
    def share(row: dict[str, Any], field: str) -> str:
        return f"{row[field]:.2f}" if field in row else "-"

    def mib(num_bytes: int) -> str:
        return f"{num_bytes / _MIB:,.0f}"

    return columns_of(
        [row for row in rows if row["gaps"]],
        {
            "place/ranks": lambda row: f"{row['link']}/{row['world_size']}",
            "form": name_of,
            "prefill s": lambda row: f"{row['prefill_seconds']:.2f}",
            "of ideal": lambda row: share(row, "prefill_of_ideal"),
            "ms /token": lambda row: milliseconds(row["token_seconds"]),
            "of ideal ": lambda row: share(row, "token_of_ideal"),
            "waiting /token": lambda row: f"{row['waiting']:.0%}",
            "bytes /token": lambda row: f"{row['bytes']:,}",
            "prompt MiB sent": lambda row: mib(row["prefill_bytes"]),
            "weights MiB": lambda row: mib(row["weights_bytes"]),
            "key/value MiB": lambda row: mib(row["kv_bytes"]),
            "same tokens": lambda row: f"{row.get('same_tokens', '-')}/{len(row['tokens'])}",
            "error": lambda row: f"{row['error']:.1e}" if "error" in row else "-",
            "right": verdict,
        },
    )
