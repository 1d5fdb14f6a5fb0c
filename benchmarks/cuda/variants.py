# SPDX-License-Identifier: BSD-3-Clause
"""lean_decode beside itself with the shortest ring, whose blocks request less ahead:
`python -m benchmarks.cuda.variants --out DIR`, after `python -m benchmarks.cuda.ablations`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from ..harness.measure import InputArena
from .cases import LATENCY, PAGES, CudaCase, K
from .inputs import Inputs, num_sets
from .peers import ablation, ours
from .timing import measure

OURS, TWO_STAGES = "lean_decode", "two stages"
CASES = [
    LATENCY,
    CudaCase(lengths=(64 * K,)),
    CudaCase(lengths=(8 * K,) * 8),
    CudaCase(PAGES, lengths=(16 * K,) * 8, page_size=16),
]


def row(case: CudaCase) -> dict[str, Any]:
    """Times of both, whose bits are the same."""
    sets = num_sets(case.read_bytes, torch.cuda.get_device_properties(0).L2_cache_size)
    inputs = Inputs(case, InputArena(sets * case.set_bytes, "cuda"), sets)
    calls = {OURS: ours(case, inputs), TWO_STAGES: ablation("two_stages", case, inputs)}
    found = measure(calls, sets, 1.0)
    results = [x.graph.result[0] for x in found.measured.values()]
    wrong = len(results) < 2 or not torch.equal(*results)
    times = {name: x.graph.to_json() for name, x in found.measured.items()}
    return {"times": times, "failed": found.failed, "wrong": wrong}


def line(name: str, found: dict[str, Any]) -> str:
    times = [f"{one}: {x['median_us']:.2f} us" for one, x in found["times"].items()]
    return f"{name}: {', '.join(times)}{' WRONG' if found['wrong'] else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="writes variants.json there")
    out, rows = parser.parse_args().out, {}
    with torch.inference_mode():
        for case in CASES:
            rows[case.name] = row(case)
            print(line(case.name, rows[case.name]), flush=True)
            (out / "variants.json").write_text(json.dumps(rows, indent=1))
    return int(any(found["wrong"] for found in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
