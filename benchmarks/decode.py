# SPDX-License-Identifier: BSD-3-Clause
"""The local operator beside PyTorch's attention and the machine's ceilings.

python benchmarks/decode.py                  # on the CPU
python benchmarks/decode.py --device cuda    # on a GPU, beside other kernels
"""

import argparse
import sys
from functools import partial
from pathlib import Path

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import cuda
from benchmarks.cpu import decode as cpu
from benchmarks.cpu.cases import full_cases, peer_cases, quick_cases, standard_cases
from benchmarks.cpu.libraries import add_peers
from benchmarks.harness.program import parser_of_cases, run_cases
from tree_attention.cli.world import World, joined_world


def main(arguments: list[str]) -> int:
    parser = parser_of_cases("Times the local operator beside PyTorch and checks every result.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="on cuda: begin no case after so long (default 45 with --quick, no limit with "
        "--full, else 240)",
    )
    add_peers(parser)
    parsed = parser.parse_args(arguments)
    with joined_world() as world:
        if world.size > 1:
            if world.root:
                print("decode.py runs in one process: start it without torchrun")
            return 2
        if parsed.device == "cuda":
            return cuda_main(parsed, world)
        return cpu_main(parsed, world)


def cpu_main(parsed: argparse.Namespace, world: World) -> int:
    run = partial(cpu.run, seconds=0.05 if parsed.quick else parsed.seconds, paths=parsed.peers)
    standard = peer_cases if parsed.peers else standard_cases
    return run_cases(parsed, world, (quick_cases, standard, full_cases), run)


def cuda_main(parsed: argparse.Namespace, world: World) -> int:
    if (why := cuda.unavailable()) is not None:
        print(f"decode.py --device cuda: {why}")
        return 2
    from benchmarks.cuda import decode  # which needs triton

    budget = 45.0 if parsed.quick else None if parsed.full else 240.0
    run = partial(
        decode.run,
        seconds=0.3 if parsed.quick else parsed.seconds,
        budget=budget if parsed.budget is None else parsed.budget,
        name=decode.QUICK_NAME if parsed.quick else decode.NAME,
        out=parsed.out,
        paths=parsed.peers,
    )
    lists = (decode.quick_cases, decode.standard_cases, decode.full_cases)
    return run_cases(parsed, world, lists, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
