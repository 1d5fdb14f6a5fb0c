# SPDX-License-Identifier: BSD-3-Clause
"""How the size of a tile and the number of workers change lean_decode's time.

python benchmarks/tune.py --out DIR                  # on the CPU
python benchmarks/tune.py --device cuda --out DIR    # on a GPU
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import cuda
from benchmarks.cpu.cases import DecodeCase
from benchmarks.cpu.tune import CpuSweep
from benchmarks.cuda import ablations
from benchmarks.cuda.cases import CudaCase
from benchmarks.harness.program import add_out, finish
from benchmarks.harness.shapes import log_uniform_lengths
from benchmarks.harness.tuning import Case, Sweep, run

K = 1 << 10
# In an order that makes a part of them worth having.
SHAPES: tuple[dict[str, Any], ...] = (
    {"lengths": (K,)},
    {"lengths": (64 * K,)},
    {"lengths": (64 * K,), "head_dim": 64},
    {"lengths": (8 * K,)},
    {"lengths": log_uniform_lengths(8, 512, 32 * K)},
    {"lengths": (8 * K,), "heads": (8, 1)},
    {"lengths": (4 * K,) * 8, "page_size": 16},
    {"lengths": (K,), "head_dim": 64},
    {"lengths": (8 * K,), "head_dim": 64},
    {"lengths": (128 * K,), "heads": (8, 1)},
    {"lengths": (128 * K,)},
    {"lengths": (128 * K,), "head_dim": 64},
)
QUICK: tuple[dict[str, Any], ...] = (
    {"lengths": (700,), "heads": (4, 2), "head_dim": 64},
    {"lengths": (300, 70), "heads": (4, 2), "page_size": 16},
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="two tiny cases, to try it")
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="timed seconds per case (default 6)"
    )
    parser.add_argument("--budget", type=float, help="begin no case after so many seconds")
    add_out(parser, "tune")
    parsed = parser.parse_args(arguments)
    shapes = QUICK if parsed.quick else SHAPES
    sweep: Sweep
    cases: list[Case]
    if parsed.device == "cpu":
        cpu_cases = [DecodeCase(**shape) for shape in shapes]
        sweep, cases = CpuSweep(cpu_cases), [*cpu_cases]
    else:
        why = cuda.unavailable()
        if why is None and not ablations.load():
            why = "the tiles are not built: python -m benchmarks.cuda.ablations"
        if why is not None:
            print(f"tune --device cuda: {why}")
            return 2
        from benchmarks.cuda.tune import CudaSweep  # which needs triton

        cuda_cases = [CudaCase(**shape) for shape in shapes]
        sweep, cases = CudaSweep(cuda_cases), [*cuda_cases]
    return finish(run(cases, sweep, parsed.seconds, parsed.budget, parsed.out), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
