# SPDX-License-Identifier: BSD-3-Clause
"""The tests' own ranks, where the tests run as a job in the background."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distributed import AMPLE_SECONDS

# Ranks import the function by name, so it is one of a module.
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from distributed import run_ranks
from project.test_background_jobs import is_interrupted
if __name__ == "__main__":
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    print(run_ranks(is_interrupted, 1))
"""


def is_interrupted(rank: int, world_size: int) -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.deep
def test_ctrl_c_interrupts_ranks_of_a_parent_that_ignores_it() -> None:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=AMPLE_SECONDS,
        check=False,
    )
    assert done.stdout == "[True]\n", done.stderr
