# SPDX-License-Identifier: BSD-3-Clause
"""The command line of the fuzzer: see the package's docstring."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TORCH_LOGS", "-torch.utils._pytree")  # torch warns of torchao


def main() -> int:
    from lab.adversary.runner import PARTS

    parser = argparse.ArgumentParser(prog="python -m lab.adversary")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; default: all")
    parser.add_argument("--kind", default="", help="cases of this kind alone; needs one part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on")
    parser.add_argument("--case", help="play this case alone, or FIRST-LAST one after the other")
    parser.add_argument("--first", action="store_true", help="with --case: stop at the first fault")
    parser.add_argument("--batch", type=int, default=40, help="cases between two reports")
    arguments = parser.parse_args()
    parts = arguments.only or PARTS
    if arguments.kind and len(parts) > 1:
        parser.error("--kind needs --only and one part")
    with tempfile.TemporaryDirectory(prefix="adversary-") as folder:
        os.environ["TMPDIR"] = folder  # of the ranks, some of which are killed
        return (
            _play_cases(arguments, parts)
            if arguments.case is not None
            else _go_on(arguments, parts)
        )


def _play_cases(arguments: argparse.Namespace, parts: Sequence[str]) -> int:
    from lab.adversary.runner import find

    first, _, last = arguments.case.partition("-")
    indices = range(int(first), int(last or first) + 1)
    found = (
        finding
        for part in parts
        for finding in find(
            part, arguments.seed, indices, arguments.kind, alone=not arguments.first
        )
    )
    findings = list(itertools.islice(found, 1 if arguments.first else None))
    print(*findings or ["no fault"], sep="\n\n")
    return 1 if findings else 0


def _go_on(arguments: argparse.Namespace, parts: Sequence[str]) -> int:
    """One batch of each part after the other, until the time is up."""
    from lab.adversary.runner import find, summary

    begin, found_in = time.monotonic(), Counter[str]()
    end = begin + arguments.seconds
    for batch in itertools.count():
        for part in parts:
            indices = range(batch * arguments.batch, (batch + 1) * arguments.batch)
            for finding in find(part, arguments.seed, indices, arguments.kind, end=end):
                found_in[part] += 1
                print(f"\n{finding}\n", flush=True)
            now, faults = time.monotonic(), found_in.total()
            print(f"{now - begin:7.0f} s {part:10} to {indices[-1]}: {faults} faults", flush=True)
            if now > end:
                print(summary(found_in), flush=True)
                return 1 if found_in else 0
    raise AssertionError("unreachable")


if __name__ == "__main__":
    sys.exit(main())
