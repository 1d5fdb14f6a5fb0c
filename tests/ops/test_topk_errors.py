# SPDX-License-Identifier: BSD-3-Clause
"""Wrong arguments of `index_topk` and `merge_topk`: a sentence with argument, rule and value."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_device import fake_cuda
from tree_attention import all_merge_topk, index_topk, merge_topk

B, H, T, S, D = 2, 4, 3, 10, 8


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def index(**changed: Any) -> object:
    arguments = {"q": torch.ones(B, H, T, D), "k": torch.ones(B, 1, S, D), "topk": 2, **changed}
    return index_topk(arguments.pop("q"), arguments.pop("k"), **arguments)


def strided(*shape: int) -> Tensor:
    return torch.ones(*shape[:-1], 2 * shape[-1])[..., ::2]


positions = torch.zeros(B, T, dtype=torch.int64)
paged = {"k": torch.ones(5, 1, 4, D)}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [1.0]}, TypeError, "q must be a tensor, got [1.0]"),
    ({"weights": 1.0}, TypeError, "weights must be a tensor, got 1.0"),
    ({"q": torch.ones(H, T, D)}, ValueError,
     "q must have shape [batch, num_heads, seqlen_q, head_dim], got [4, 3, 8]"),
    ({"q": torch.ones(B, H, T, D).double()}, ValueError,
     "q must be float32, bfloat16 or float16, got float64"),
    ({"q": torch.ones(B, 0, T, D)}, ValueError, "q must have at least 1 head, got [2, 0, 3, 8]"),
    ({"q": torch.ones(B, H, T, 0), "k": torch.ones(B, 1, S, 0)}, ValueError,
     "q must have a head_dim of at least 1, got [2, 4, 3, 0]"),
    ({"q": strided(B, H, T, D)}, ValueError, "q must have a contiguous last axis, got stride 2"),
    ({"k": strided(B, 1, S, D)}, ValueError, "k must have a contiguous last axis, got stride 2"),
    ({"k": torch.ones(B, S, D)}, ValueError,
     "k must have shape [batch, 1, seqlen_k, head_dim], got [2, 10, 8]"),
    ({"k": torch.ones(B, 1, S, D).half()}, ValueError, "k must be float32, got float16"),
    ({"k": torch.ones(B, 2, S, D)}, ValueError, "k must have 1 head, which all heads of q share, "
     "got 2; its axes are [batch, 1, seqlen_k, head_dim]"),
    ({"k": torch.ones(B, 1, S, D + 1)}, ValueError, "k must have q's head_dim 8, got 9"),
    ({"k": torch.ones(B + 1, 1, S, D)}, ValueError, "k must have q's batch 2, got 3"),
    ({"k": torch.ones(B, 1, S, D, device="meta")}, ValueError,
     "k must be on q's device cpu, got meta"),
    ({"weights": torch.ones(B, H)}, ValueError,
     "weights must have shape [batch, num_heads, seqlen_q] = [2, 4, 3], got [2, 4]"),
    ({"weights": torch.ones(B, H, T).bfloat16()}, ValueError,
     "weights must be float32, got bfloat16"),
    ({"key_ranges": int32(B, T, 2).long()}, ValueError, "key_ranges must be int32, got int64"),
    ({"key_ranges": int32(B, T + 1, 2)}, ValueError,
     "key_ranges must have shape [batch, seqlen_q, 2] = [2, 3, 2], got [2, 4, 2]"),
    ({"key_ranges": int32(B, T, 4)[..., ::2]}, ValueError,
     "key_ranges must have a contiguous last axis, got stride 2"),
    ({"topk": 0}, ValueError, "topk must be an integer from 1 to 2147483647, got 0"),
    ({"topk": -1}, ValueError, "topk must be an integer from 1 to 2147483647, got -1"),
    ({"topk": True}, TypeError, "topk must be an integer from 1 to 2147483647, got True"),
    ({"topk": 2.0}, TypeError, "topk must be an integer from 1 to 2147483647, got 2.0"),
    ({"topk": 2**30}, ValueError,
     "topk must be at most 1073741823, which is 2^31 - 1 over 2 rows, got 1073741824"),
    ({"scale": float("nan")}, ValueError, "scale must be in [-1e+15, 1e+15], got nan"),
    ({"scale": 1e16}, ValueError, "scale must be in [-1e+15, 1e+15], got 1e+16"),
    ({"scale": "1"}, TypeError, "scale must be a number, got '1'"),
    ({"block": 0}, ValueError, "block must be an integer from 1 to 2147483647, got 0"),
    ({"local_blocks": -1}, ValueError,
     "local_blocks must be an integer from 0 to 2147483647, got -1"),
    ({"local_blocks": 1}, ValueError, "local_blocks needs a block of at least 2 keys, got 1"),
    ({"local_blocks": 1, "block": 4}, ValueError, "local_blocks needs query_positions, got None"),
    ({"query_positions": positions.int()}, ValueError, "query_positions must be int64, got int32"),
    ({"query_positions": positions[:, 1:]}, ValueError,
     "query_positions must have shape [batch, seqlen_q] = [2, 3], got [2, 2]"),
    ({"local_blocks": 1, "block": 4, "query_positions": positions - 1}, ValueError,
     "query_positions must be in [0, 2^31) with local_blocks, got -1 for token 0 of sequence 0"),
    ({"local_blocks": 1, "block": 4, "query_positions": positions + 2**31}, ValueError,
     "query_positions must be in [0, 2^31) with local_blocks, got 2147483648 for token 0"),
    ({"key_slots": torch.arange(S)}, ValueError, "key_slots must be int32, got int64"),
    ({"key_slots": torch.arange(S - 1).int()}, ValueError,
     "key_slots must have shape [seqlen_k] = [10], got [9]"),
    ({"key_slots": torch.arange(2 * S).int()[::2]}, ValueError,
     "key_slots must have a contiguous last axis, got stride 2"),
    ({"key_slots": torch.arange(S).int() - 1}, ValueError,
     "key_slots must increase from at least 0 on, got -1 at key 0"),
    ({"key_slots": torch.tensor([0, 1, 5, 5, 6, 7, 8, 9, 10, 11]).int()}, ValueError,
     "key_slots must increase from at least 0 on, got 5 at key 3"),
    ({"key_slots": torch.arange(S - 1, -1, -1).int()}, ValueError,
     "key_slots must increase from at least 0 on, got 8 at key 1"),
    ({**paged, "page_table": int32(B, 2).long()}, ValueError,
     "page_table must be int32, got int64"),
    ({**paged, "page_table": int32(B + 1, 2)}, ValueError,
     "page_table must have shape [batch, pages] with batch 2, got [3, 2]"),
    ({**paged, "page_table": int32(B, 2) + 5}, ValueError,
     "page_table must hold page ids in [0, 5) where key_ranges needs them, got 5 for page 0 of "
     "sequence 0"),
    ({**paged, "page_table": int32(B, 2) - 1}, ValueError,
     "page_table must hold page ids in [0, 5) where key_ranges needs them, got -1 for page 0"),
    ({"k": torch.ones(5, 1, 0, D), "page_table": int32(B, 2)}, ValueError,
     "k must have a page_size of at least 1, got 0"),
    ({"num_workers": -2}, ValueError,
     "num_workers must be an integer from -1 to 2147483647, got -2"),
]  # fmt: skip


@pytest.mark.parametrize(
    "changed, error, message", REFUSED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refused_by_index_topk(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^index_topk: {re.escape(message)}"):
        index(**changed)


MERGES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scores": 1}, TypeError, "scores must be a tensor, got 1"),
    ({"scores": torch.ones(3)}, ValueError,
     "scores must have shape [n, ..., k] with n of at least 1, got [3]"),
    ({"scores": torch.ones(0, 3)}, ValueError,
     "scores must have shape [n, ..., k] with n of at least 1, got [0, 3]"),
    ({"scores": torch.ones(2, 3).double()}, ValueError, "scores must be float32, got float64"),
    ({"slots": int32(2, 3).long()}, ValueError, "slots must be int32, got int64"),
    ({"slots": int32(2, 4)}, ValueError,
     "slots must have the shape of scores = [2, 3], got [2, 4]"),
    ({"slots": int32(2, 3).to("meta")}, ValueError,
     "slots must be on scores' device cpu, got meta"),
    ({"slots": int32(2, 3) - 2}, ValueError, "slots must be at least -1, got -2"),
    ({"topk": 0}, ValueError, "topk must be an integer from 1 to 2147483647, got 0"),
    ({"topk": None}, TypeError, "topk must be an integer from 1 to 2147483647, got None"),
]  # fmt: skip


@pytest.mark.parametrize(
    "changed, error, message", MERGES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refused_by_merge_topk(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"scores": torch.ones(2, 3), "slots": int32(2, 3), "topk": 2, **changed}
    with pytest.raises(error, match=f"^merge_topk: {re.escape(message)}"):
        merge_topk(arguments.pop("scores"), arguments.pop("slots"), **arguments)


GRADIENT = "must not require a gradient (inference only), got requires_grad=True"


@pytest.mark.parametrize("argument", ["q", "k", "weights"])
def test_gradients_are_refused(argument: str) -> None:
    shapes = {"q": (B, H, T, D), "k": (B, 1, S, D), "weights": (B, H, T)}
    with_gradient = {argument: torch.ones(shapes[argument], requires_grad=True)}
    with pytest.raises(RuntimeError, match=re.escape(f"index_topk: {argument} {GRADIENT}")):
        index(**with_gradient)
    with torch.no_grad():
        index(**with_gradient)
    scores = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match=re.escape(f"merge_topk: scores {GRADIENT}")):
        merge_topk(scores, int32(2, 3), topk=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is a fake one")
def test_a_gpu_has_no_kernel() -> None:
    with fake_cuda():
        on_gpu = {"q": torch.ones(B, H, T, D).to("cuda"), "k": torch.ones(B, 1, S, D).to("cuda")}
        scores, slots = torch.ones(2, 3).to("cuda"), int32(2, 3).to("cuda")
        for op, argument, call in (
            ("index_topk", "q", lambda: index(**on_gpu)),
            ("merge_topk", "scores", lambda: merge_topk(scores, slots, topk=2)),
            ("all_merge_topk", "scores", lambda: all_merge_topk(scores, slots, topk=2)),
        ):
            says = f"^{op}: there is no kernel for cuda yet, got {argument} on cuda:0; give tensors"
            with pytest.raises(NotImplementedError, match=says):
                call()


def test_rows_and_sequences_may_be_none() -> None:
    for b, t in ((0, 3), (2, 0)):
        scores, slots = index(q=torch.ones(b, H, t, D), k=torch.ones(b, 1, S, D))  # type: ignore[misc]
        assert scores.shape == slots.shape == (b, H, t, 2)
