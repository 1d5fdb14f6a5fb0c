# SPDX-License-Identifier: BSD-3-Clause
"""Problems that every rank makes alike and of which it holds a shard, for tests of decoding."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from helpers import Problem, make_problem, make_strided
from tiers import tiers
from tree_attention import BlockCyclic, Contiguous, ShardLayout, lean_decode, merge_states

WORLDS = tiers([1, 3], [2, 5])

CASES: dict[str, dict[str, Any]] = {
    "one query": {},
    "bf16 mqa": {"dtype": torch.bfloat16, "num_heads_kv": 1, "group_size": 8},
    "fp16 mha, v wider than k": {"dtype": torch.float16, "group_size": 1, "head_dim_v": 96},
    "causal queries": {"seqlen_q": 7, "ranges": "causal"},
    "ragged batch": {"batch": 4, "seqlen_q": 2, "ranges": "ragged"},
    "left padding": {"batch": 3, "ranges": "left padded"},
    "window, softcap": {"seqlen_q": 5, "ranges": "window", "softcap": 3.0, "softmax_scale": 0.2},
    "alibi": {"seqlen_q": 3, "ranges": "causal", "alibi": True, "key_layout": (0, 1, 1)},
    "rows without keys": {"batch": 3, "seqlen_q": 9, "ranges": "random"},
    "several ranges": {
        "batch": 3,
        "seqlen_q": 2,
        "ranges": "several",
        "alibi": 1 / 64,
        "key_layout": (0, 1, 1),
    },
    "odd strides": {"layout": "unaligned", "head_dim": 24, "seqlen_q": 2},
    "peaked scores": {"score_size": 30.0},
    "int8": {"kv_dtype": torch.int8, "dtype": torch.bfloat16, "seqlen_q": 2, "ranges": "causal"},
    "float8": {
        "kv_dtype": torch.float8_e4m3fn,
        "dtype": torch.bfloat16,
        "batch": 3,
        "ranges": "ragged",
    },
    "fewer keys than ranks": {"seqlen_k": 2},
    "no keys": {"seqlen_k": 0},
}

LAYOUTS = ("cyclic", "uneven")


def make_layout(name: str, world_size: int, seqlen_k: int) -> ShardLayout:
    if name == "cyclic":
        return BlockCyclic(world_size, 16)
    # Rank 0 holds nothing, rank 1 a quarter, and so on; a world of one holds all.
    shares = [rank * rank for rank in range(world_size)] if world_size > 1 else [1]
    bounds = [0, *(seqlen_k * total // sum(shares) for total in accumulate(shares))]
    return Contiguous(tuple(bounds))


def make_case(case: str, layout: str, world_size: int) -> tuple[Problem, list[Problem]]:
    """The whole problem and the shards of all ranks, the same on every rank."""
    torch.manual_seed(1)
    problem = make_problem(**CASES[case])
    split = make_layout(layout, world_size, problem.k.shape[2])
    shards = [problem.shard(split, rank) for rank in range(world_size)]
    strides = CASES[case].get("layout", "BHSD")
    for shard in shards:
        shard.k, shard.v = make_strided(shard.k, strides), make_strided(shard.v, strides)
    return problem, shards


def merged(shards: list[Problem], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What ranks must agree on to the bit: the canonical merge of all shards' states, and of one
    shard the local kernel's result."""
    if len(shards) == 1:
        (own,) = shards
        return lean_decode(own.q, own.k, own.v, own.key_ranges, **own.options, out_dtype=dtype)
    states = [
        lean_decode(s.q, s.k, s.v, s.key_ranges, **s.options, out_dtype=torch.float32)
        for s in shards
    ]
    o, lse = (torch.stack(parts) for parts in zip(*states, strict=True))
    return merge_states(o, lse, out_dtype=dtype)
