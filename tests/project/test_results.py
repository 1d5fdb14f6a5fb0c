# SPDX-License-Identifier: BSD-3-Clause
"""What is recorded: one page a measurement, and data where a program reads them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.cuda import predict

ROOT = Path(__file__).parents[2]
# Programs that go on from what was measured before, or compare their arithmetic with it.
READ_BACK = {
    "cluster": "lab/emulation/clusters.py",
    "contexts": "lab/emulation/contexts.py",
    "engines": "benchmarks/engines/__main__.py",
    "engines_weights": "benchmarks/engines/__main__.py",
    "generation": "lab/emulation/generation.py",
    "latent_model": "lab/simulation/planning.py",
    "lean_figure_3": "lab/papers/shares.py",
    "scaling": "lab/simulation/planning.py",
    "serving": "benchmarks/engines/serving.py",
}


def tracked(pattern: str) -> list[str]:
    found = subprocess.run(
        ["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return found.stdout.split()


def test_data_are_those_that_a_program_reads() -> None:
    found = {Path(name).stem for name in tracked("benchmarks/results/*.json")}
    of_a_gpu = {name for name, keeps_rows in predict.REPORTS.items() if keeps_rows}  # if any
    assert found - of_a_gpu == READ_BACK.keys()
    for name, program in READ_BACK.items():
        text = (ROOT / program).read_text()
        assert name in text and (ROOT / f"benchmarks/results/{name}.md").is_file()
