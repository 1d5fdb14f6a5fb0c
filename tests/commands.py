# SPDX-License-Identifier: BSD-3-Clause
"""Commands that pages show, read as the programs they run would read them."""

import re
import runpy
import shlex
import sys

import pytest
from torch.distributed.run import get_args_parser

# The end of an error about an option that is added to a command.
UNKNOWN = r"unrecognized arguments: --unheard-of(; see .* --help)?"


def program_and_arguments(command: str) -> tuple[str, list[str]]:
    """Return the module that a command runs, which may follow a launcher."""
    command = re.sub(r"^python -m lab\.emulation .*? -- ", "", command)
    launcher, *words = shlex.split(command)
    if launcher == "torchrun":
        parsed = get_args_parser().parse_args(words)
        words = [*["-m"] * parsed.module, parsed.training_script, *parsed.training_script_args]
    else:
        assert launcher == "python"
    if words[0] == "-m":
        return words[1], words[2:]
    program = re.fullmatch(r"benchmarks/(\w+)\.py", words[0])  # those in folders are modules
    assert program, f"{words[0]} does not run by its path"
    return f"benchmarks.{program[1]}", words[1:]


def check_command(
    command: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asserts that the program of a command takes its arguments, without running it."""
    module, arguments = program_and_arguments(command)
    patch.setattr("sys.argv", [module, *arguments, "--unheard-of"])
    patch.setattr("sys.path", sys.path.copy())  # whose first folder a program replaces
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 2
    # Only what is added here is unknown.
    assert re.search(f"{UNKNOWN}$", capsys.readouterr().err.strip())
