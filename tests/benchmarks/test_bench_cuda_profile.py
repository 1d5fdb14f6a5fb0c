# SPDX-License-Identifier: BSD-3-Clause
"""Reading a profile, without a GPU."""

import json
import os
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.cuda import predict, profile
from benchmarks.cuda.cases import CudaCase
from dry_device import dry_cuda

SMALL = CudaCase(lengths=(70,), heads=(4, 2), head_dim=64)
TWO_ROW_BLOCKS = CudaCase(lengths=(70, 70), heads=(16, 2), seqlen_q=17)

TABLE = """"ID","Kernel Name","gpu__time_duration.sum","dram__bytes_read.sum","launch__cluster_max"
"","","us","Mbyte",""
"0","lean_decode_kernel","1,234.5","268.4","n/a"
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="scripts/gpu_check.sh profiles it there")
def test_one_launch_of_each_case_is_profiled(monkeypatch):
    monkeypatch.setattr(profile, "CASES", [SMALL, TWO_ROW_BLOCKS])
    counts: dict[str, list[int]] = {"start": [], "stop": []}
    with dry_cuda():
        # In that mode tensors of the fake device have no views.
        monkeypatch.setattr(torch, "inference_mode", nullcontext)
        launches = torch.ops.tree_attention_emulator.num_launches
        for name, found in counts.items():
            monkeypatch.setattr(torch.cuda.profiler, name, lambda x=found: x.append(launches()))
        profile.launch()
    pairs = zip(counts["start"], counts["stop"], strict=True)
    assert [after - before for before, after in pairs] == [1, 1]


def test_counted(monkeypatch):
    monkeypatch.setattr(profile, "CASES", [SMALL])
    assert profile.counted(TABLE) == {
        SMALL.name: {
            "gpu__time_duration.sum [us]": 1234.5,
            "dram__bytes_read.sum [Mbyte]": 268.4,
            "launch__cluster_max": "n/a",
        }
    }


def test_what_ncu_found(monkeypatch, tmp_path):
    monkeypatch.setattr(profile, "CASES", [SMALL])
    ncu = tmp_path / "ncu"
    (tmp_path / "table").write_text(TABLE)
    ncu.write_text(f'#!/bin/bash\n[[ "$*" == "--import x.ncu-rep --page raw --csv" ]] && '
                   f"cat {tmp_path}/table")  # fmt: skip
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert profile.main(["--read", "x.ncu-rep", "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "profile_cuda.json").read_text())["rows"]
    assert row["name"] == SMALL.name and row["metrics"]["gpu__time_duration.sum [us]"] == 1234.5
    page = predict.table_of_report(tmp_path / "profile_cuda.md", ())
    assert f"| {SMALL.name} | 1234.5 us | 268.4 Mbyte | - |" in page


def test_a_launch_that_was_not_profiled():
    with pytest.raises(ValueError, match="1 launches were profiled, expected 3"):
        profile.counted(TABLE)
