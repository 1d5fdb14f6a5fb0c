# SPDX-License-Identifier: BSD-3-Clause
"""memory.py, shares.py and protocol.py with --device cuda, over a device that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.harness.ranks import Ranks
from counted_device import PEAK, device_that_counts
from distributed import run_ranks
from lab.papers import memory, protocol, shares

CUDA = torch.device("cuda", 0)


def memory_on_a_device(rank: int, world_size: int) -> list[dict[str, Any]]:
    with device_that_counts(), torch.no_grad():
        return memory.measure([64], (4, 2), Ranks(), CUDA)


def test_memory_program() -> None:
    for (row,) in run_ranks(memory_on_a_device, 2, fresh=True):
        assert list(row["methods"]) == list(memory.METHODS)
        for method in row["methods"].values():
            assert method == {"allocated": PEAK, "resident": PEAK, "right": True}


def test_shares_program() -> None:
    width = {"hidden_size": 64, "word_embed_proj_dim": 64, "num_attention_heads": 4}
    with torch.no_grad():
        model = shares.make_model("1.3b", 1, 256, vocab_size=97, ffn_dim=64, **width)
        with device_that_counts():
            times = shares.measure(model.to("cuda"), 32, 4, rounds=1)
    assert {name: len(gaps) for name, (_, gaps) in times.items()} == {
        shares.OURS: 3,
        shares.THEIRS: 3,
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("program", [memory, shares, protocol])
def test_no_device_is_a_sentence(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(["--device", "cuda"])
    assert "torch finds no CUDA driver or no device" in capsys.readouterr().err
