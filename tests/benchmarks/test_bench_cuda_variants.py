# SPDX-License-Identifier: BSD-3-Clause
"""The smaller CUDA measurements without a GPU: profiles and shorter rings."""

import json
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.cuda import profile, variants
from benchmarks.cuda.cases import CudaCase
from benchmarks.cuda.timing import Call, Measured, Measurement
from benchmarks.harness.measure import InputArena, Samples
from tree_attention import lean_decode

SMALL = CudaCase(lengths=(70,), heads=(4, 2), head_dim=64)


def measure(calls: Mapping[str, Call], num_sets: int, seconds: float) -> Measurement:
    found = Measurement()
    for i, (name, call) in enumerate(calls.items()):
        samples = Samples([1e-6 * (i + 1)], call(num_sets - 1))
        found.measured[name] = Measured(samples, samples)
    return found


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    device = SimpleNamespace(L2_cache_size=1 << 16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(variants, "InputArena", lambda n, device: InputArena(n, "cpu"))
    monkeypatch.setattr(variants, "measure", measure)


def run(module, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["program", "--out", str(tmp_path)])
    return module.main()


@pytest.mark.parametrize("wrong", [False, True])
def test_variants(wrong, monkeypatch, tmp_path, capsys):
    def two_stages(name, case, inputs):
        assert name == "two_stages"
        return lambda i: (lean_decode(inputs.q, inputs.sets[i].k, inputs.sets[i].v)[0] + wrong,)

    monkeypatch.setattr(variants, "CASES", [SMALL])
    monkeypatch.setattr(variants, "ablation", two_stages)
    assert run(variants, monkeypatch, tmp_path) == wrong
    found = json.loads((tmp_path / "variants.json").read_text())
    assert found[SMALL.name]["times"]["two stages"]["median_us"] == pytest.approx(2)
    assert ("WRONG" in capsys.readouterr().out) == wrong


def test_variants_of_which_one_fails(monkeypatch, tmp_path):
    def failing(calls: Mapping[str, Call], num_sets: int, seconds: float) -> Measurement:
        found = measure(calls, num_sets, seconds)
        del found.measured["two stages"]
        return found

    monkeypatch.setattr(variants, "CASES", [SMALL])
    monkeypatch.setattr(variants, "ablation", lambda *arguments: lambda i: (torch.ones(1),))
    monkeypatch.setattr(variants, "measure", failing)
    assert run(variants, monkeypatch, tmp_path) == 1


TABLE = """"ID","Kernel Name","gpu__time_duration.sum","dram__bytes_read.sum","launch__cluster_max"
"","","us","Mbyte",""
"0","lean_decode_kernel","1,234.5","268.4","n/a"
"""


def test_counted(monkeypatch):
    monkeypatch.setattr(profile, "CASES", [SMALL])
    assert profile.counted(TABLE) == {
        SMALL.name: {
            "gpu__time_duration.sum [us]": 1234.5,
            "dram__bytes_read.sum [Mbyte]": 268.4,
            "launch__cluster_max": "n/a",
        }
    }


def test_a_launch_that_was_not_profiled():
    with pytest.raises(ValueError, match="1 launches were profiled, expected 4"):
        profile.counted(TABLE)
