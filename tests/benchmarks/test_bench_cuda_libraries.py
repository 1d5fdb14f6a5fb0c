# SPDX-License-Identifier: BSD-3-Clause
"""The kernels of other libraries are given the problem of their case: stand-ins compute what these
are documented to compute, in float32 on the CPU."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from bench_problems import SMALL, make_inputs
from benchmarks.cuda import libraries, peers
from benchmarks.cuda.cases import CudaCase
from tree_attention import lean_decode
from tree_attention.reference import attention

UNIFORM, CAUSAL, RAGGED, CAPACITY, PACKED, WINDOW = SMALL[:6]
SHAPE: dict[str, Any] = {"heads": (4, 2), "head_dim": 64}
LONG = CudaCase(**SHAPE, lengths=(96, 96), layout="NHD")
TAIL = CudaCase(**SHAPE, lengths=(16, 16, 48), layout="packed")
CAUSAL_TAIL = CudaCase(**SHAPE, lengths=(32, 48), seqlen_q=3, capacity=64)
ONE_WINDOW = CudaCase(**SHAPE, lengths=(64, 64), window=20)
PAGES = CudaCase(**SHAPE, lengths=(21, 50), page_size=16)
LATENTS = CudaCase(heads=(4, 1), head_dim=96, latent_dim=64, lengths=(64, 128), capacity=128)
LATENT_PAGES = CudaCase(
    heads=(4, 1), head_dim=96, latent_dim=64, lengths=(50, 100), page_size=64, seqlen_q=2
)


def attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, causal: bool, window: int
) -> Tensor:
    """Of q `[batch, queries, heads, dim]`, k and v `[batch, keys, heads, dim]`."""
    ends = lengths.long()[:, None].expand(-1, q.size(1)).clone()
    if causal:
        ends -= torch.arange(q.size(1) - 1, -1, -1)
    begins = (ends - window).clamp(min=0) if window else torch.zeros_like(ends)
    ranges = torch.stack([begins, ends], -1).int()
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    o, _ = attention(*heads_first, ranges, softmax_scale=scale, dtype=torch.float32)
    return o.transpose(1, 2).to(q.dtype)


class Flash3:
    """vLLM's FlashAttention-3: what both operators are told of the problem must agree."""

    def get_scheduler_metadata(self, **options: Any) -> dict[str, Any]:
        return options

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
        schedule = options["scheduler_metadata"]
        assert schedule["seqused_k"] is options["seqused_k"]
        assert (schedule["batch_size"], schedule["max_seqlen_q"]) == q.shape[:2]
        assert (schedule["num_heads"], schedule["num_heads_k"]) == (q.size(2), k.size(2))
        for name in ("is_causal", "window_size_left", "window_size_right", "num_splits"):
            assert schedule[name] == options[name]
        assert (schedule["headdim"], schedule["headdim_v"]) == (q.size(3), v.size(3))
        q_v, table = options["q_v"], options["page_table"]
        if q_v is not None:
            q, k = torch.cat([q_v, q], -1), torch.cat([v, k], -1)
        if table is not None:
            assert schedule["page_size"] == k.size(1)
            k, v = (x[table.long()].flatten(1, 2) for x in (k, v))
        assert schedule["max_seqlen_k"] == k.size(1)
        window = options["window_size_left"] + 1
        assert options["window_size_right"] == (0 if window else -1)
        causal = options["is_causal"]
        o = attend(q, k, v, options["seqused_k"], options["softmax_scale"], causal, window)
        return [o, torch.zeros(())]


def flash_mla(
    q: Tensor, pages: Tensor, latent_dim: int, lengths: Tensor, table: Tensor, scale: float,
    causal: bool, schedule: Tensor | None, splits: Tensor | None, out: None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert pages.shape[1:3] == (64, 1) and (schedule is None) == (splits is None)
    k = pages[table.long()].flatten(1, 2)
    o = attend(q, k, k[..., :latent_dim], lengths, scale, causal, 0)
    return o, torch.zeros(()), torch.zeros(1), torch.zeros(2)


class FlashInferWrapper:
    def __init__(self, workspace: Tensor, **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert options == {"kv_layout": "HND", "use_tensor_cores": True, "backend": "fa2"}

    def plan(
        self, starts: Tensor, indices: Tensor, lasts: Tensor, heads: int, heads_kv: int,
        head_dim: int, page_size: int, **options: Any,
    ) -> None:  # fmt: skip
        assert starts.dtype == indices.dtype == lasts.dtype == torch.int32
        assert (lasts > 0).all() and (lasts <= page_size).all()
        self.starts, self.indices, self.lasts = starts, indices, lasts
        self.shape, self.options = (heads, heads_kv, head_dim, page_size), options

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        heads, heads_kv, head_dim, page_size = self.shape
        queries = self.options.get("q_len_per_req", 1)
        outputs = []
        for b, last in enumerate(self.lasts.tolist()):
            chosen = self.indices[self.starts[b] : self.starts[b + 1]].long()
            k, v = (x[chosen].transpose(0, 1).flatten(1, 2).transpose(0, 1)[None] for x in pages)
            assert k.shape[2:] == (heads_kv, head_dim)
            length = torch.tensor([(len(chosen) - 1) * page_size + last])
            q_b = q[b * queries : (b + 1) * queries][None]
            assert q_b.size(2) == heads
            window = self.options["window_left"] + 1
            outputs.append(attend(q_b, k, v, length, head_dim**-0.5, queries > 1, window)[0])
        return torch.cat(outputs)


@pytest.fixture
def makers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> dict[str, libraries.Maker]:
    monkeypatch.setattr(libraries, "PLANNED_BYTES", 16)
    wrapper = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=FlashInferWrapper, __spec__=SimpleNamespace()
    )
    monkeypatch.setitem(sys.modules, "flashinfer", wrapper)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "_fa3_C", Flash3(), raising=False)
    monkeypatch.setattr(
        torch.ops, "_mla_C", SimpleNamespace(dense_decode_fwd=flash_mla), raising=False
    )
    return libraries.load([tmp_path / "_fa3_C.abi3.so", tmp_path / "_mla_C.abi3.so"])


SIXTEEN_BITS = [LONG, TAIL, CAUSAL_TAIL, ONE_WINDOW, PAGES]
CASES = [
    *((name, case) for name in ("FlashInfer", "FlashAttention-3") for case in SIXTEEN_BITS),
    *(("FlashAttention-3", case) for case in (UNIFORM, CAUSAL, RAGGED, CAPACITY, PACKED, WINDOW)),
    *(
        (name, case)
        for name in ("FlashMLA", "FlashAttention-3")
        for case in (LATENTS, LATENT_PAGES)
    ),
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_libraries_are_given_the_same_problem(name: str, case: CudaCase, makers: Any) -> None:
    with torch.inference_mode():
        inputs = make_inputs(case, sets=2)
        kv = inputs.sets[1]
        truth, _ = lean_decode(
            inputs.q.float(), kv.k.float(), kv.v.float(), inputs.key_ranges,
            page_table=inputs.page_table,
        )  # fmt: skip
        call = makers[name](case, inputs)
        for i in (0, 1):
            torch.testing.assert_close(call(i).float(), truth, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("name", "case", "why"),
    [
        ("FlashInfer", LATENTS, "no latent attention"),
        ("FlashInfer", CudaCase(**SHAPE, lengths=(30, 30)), "whole pages of 16 slots"),
        ("FlashAttention-3", CudaCase(**SHAPE, lengths=(32,), kv_dtype="int8"), "8 bits"),
        ("FlashMLA", LONG, "latent attention only"),
        ("FlashMLA", CudaCase(heads=(4, 1), head_dim=96, latent_dim=64, page_size=16), "pages of"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_who_cannot_do_a_case_says_why(name: str, case: CudaCase, why: str, makers: Any) -> None:
    with pytest.raises(libraries.Unavailable, match=why):
        makers[name](case, make_inputs(case, sets=1))


def test_a_library_that_is_no_peer(makers: Any, monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setattr(torch.ops, "_other_C", SimpleNamespace(), raising=False)
    with pytest.raises(ValueError, match=r"--peers: _other_C\.so must register"):
        libraries.load([tmp_path / "_other_C.so"])


def test_a_library_that_fails_leaves_the_others(makers: Any, monkeypatch: Any) -> None:
    def fails(case: CudaCase, inputs: Any) -> Any:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(peers, "check_device", lambda name: None)
    monkeypatch.setattr(peers.ablations, "load", lambda: False)
    calls, unavailable = peers.implementations(
        LONG, make_inputs(LONG, sets=1), makers | {"FlashInfer": fails}
    )
    assert unavailable["FlashInfer"] == "RuntimeError: no kernel for this"
    assert {peers.OURS, "FlashAttention-3"} <= calls.keys()
