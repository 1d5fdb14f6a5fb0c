# SPDX-License-Identifier: BSD-3-Clause
"""Variables of the environment as launchers, clusters and templates set them, well and badly."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

from tree_attention.__main__ import main
from tree_attention.cli import calibration, generate  # noqa: F401  # once, not in each child

from .cases import Case

OWN_PROCESSES = True  # in which there is no default group
_SECONDS = "0.8"  # that ranks have to meet
_ENDS_WITHIN = 60.0  # on a busy machine, where importing transformers takes half of it
_NUMBERS = ("", " ", "two", "0x1", "1.0", "-1", "1_0", "1e3", "\uff11", "9" * 25, "None", "1 2")
_WRONG: dict[str, tuple[str | None, ...]] = {
    "RANK": (*_NUMBERS, "1", "5", "-0x1"),
    "WORLD_SIZE": (*_NUMBERS, "0", "-3", None),
    "LOCAL_RANK": (*_NUMBERS, "1", "7", None),
    "LOCAL_WORLD_SIZE": (*_NUMBERS, "0", "3"),
    "MASTER_PORT": (*_NUMBERS, "tcp://10.96.3.7:29500", "99999999", "65536", "-4", "http", None),
    "MASTER_ADDR": ("", "no.such.host.invalid", "tcp://127.0.0.1", "a" * 300, "127.0.0.1:29500",
                    ".", "\u00e4..b", None),
    "TREE_ATTENTION_COSTS": ("/nowhere", "/", "/dev/null", "\udcff", "[red]", __file__),
}  # fmt: skip
# Which a command may do with or without, so that nothing is known of its end but its form.
_ODD: dict[str, tuple[str, ...]] = {
    "WORLD_SIZE": ("2", "3"),
    "MASTER_ADDR": ("localhost", "::1", " ", "127.0.0.2", "10.255.255.1"),
    "LOCAL_WORLD_SIZE": ("1",),
    "MASTER_PORT": ("0",),
    "TREE_ATTENTION_NODE": ("", "a", "x" * 5000, "[/b]", "\udcff"),
    "TREE_ATTENTION_COSTS": ("",),
    "TREE_ATTENTION_VLLM": ("yes", ""),
    "OMP_NUM_THREADS": ("", "x", "0", "1"),
    "TORCHELASTIC_USE_AGENT_STORE": ("True", "False", ""),
    "TORCHELASTIC_RESTART_COUNT": ("x", "", "1"),
    "GLOO_SOCKET_IFNAME": ("lo", "no-such-device"),
}
_SIGNS = ("frame #", "Exception raised from", "incompatible constructor")


def world_size(case: Case) -> int:
    return 1


def play(case: Case, rank: int) -> str:
    if dist.is_initialized():  # the group of the tests
        dist.destroy_process_group()
    rng = case.rng
    kind = case.draw({"wrong": (3.0, "wrong"), "odd": (1.0, "odd")})
    values = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    values["MASTER_PORT"] = str(rng.randrange(30000, 60000))
    changed: dict[str, str | None] = {}
    for _ in range(rng.choice([0, 1, 1, 2]) if kind == "wrong" else rng.randint(1, 3)):
        name = rng.choice(list(_ODD))
        changed[name] = rng.choice(_ODD[name])
    command = rng.choice(["calibrate", "generate"])
    wrong = ""
    if kind == "wrong":
        # `calibrate` measures without an earlier table.
        wrong = rng.choice([name for name in _WRONG if command == "generate" or "TREE" not in name])
        changed[wrong] = rng.choice(_WRONG[wrong])
    try:
        status, said = _run(command, rng, values | changed)
        _check(command, status, said)
        if wrong:
            # Two wrong values are told one after the other.
            names = [name for name in changed if name in _WRONG]
            named = any(name in said for name in names)
            assert named, f"none of {', '.join(names)} is named: {said!r}"
    except AssertionError as error:
        shown = {name: x if x is None else x[:40] for name, x in changed.items()}
        raise AssertionError(f"{command} in {shown}: {error}") from error
    return f"{status}"


def _run(command: str, rng: Random, values: dict[str, str | None]) -> tuple[int, str]:
    """Its exit status and what it wrote, in a process that this one leaves behind as it was."""
    arguments = ["--out", "/dev/shm/never-written.json"]
    if command == "generate":
        arguments = ["--prompt", "a"]
    with tempfile.TemporaryDirectory() as folder:
        # Whose path is right, and which does not load.
        (Path(folder) / "config.json").touch()
        file = Path(folder) / "said"
        child = os.fork()
        if child == 0:
            model = ["--model", folder] * (command == "generate")
            _be_command([command, *model, *arguments, "--timeout", _SECONDS], values, file)
        status = _status_of(child)
        return status, file.read_text(errors="replace")


def _be_command(arguments: list[str], values: dict[str, str | None], file: Path) -> None:
    """Never returns."""
    status = 70
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        for name in [*_WRONG, *_ODD, "RANK", "LOCAL_RANK"]:
            os.environ.pop(name, None)
        os.environ.update({name: x for name, x in values.items() if x is not None})
        torch.set_num_threads(1)
        status = main(arguments)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 71
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _status_of(child: int) -> int:
    deadline = time.monotonic() + _ENDS_WITHIN
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"it does not end in {_ENDS_WITHIN:g} s")


def _check(command: str, status: int, said: str) -> None:
    """One sentence, which begins with the command's name, and a status of an error."""
    # torch's own log, which `python -m tree_attention` turns off as it begins, has other lines.
    lines = [x for x in said.splitlines() if x.startswith(f"{command}: ")]
    is_sentence = len(lines) == 1 and not any(sign in lines[0] for sign in _SIGNS)
    is_sentence = is_sentence and "Traceback" not in said and status in (1, 2)
    assert is_sentence, f"status {status}: {said[-1500:]}"
