# SPDX-License-Identifier: BSD-3-Clause
"""The comparison of engines, with drivers that say what a test wants instead of generating."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import __main__ as program
from benchmarks.engines import checkpoint


def result(tokens: list[int], step: float) -> dict[str, Any]:
    return {
        "engine": "an engine 1.0",
        "seconds": [2.0 + step * i for i in range(len(tokens))],
        "tokens": tokens,
        "peak_resident_bytes": 1 << 30,
    }


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the program with engines that print the given results or, without one, fail."""
    monkeypatch.setattr(program, "read_bandwidth", lambda: 30e9)
    monkeypatch.setattr(program, "THREADS", 1)
    monkeypatch.setattr(checkpoint, "make", lambda directory: directory)

    def run(results: dict[str, Any], *options: str) -> int:
        for engine, value in results.items():
            spec = program.ENGINES[engine]
            python = tmp_path / engine / "bin" / "python"
            python.parent.mkdir(parents=True, exist_ok=True)
            text = "exit 3" if value is None else f"echo loading; echo '{json.dumps(value)}'"
            python.write_text(f"#!/bin/sh\necho nonsense >&2\n{text}\n")
            python.chmod(0o755)
            fake = program.Engine(spec.driver, spec.form, engine, spec.variables)
            monkeypatch.setitem(program.ENGINES, engine, fake)
        command = ["engines", "--environments", str(tmp_path), "--out", str(tmp_path), *options]
        monkeypatch.setattr(sys, "argv", command)
        return program.main()

    return run


def rows(tmp_path: Path) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads((tmp_path / "engines.json").read_text())["rows"]}


def test_figures_are_those_of_the_engines(start, tmp_path: Path) -> None:
    results = {"ours": result([7, 8, 9], 0.04), "huggingface": result([7, 8, 1], 0.05)}
    assert start(results, "--only", "4096/ours", "4096/huggingface") == 0
    row = rows(tmp_path)["4096/ours"]
    assert row["token_seconds"] == pytest.approx([0.04, 0.04])  # two rounds
    assert row["prefill_seconds"] == [2.0, 2.0]
    num_bytes = checkpoint.weights_bytes() + checkpoint.kv_bytes(4096)
    assert row["read_share"] == pytest.approx(num_bytes / 0.04 / 30e9)
    assert row["same_tokens"] == 2
    assert "| 4096 | ours | 40.0 (40.0) |" in (tmp_path / "engines.md").read_text()


def test_rows_stay_until_they_are_measured_again(start, tmp_path: Path) -> None:
    start({"vllm": result([7, 8], 0.03)}, "--only", "16384/vllm", "--rounds", "1")
    start({"ours": result([7, 8], 0.04)}, "--only", "16384/ours", "--rounds", "1")
    assert list(rows(tmp_path)) == ["16384/ours", "16384/vllm"]
    start({"ours": result([7, 8], 0.02)}, "--only", "16384/ours", "--rounds", "1")
    assert rows(tmp_path)["16384/ours"]["token_seconds"] == pytest.approx([0.02])
    assert rows(tmp_path)["16384/vllm"]["token_seconds"] == pytest.approx([0.03])


def test_other_tokens_of_ours_are_wrong(start, tmp_path: Path) -> None:
    results = {"ours": result([1, 8], 0.04), "huggingface": result([7, 8], 0.05)}
    assert start(results, "--only", "4096/ours", "4096/huggingface", "--rounds", "1") == 1
    assert rows(tmp_path)["4096/ours"]["wrong"]


def test_engines_that_cannot_run_are_named(
    start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--only", "4096/vllm", "4096/openvino", "--rounds", "1"]
    assert start({"vllm": None}, *only) == 0
    assert rows(tmp_path)["4096/vllm"]["reason"] == "ended with status 3: nonsense"
    assert "engines/setup openvino" in rows(tmp_path)["4096/openvino"]["reason"]
    assert "4096/vllm: ended with status 3" in capsys.readouterr().out


def test_bytes_are_those_of_the_model() -> None:
    """Against the parameters that transformers makes from the same sizes."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(checkpoint.configuration(), dtype=torch.bfloat16)
    matrices = sum(p.nbytes for p in model.parameters() if p.dim() == 2)
    assert checkpoint.weights_bytes() == matrices


PACKAGES = {
    "openvino.py": "",
    "openvino_genai.py": "class StreamerBase: ...\nclass StreamingStatus: ...\n",
    "optimum/intel.py": """
import os

class OVModelForCausalLM:
    def from_pretrained(checkpoint, **options):
        return OVModelForCausalLM()

    def save_pretrained(self, directory):
        directory.mkdir()
        (directory / "openvino_model.bin").write_text(str(os.getpid()))
""",
}
CONVERT = """
import os
from pathlib import Path
from benchmarks.engines.drivers.openvino import converted

for _ in range(2):  # the second finds what the first has written
    print(os.getpid(), (converted(Path()) / "openvino_model.bin").read_text())
"""


def test_openvino_converts_in_a_process_of_its_own(tmp_path):
    for name, text in PACKAGES.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    paths = [str(tmp_path / "packages"), str(Path(__file__).parents[2])]
    printed = subprocess.run(
        [sys.executable, "-c", CONVERT],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    first, second = (line.split() for line in printed.splitlines())
    assert first == second and first[0] != first[1]
