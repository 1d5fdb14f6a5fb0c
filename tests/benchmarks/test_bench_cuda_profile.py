# SPDX-License-Identifier: BSD-3-Clause
"""Reading a profile, without a GPU."""

import pytest

pytest.importorskip("triton")

from benchmarks.cuda import profile
from benchmarks.cuda.cases import CudaCase

SMALL = CudaCase(lengths=(70,), heads=(4, 2), head_dim=64)

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
    with pytest.raises(ValueError, match="1 launches were profiled, expected 3"):
        profile.counted(TABLE)
