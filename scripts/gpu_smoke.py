#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Runs GPU tests with a process for each kernel: what one breaks on the device, or waits for in
vain, ends that process alone. `gpu_smoke.py RESULT.json FILES`; the result has a line for each."""

import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

PROCESSES = 8  # at a time: each has a context on the device and imports torch
SECONDS = 60  # of a process, if its tests' own limits do not end it
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
LIMITS = ["--timeout", "40", "--timeout-method", "thread"]
# The driver loads every kernel for it, beside processes that do so with theirs. It launches none,
# so that it cannot hang, and begins before all others.
LONG, LONG_SECONDS = "test_resident_blocks", 120
# In a test's name: the types and, in the test of all kernels, the head_dim.
KERNEL = re.compile(r"(?:b?float|b?fp|bf|int)\d+(?:_\w+)?(?: \w+)*")


def groups(files: list[str]) -> dict[str, list[str]]:
    """The tests that use a GPU, by function and kernel."""
    collected = subprocess.run(
        [*PYTEST, "--collect-only", "-k", "not emulated", *files], capture_output=True, text=True
    )
    tests = [line for line in collected.stdout.splitlines() if "::" in line]
    if collected.returncode != 0 or not tests:
        sys.exit(f"{collected.stdout}{collected.stderr}\nno tests were collected")
    found: dict[str, list[str]] = {}
    for test in tests:
        function, _, parameters = test.split("::", 1)[1].partition("[")
        kernel = KERNEL.search(parameters)
        found.setdefault(f"{function} {kernel[0] if kernel else ''}".strip(), []).append(test)
    return found


def run(name: str, tests: list[str]) -> tuple[str, str]:
    try:
        done = subprocess.run(
            [*PYTEST, *LIMITS, *tests], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=LONG_SECONDS if name == LONG else SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return "FAILED: out of time", (error.stdout or b"").decode(errors="replace")
    return "passed" if done.returncode == 0 else f"FAILED: status {done.returncode}", done.stdout


def main(arguments: list[str]) -> int:
    path, results, begin = Path(arguments[0]), {}, time.monotonic()
    kernels = groups(arguments[1:])

    def note(name: str, result: str, output: str) -> None:
        results[name] = result
        path.write_text(json.dumps(results, indent=1))
        if result != "passed":
            print(output)
        print(f"{time.monotonic() - begin:5.1f} s  {name}: {result}", flush=True)

    # One process alone first: it fills the caches of files and of the driver for all.
    first = next(iter(kernels))
    note(first, *run(first, kernels.pop(first)))
    names = sorted(kernels, key=lambda name: name != LONG)
    with ThreadPoolExecutor(PROCESSES) as pool:
        running = {pool.submit(run, name, kernels[name]): name for name in names}
        for future in as_completed(running):
            note(running[future], *future.result())
    failed = [name for name, result in results.items() if result != "passed"]
    print(f"{len(results) - len(failed)} of {len(results)} kernels passed",
          f"without {', '.join(failed)}" if failed else "")  # fmt: skip
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
