# SPDX-License-Identifier: BSD-3-Clause
"""The ablations' operators, from their sources to their results, on the emulated device."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import emulated
import emulated_ablations
from bench_problems import SMALL, make_inputs, measure_on_cpu
from benchmarks.cuda import ablations, machine, peers, predict, stamps, timing
from benchmarks.cuda.cases import LATENT, QUERIES, CudaCase
from benchmarks.cuda.predict import packed_rows
from benchmarks.harness.accuracy import Float64Check
from benchmarks.harness.measure import InputArena
from tree_attention import lean_decode


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    torch.ops.load_library(emulated_ablations.library())


@pytest.mark.parametrize(
    "case", [x for x in SMALL[:9] if packed_rows(x) <= 8], ids=lambda case: case.name
)
@pytest.mark.parametrize("op", peers.ABLATIONS)
def test_operators_are_right(op: str, case: CudaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablations, "load", lambda: True)
    inputs = make_inputs(case, 1)
    kv = inputs.sets[0]
    o, lse = peers.ablation(op, case, inputs)(0)
    truth = Float64Check(inputs.q, kv.k, kv.v, inputs.key_ranges, **inputs.options(0))
    assert truth.accuracy(o, lse).right


@pytest.mark.parametrize("case", [SMALL[1], SMALL[9]], ids=["10 rows", "8 bits"])
@pytest.mark.parametrize("op", peers.ABLATIONS)
def test_operators_are_for_cuda_16_bits_and_few_rows(op: str, case: CudaCase) -> None:
    name = f"tree_attention_ablations::{op}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    inputs = make_inputs(case, 1)
    kv = inputs.sets[0]
    with pytest.raises(RuntimeError, match="ablations exist for bfloat16"):
        getattr(torch.ops.tree_attention_ablations, op)(
            inputs.q, kv.k, kv.v, inputs.key_ranges, **inputs.options(0)
        )


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles(head_dim: int) -> None:
    """All are right, those of lean_decode's own size have its bits, and others cut elsewhere."""
    case = CudaCase(heads=(4, 2), head_dim=head_dim, lengths=(700, 300))
    inputs = make_inputs(case, 1)
    kv, options = inputs.sets[0], inputs.options(0)
    arguments = (inputs.q, kv.k, kv.v, inputs.key_ranges)
    truth = Float64Check(*arguments, **options)
    with emulated.emulated_operators(0):
        own = lean_decode(*arguments, num_workers=3, **options)
    for keys, stages in ablations.TILES:
        if keys * head_dim > 1 << 14:
            with pytest.raises(RuntimeError, match="error of CUDA"):
                ablations.operator(keys, stages)(*arguments, num_workers=3, **options)
            continue
        result = ablations.operator(keys, stages)(*arguments, num_workers=3, **options)
        assert truth.accuracy(*result).right
        assert torch.equal(result[0], own[0]) == (keys * head_dim == 1 << 13)


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(L2_cache_size=1 << 16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(stamps.cuda, "unavailable", lambda: None)
    monkeypatch.setattr(ablations, "load", lambda: True)
    monkeypatch.setattr(stamps, "InputArena", lambda n, device: InputArena(n))
    monkeypatch.setattr(machine, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr(timing, "measure", measure_on_cpu)
    monkeypatch.setattr(stamps, "LAUNCHES", 2)


STAMPED = (
    CudaCase(heads=(4, 1), lengths=(700,)),
    CudaCase(QUERIES, heads=(4, 1), lengths=(300,), seqlen_q=12),
    CudaCase(LATENT, heads=(16, 1), head_dim=576, latent_dim=512, lengths=(200,)),
)


@pytest.mark.parametrize("wrong", [False, True])
def test_stamps(
    wrong: bool, cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The program on the emulated device, each look at whose clock moves it on."""
    if wrong:
        accuracy = SimpleNamespace(accuracy=lambda *result: SimpleNamespace(right=False))
        monkeypatch.setattr(stamps, "Float64Check", lambda *inputs, **options: accuracy)
    monkeypatch.setattr(stamps, "CASES", STAMPED)
    assert stamps.main(["--seconds", "0.01", "--out", str(tmp_path)]) == wrong
    rows = json.loads((tmp_path / "stamps_cuda.json").read_text())["rows"]
    assert [(row["name"], row["wrong"]) for row in rows] == [(c.name, wrong) for c in STAMPED]
    page = predict.table_of_report(tmp_path / "stamps_cuda.md", ())
    assert page.count("\n") == 2 + 2 * len(rows)
    for row in rows:
        assert row["cycles_per_us"] == pytest.approx(1000) and row["blocks"] > 1
        for which in ("last", "median"):
            assert min(row[which].values()) >= 0 and row[which]["loop"] > 0
            assert f"| {row['name']} | {which} |" in page
        # Outputs of few rows are whole in a cluster. Of others whoever ends last has merged, and
        # every stretch of its way is known.
        merges = "q=12" in row["name"]
        assert (row["last"]["count"] > 0, row["last"]["merge"] > 0) == (merges, merges)


def test_a_shape_that_fails_leaves_the_others(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = stamps.measured_row

    def fail(case: CudaCase, seconds: float) -> dict[str, object]:
        if case == STAMPED[0]:
            raise RuntimeError("no such kernel")
        return measured(case, seconds)

    monkeypatch.setattr(stamps, "CASES", STAMPED[:2])
    monkeypatch.setattr(stamps, "measured_row", fail)
    assert stamps.main(["--seconds", "0.01", "--out", str(tmp_path)]) == 1
    content = json.loads((tmp_path / "stamps_cuda.json").read_text())
    assert [row["name"] for row in content["rows"]] == [STAMPED[1].name]
    assert content["warnings"] == [f"{STAMPED[0].name} has no row: RuntimeError: no such kernel"]


def test_stamps_need_room(cpu_as_gpu: None) -> None:
    inputs = make_inputs(STAMPED[0], 1)
    kv = inputs.sets[0]
    for shape in [(1, len(stamps.ENDS), 2), (100, len(stamps.ENDS) - 1, 2)]:
        few = torch.zeros(shape, dtype=torch.int64)
        with pytest.raises(RuntimeError, match="stamped: stamps must be a contiguous int64 tensor"):
            torch.ops.tree_attention_ablations.stamped(few, inputs.q, kv.k, kv.v)


def test_summary_of_stamps() -> None:
    """Two blocks at two cycles a nanosecond; the second has two outputs and ends last."""
    launch = torch.zeros(2, len(stamps.ENDS), 2, dtype=torch.int64)

    def pass_by(block: int, us: int, *names: str, output: int = 0) -> int:
        for name in names:
            begin = len(stamps.OF_OUTPUT) * output if name in stamps.OF_OUTPUT else 0
            launch[block, stamps.ENDS.index(name, begin + 3 * (begin > 0))] = torch.tensor(
                [2000 * us, 1000 * us]
            )
            us += 1
        return us

    one_output = stamps.OF_OUTPUT[:6]
    pass_by(0, pass_by(0, 1, "start", "wait", "cut", *one_output), "end")
    us = pass_by(1, 2, "start", "wait", "cut", *one_output)
    us = pass_by(1, us, *one_output, "merge", output=1)
    pass_by(1, us + 3, "end")
    found = stamps.summary([launch])
    assert found["cycles_per_us"] == 2000 and found["blocks"] == 2
    assert found["launch_us"] == us + 3 - 1
    once = dict.fromkeys(("wait", "cut", "merge"), 1.0)
    twice = dict.fromkeys(one_output, 2.0)
    above = {"count above": 0.0, "merge above": 0.0}
    assert found["last"] == once | twice | above | {"end": 4.0}
    assert found["median"]["loop"] == 1.5
