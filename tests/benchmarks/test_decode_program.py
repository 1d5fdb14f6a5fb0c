# SPDX-License-Identifier: BSD-3-Clause
"""decode.py: its problems, its bytes, and that a wrong result cannot pass."""

import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks import decode as program
from benchmarks.cpu import cases, decode
from benchmarks.cpu.peers import sdpa
from benchmarks.harness import measure, report
from benchmarks.harness.accuracy import Float64Check
from tree_attention import _C, lean_decode
from tree_attention.cli.world import World
from tree_attention.reference.accuracy import check_against_float64


@pytest.mark.parametrize("wrong", ["value", "nan", "lse", "none"])
def test_wrong_results_are_wrong(wrong: str) -> None:
    q, k, v = torch.randn(2, 4, 3, 32), torch.randn(2, 2, 50, 32), torch.randn(2, 2, 50, 32)
    o, lse = lean_decode(q, k, v)
    if wrong == "value":
        o[1, 2, 1, 7] += 1e-3
    if wrong == "nan":
        o[1, 3, 2, 31] = math.nan
    if wrong == "lse":
        lse[0, 1, 1] += 1e-3
    for found in (
        check_against_float64(q, k, v, None, o, lse),
        Float64Check(q, k, v, None).accuracy(o, lse),
    ):
        assert found.right == (wrong == "none")
    # The altered elements belong to queries 1 and 2.
    assert Float64Check(q, k, v, None, queries=[0]).accuracy(o, lse).right


def test_case_counts_bytes_and_operations() -> None:
    case = cases.DecodeCase(heads=(4, 2), head_dim=8, lengths=(3, 5), seqlen_q=2)
    kv = (3 + 5) * 2 * 8 * 2
    rows = 2 * 4 * 2
    assert case.io_bytes == 2 * (kv + 2 * rows * 8)
    visible = (2 + 3) + (4 + 5)
    assert case.operations == 2 * 2 * 8 * 4 * visible


@pytest.mark.parametrize(
    "case",
    [
        cases.DecodeCase("fp32", (4, 2), 32, (70,)),
        cases.DecodeCase("fp32", (4, 2), 32, (70, 70), seqlen_q=5),
        cases.DecodeCase("fp32", (4, 1), 32, (1, 40, 70)),
        cases.DecodeCase("fp32", (2, 2), 32, (64,), seqlen_q=64),
    ],
    ids=lambda case: case.name,
)
def test_sdpa_is_given_the_same_problem(
    case: cases.DecodeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A baseline with another mask would be another problem, and perhaps a quicker one."""
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 10)
    set_bytes = cases.kv_set_bytes(case)
    arena = measure.InputArena(set_bytes * measure.InputArena.num_sets(set_bytes))
    inputs = cases.Inputs(case, arena)
    o, _ = lean_decode(inputs.q, *inputs.sets[-1], inputs.key_ranges)
    assert o.isfinite().all()
    torch.testing.assert_close(sdpa(case, inputs)(0), o, rtol=1e-4, atol=1e-5)


def test_pages_hold_the_same_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer is given of each sequence what our operator finds through the page table."""
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 10)
    case = cases.DecodeCase("fp32", (4, 2), 32, (5, 33, 16), page_size=16)
    inputs = cases.Inputs(case, measure.InputArena(1 << 20))
    table = inputs.page_table
    assert table.tolist() != sorted(table.tolist())  # shuffled
    o, _ = lean_decode(inputs.q, *inputs.sets[-1], inputs.key_ranges, page_table=table)
    for b, length in enumerate(case.lengths):
        k, v = inputs.sequence(b)
        assert k.shape == (2, length, 32) and k.isfinite().all() and v.isfinite().all()
        expected, _ = lean_decode(inputs.q[b : b + 1], k[None], v[None])
        torch.testing.assert_close(o[b : b + 1], expected, rtol=1e-5, atol=1e-6)
    unused = inputs.sets[0][0].isnan().all(-1).sum().item()
    assert unused == 2 * sum(-n % 16 for n in case.lengths)


@pytest.mark.parametrize("kv_dtype", cases.KV_DTYPES)
def test_keys_of_8_bits_are_those_of_the_case(
    kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 10)
    case = cases.DecodeCase("fp32", (4, 2), 32, (5, 33, 16), page_size=16, kv_dtype=kv_dtype)
    key_bytes = 32 + 4
    assert case.io_bytes == 2 * 2 * (5 + 33 + 16) * key_bytes + 2 * 4 * 32 * 3 * 4
    inputs = cases.Inputs(case, measure.InputArena(1 << 20))
    assert len(inputs.eight_bit_sets) == inputs.num_sets
    options = {"key_ranges": inputs.key_ranges, "page_table": inputs.page_table}
    o, _ = lean_decode(inputs.q, *inputs.sets[0], **options)
    for k, v, scales in inputs.eight_bit_sets:
        assert k.dtype == v.dtype == cases.KV_DTYPES[kv_dtype]
        quantised, _ = lean_decode(inputs.q, k, v, **options, **scales)
        assert 1e-4 < (quantised - o).abs().max() < 0.5


def test_probe_reads_what_is_visible() -> None:
    case = cases.DecodeCase("fp32", (4, 2), 8, (3, 9))
    k, v = torch.zeros(2, *case.kv_shape).unbind()
    k[0, :, 3:] = v[0, :, 3:] = 1
    pieces = cases.visible(case, k, v)
    assert all(x.is_contiguous() and not x.any() for x in pieces)
    assert sum(x.numel() for x in pieces) == 2 * 2 * (3 + 9) * 8


def test_sdpa_refuses_ragged_lengths_of_several_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 10)
    case = cases.DecodeCase("fp32", (2, 1), 32, (3, 9), seqlen_q=2)
    inputs = cases.Inputs(case, measure.InputArena(1 << 20))
    with pytest.raises(ValueError, match="ragged lengths are compared with one query only"):
        sdpa(case, inputs)


@pytest.mark.parametrize("listed", [cases.quick_cases, cases.standard_cases, cases.full_cases])
def test_case_names_are_unique(listed) -> None:
    names = [case.name for case in listed()]
    assert len(set(names)) == len(names)


def run_quick(monkeypatch: pytest.MonkeyPatch) -> report.Report:
    # Without this the inputs rotate over more memory than a test should take.
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(decode, "pin_threads", list)
    with Progress(disable=True) as progress:
        return decode.run(cases.quick_cases(), progress, seconds=0.0)


def test_decode_report_is_right_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = run_quick(monkeypatch)
    assert not result.wrong
    paths = report.write(result, tmp_path)
    assert [path.name for path in paths] == [f"{decode.name_of_results()}.md"]
    assert {"commit", "torch", "cpu", "threads", "command"} <= set(result.environment)
    assert len(result.rows) == len(cases.quick_cases())
    for row, case in zip(result.rows, cases.quick_cases(), strict=True):
        assert row["name"] == case.name
        assert row["times"]["lean_decode"]["p10_us"] <= row["times"]["lean_decode"]["median_us"]
        assert row["name"] in paths[0].read_text()
    assert any("pinned" in warning for warning in result.warnings)


def test_decode_with_a_wrong_operator_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def off_by_one_key(q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor | None, **options):
        return lean_decode(q, k[:, :, 1:], v[:, :, 1:], key_ranges, **options)

    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(decode, "pin_threads", list)
    monkeypatch.setattr(decode, "lean_decode", off_by_one_key)
    assert program.main(["--quick", "--only", "fp32"]) == 1
    output = capsys.readouterr().out
    assert "WRONG results: fp32 4/2 d64 B=1 1024 q=3" in output


def test_only_lists_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--quick", "--only", "int7"]) == 2
    output = capsys.readouterr().out
    assert "No case contains 'int7'" in output
    assert cases.quick_cases()[0].name in output


def test_decode_refuses_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "joined_world", lambda: nullcontext(World(size=2)))
    assert program.main(["--quick"]) == 2
    assert "decode.py runs in one process" in capsys.readouterr().out


def test_instruction_set_is_put_back() -> None:
    before = _C.cpu_instruction_set()
    with pytest.raises(ValueError) as error:
        _C.set_cpu_instruction_set("mmx")
    narrowest = str(error.value).removesuffix(", got mmx").split()[-1]
    with pytest.raises(ZeroDivisionError), decode.instruction_set(narrowest):
        assert _C.cpu_instruction_set() == narrowest
        1 / 0  # noqa: B018
    assert _C.cpu_instruction_set() == before
