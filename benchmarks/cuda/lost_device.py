# SPDX-License-Identifier: BSD-3-Clause
"""Which kernel loses the device where K of a batch has more than 2^31 bytes: each is called once,
in a process of its own, for lengths around that size.

    python -m benchmarks.cuda.lost_device --peers LIBRARY ... --out DIR
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import cuda

from ..cpu.libraries import add_peers
from ..harness.accuracy import Float64Check
from ..harness.measure import InputArena
from ..harness.program import add_out, finish
from ..harness.report import ROOT, Column, Report, environment
from . import libraries, peers
from .cases import OURS, UNIFORM, CudaCase, K
from .inputs import Inputs
from .libraries import FLASH_3
from .peers import CUDNN, FLASH
from .timing import check_device, reason

NAME = "lost_device_cuda"
LENGTHS = (16 * K, 16 * K + 64, 17_392)  # with the first K has 2^31 bytes
SEQUENCES = 64
LIBRARIES = (OURS, CUDNN, FLASH, FLASH_3)
PROCESSES, SECONDS = 4, 30  # at a time; of one
COMMAND = (sys.executable, "-m", "benchmarks.cuda.lost_device")


def case_of(length: int) -> CudaCase:
    return CudaCase(UNIFORM, lengths=(length,) * SEQUENCES, layout="NHD")


def attempt(name: str, case: CudaCase, paths: Sequence[Path]) -> str:
    """One call, and what came of it. The last sequence, whose keys lie farthest, is compared."""
    makers: Mapping[str, libraries.Maker] = {
        OURS: peers.ours,
        CUDNN: peers.cudnn,
        FLASH: peers.flash,
        **libraries.load(paths),
    }
    if name not in makers:
        return "not given"
    try:
        inputs = Inputs(case, InputArena(case.set_bytes, "cuda"), 1)
        check_device("the inputs")
        result = makers[name](case, inputs)(0)
        check_device(name)
        o = result[0] if isinstance(result, tuple) else result
        kv = inputs.sets[0]
        check = Float64Check(inputs.q[-1:], kv.k[-1:], kv.v[-1:], None)
        return "right" if check.accuracy(o[-1:]).right else "WRONG"
    except libraries.Unavailable as why:
        return f"cannot run it: {why}"
    except Exception as error:
        return reason(error)


def in_a_process(asked: tuple[str, int], paths: Sequence[Path]) -> str:
    name, length = asked
    command = [*COMMAND, "--one", name, str(length), *(["--peers", *map(str, paths)] * bool(paths))]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "out of time"
    if said := done.stdout.strip():
        return said.splitlines()[-1]
    why = done.stderr.strip().splitlines()[-1:]
    return ": ".join([f"exit status {done.returncode}", *why])[:160]


def run(paths: Sequence[Path]) -> Report:
    from . import machine

    asked = [(name, length) for length in LENGTHS for name in LIBRARIES]
    with ThreadPoolExecutor(PROCESSES) as pool:
        found = dict(zip(asked, pool.map(partial(in_a_process, paths=paths), asked), strict=True))
    rows: list[dict[str, Any]] = [
        {
            "name": case_of(length).name,
            "key_bytes": case_of(length).read_bytes // 2,
            "results": {name: found[name, length] for name in LIBRARIES},
            "wrong": found[OURS, length] != "right",
        }
        for length in LENGTHS
    ]
    columns = [
        Column("case", [row["name"] for row in rows]),
        Column("bytes of K", [f"{row['key_bytes']:,}" for row in rows]),
    ]
    columns += [Column(name, [row["results"][name] for row in rows]) for name in LIBRARIES]
    return Report(
        name=NAME,
        title="Who loses the device where K has more than 2^31 bytes",
        notes=["One call in a process of its own, and a wait for it; 32/8 heads of 128, bf16."],
        environment=environment(**machine.environment()),
        rows=rows,
        columns=columns,
        is_read_back=True,
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda.lost_device",
        description="Calls each kernel in a process of its own, to see which loses the device.",
    )
    parser.add_argument(
        "--one", nargs=2, metavar=("LIBRARY", "KEYS"), help="in this process, this one alone"
    )
    add_peers(parser)
    add_out(parser, NAME)
    parsed = parser.parse_args(arguments)
    if (why := cuda.unavailable()) is not None:
        print(f"lost_device: {why}")
        return 2
    if parsed.one:
        name, length = parsed.one
        with torch.inference_mode():
            print(attempt(name, case_of(int(length)), parsed.peers))
        return 0
    return finish(run(parsed.peers), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
