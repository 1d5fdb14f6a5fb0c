# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes in how several ranges of a query become parts that have no key in common."""

from pathlib import Path

from mutations import Mutation, Target

RANGES = Target(Path("csrc/cuda/ranges/split_ranges.cu"), ("split_ranges",))


def of_ranges(name: str, old: str, new: str) -> Mutation:
    return Mutation(name, "cuda/ranges/split_ranges.cu", old, new, target=RANGES)


OF_RANGES = [
    of_ranges("equal ranges have one place", "other < own;", "false;"),
    of_ranges(
        "a part begins where the last range before it ends",
        "covered = max(covered, other_end);",
        "covered = other_end;",
    ),
    of_ranges(
        "ranges of the same begin are in the order of the caller",
        "other_end != end   ? other_end < end",
        "other_end != end   ? other < own",
    ),
    of_ranges(
        "parts of a sequence lie together",
        "(before * p.batch + batch)",
        "(batch * p.num_ranges + before)",
    ),
    of_ranges(
        "a sequence's ranges are neighbours",
        "static_cast<int32_t>(i % p.batch);",
        "static_cast<int32_t>(i / p.num_ranges);",
    ),
    of_ranges(
        "rows are copied in the order of memory",
        "first * x.stride[1] + second * x.stride[2]",
        "first * x.stride[2] + second * x.stride[1]",
    ),
    of_ranges(
        "the first copy is the only one",
        "range * p.batch * x.size_of_sequence() + i",
        "0 * range + i",
    ),
    of_ranges(
        "the first element of a tensor belongs to the one before",
        "if (i < count) return repeat",
        "if (i <= count) return repeat",
    ),
    of_ranges(
        "the last threads have no block",
        "(threads + kThreads - 1) / kThreads",
        "(threads > kThreads ? threads / kThreads : 1)",
    ),
]
