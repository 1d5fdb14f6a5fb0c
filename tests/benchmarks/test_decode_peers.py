# SPDX-License-Identifier: BSD-3-Clause
"""The peers of `--peers` are given the problem of their case. Their operators are replaced by what
they are documented to compute, in float32."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks.cpu import cases, decode, libraries, peers
from benchmarks.harness import measure
from benchmarks.latent import operator as latent_operator
from tree_attention import lean_decode
from tree_attention.reference import attention

PROMPT = cases.DecodeCase("bf16", (4, 2), 32, (70,), seqlen_q=5)
VALUES = cases.DecodeCase("bf16", (4, 4), 32, (70,), seqlen_q=5, value_dim=16)
RAGGED = cases.DecodeCase("bf16", (4, 2), 32, (5, 33, 16))
PAGES = cases.DecodeCase("bf16", (4, 2), 32, (5, 33, 16), page_size=16, contiguous=True)


def last_queries(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the last queries of one sequence; tokens come first in all tensors."""
    ends = len(k) - torch.arange(len(q) - 1, -1, -1)
    ranges = torch.stack([torch.zeros_like(ends), ends], -1)[None]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    o, _ = attention(q, k, v, ranges, softmax_scale=scale, dtype=torch.float32)
    return o[0].transpose(0, 1)


def decode_attention_cpu(*arguments: Any) -> None:
    q, k, v, o, key, value, _, state, slots, rows, lengths, scale, cap, cross, window, *_ = (
        arguments
    )
    assert key is value is None and slots.dtype == torch.int32 and lengths.dtype == torch.int64
    assert state.shape == (*q.shape[:2], 8, v.shape[2] + 1) and not (cap or cross or window)
    for b, length in enumerate(lengths):
        tokens = slots[rows[b], :length]
        o[b] = last_queries(q[b : b + 1], k[tokens], v[tokens], scale)


def extend_attention_cpu(*arguments: Any) -> None:
    q, new_k, new_v, o, k, v, slots, rows, lengths, counts, starts, longest, scale, *_ = arguments
    assert counts.tolist() == [len(q)] == [longest] and starts.tolist() == [0]
    assert len(new_k) == len(new_v) == len(q)
    prefix = slots[rows[0], : lengths[0] - len(q)]
    k, v = torch.cat([k[prefix], new_k]), torch.cat([v[prefix], new_v])
    o.copy_(last_queries(q, k, v, scale))


def varlen_fwd(*arguments: Any) -> None:
    q, k, v, o, q_starts, k_starts, *rest = arguments
    assert rest[:4] == [None] * 4 and rest[9:12] == [True, -1, -1]
    for b in range(len(q_starts) - 1):
        (q0, q1), (k0, k1) = q_starts[b : b + 2].tolist(), k_starts[b : b + 2].tolist()
        assert q1 - q0 <= rest[4] and k1 - k0 <= rest[5]
        o[q0:q1] = last_queries(q[q0:q1], k[k0:k1], v[k0:k1], scale=rest[7])


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Libraries to name, whose operators are those above."""
    sglang = SimpleNamespace(
        decode_attention_cpu=decode_attention_cpu, extend_attention_cpu=extend_attention_cpu
    )
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "sgl_kernel", sglang, raising=False)
    monkeypatch.setattr(torch.ops, "hub1", SimpleNamespace(varlen_fwd=varlen_fwd), raising=False)
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 10)
    for program in (decode, latent_operator):
        monkeypatch.setattr(program, "pin_threads", list)
    return [Path("common_ops.abi3.so"), Path("hub1.abi3.so")]


@pytest.mark.parametrize("case", [PROMPT, VALUES, RAGGED, PAGES], ids=lambda case: case.name)
@pytest.mark.parametrize("name", [libraries.SGLANG, libraries.HUB])
def test_peers_are_given_the_same_problem(
    name: str, case: cases.DecodeCase, named: list[Path]
) -> None:
    inputs = cases.Inputs(case, measure.InputArena(1 << 20))
    assert inputs.num_sets > 1
    timed, refusals = peers.made(libraries.load(named), case, inputs)
    if name == libraries.HUB and case in (VALUES, PAGES):
        why = "pages" if case == PAGES else "values of the keys' columns only"
        assert refusals == {name: f"its CPU backend takes {'no ' * (case == PAGES)}{why}"}
        return
    o, _ = lean_decode(inputs.q, *inputs.sets[-1], inputs.key_ranges, page_table=inputs.page_table)
    assert o.isfinite().all()
    torch.testing.assert_close(timed[name](inputs.num_sets - 1), o, rtol=2e-2, atol=2e-2)


def test_contiguous_keys_are_those_of_the_pages(named: list[Path]) -> None:
    inputs = cases.Inputs(PAGES, measure.InputArena(1 << 20))
    o, _ = lean_decode(inputs.q, *inputs.sets[0], inputs.key_ranges, page_table=inputs.page_table)
    copied, _ = lean_decode(inputs.q, *inputs.contiguous_sets()[-1], inputs.key_ranges)
    torch.testing.assert_close(copied, o, rtol=2e-2, atol=2e-2)


def test_sglang_refuses_prompts_in_pages(named: list[Path]) -> None:
    case = cases.DecodeCase("bf16", (4, 2), 32, (70,), seqlen_q=5, page_size=16)
    inputs = cases.Inputs(case, measure.InputArena(1 << 20))
    with pytest.raises(ValueError, match="prompts are compared in one sequence of contiguous keys"):
        libraries.Sglang(case, inputs)


def test_vllm_refuses_values_of_other_columns(named: list[Path]) -> None:
    inputs = cases.Inputs(VALUES, measure.InputArena(1 << 20))
    with pytest.raises(ValueError, match="takes values of the keys' columns only"):
        peers.Vllm(VALUES, inputs)


def test_a_library_must_have_a_peer(named: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "sgl_kernel", SimpleNamespace())
    with pytest.raises(ValueError, match=r"^--peers: other\.so must register sgl_kernel::decode_"):
        libraries.load([Path("other.so")])


def doubled(operator: Callable[..., None], output: int) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        operator(*arguments)
        arguments[output].mul_(2)

    return run


@pytest.mark.parametrize("wrong", [False, True])
def test_report_of_peers(wrong: bool, named: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong:
        monkeypatch.setattr(
            torch.ops.sgl_kernel, "decode_attention_cpu", doubled(decode_attention_cpu, 3)
        )
    with Progress(disable=True) as progress:
        report = decode.run([PAGES, PROMPT], progress, seconds=0.0, paths=named)
    assert report.wrong == ([PAGES.name] if wrong else [])
    assert report.name == decode.name_of_results("decode_peers")
    assert report.environment["libraries of peers"] == "common_ops.abi3.so, hub1.abi3.so"
    assert f"hub is left out of {PAGES.name}: its CPU backend takes no pages" in report.summary
    columns = {column.heading: column.values for column in report.columns}
    assert all(x != "-" for x in columns["SGLang /ours"] + columns["SGLang error"])
    for heading, row in {"hub /ours": 1, "ours /contiguous": 0}.items():
        assert [x != "-" for x in columns[heading]] == [row == 0, row == 1]


def test_report_names_the_peer_without_a_library(named: list[Path]) -> None:
    with Progress(disable=True) as progress:
        report = decode.run([PROMPT], progress, seconds=0.0, paths=named[:1])
    assert report.summary == ["hub is left out: no library of --peers has it."]


@pytest.mark.parametrize("wrong", [False, True])
def test_latents_beside_sglang(
    wrong: bool, named: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if wrong:
        monkeypatch.setattr(
            torch.ops.sgl_kernel, "decode_attention_cpu", doubled(decode_attention_cpu, 3)
        )
    report = latent_operator.measure(latent_operator.QUICK, 0.0, named[:1])
    beside = [case.name for case in latent_operator.QUICK if not case.kv_dtype]
    assert report.wrong == (beside if wrong else [])
    columns = {column.heading: column.values for column in report.columns}
    assert [x != "-" for x in columns["SGLang ms"]] == [True, False, True]
    assert [x != "-" for x in columns["ours /contiguous"]] == [False, False, True]
