# SPDX-License-Identifier: BSD-3-Clause
"""Commands in the `sh` blocks of pages: programs of this repository take their arguments, scripts
and tests that are named exist, and all other programs are known. None of them is run here."""

import importlib.util
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from commands import check_command
from test_links import ROOT, WRITTEN_BY_HAND, name_of
from tree_attention.__main__ import COMMANDS

BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
# Programs of others, which nothing here checks.
OF_OTHERS = {
    *("pip", "hf", "git", "unzip", "cp", "strip", "tar", "sha256sum", "ls", "cd", "for", "."),
    *("head", "echo", "perf", "gdb", "sudo", "ip", "export", "unshare", "python3.12", "srun"),
}
OWN_PYTHON = re.compile(r"(?:[\w/.]+/bin/)?python3?")
# Programs that a page lets its reader write.
OF_THE_READER = {"chat.py", "document.py", "program.py", "big.py", "make_small.py"}


def commands(page: str) -> list[list[str]]:
    """Return the words of each command, without the variables that are set for it."""
    found = []
    for block in BLOCK.findall(page):
        block = re.sub(
            r"^\(|\)$", "", re.sub(r"\$\([^()]*\)|\$\w+", "0", block), flags=re.MULTILINE
        )
        lines, waiting = block.replace("\\\n", " ").splitlines(), ""
        for line in lines:
            waiting += line + "\n"
            try:
                words = shlex.split(waiting, comments=True)
            except ValueError:  # a quotation that goes on in the next line
                continue
            waiting = ""
            for part in re.split(r"\0(?:&&|\|)\0", "\0".join(words)):
                own = part.split("\0")
                while own and re.match(r"\w+=", own[0]):
                    own.pop(0)
                if own and own[0]:
                    found.append(own)
    return found


def expanded(words: list[str]) -> list[str]:
    """Return the words as bash makes them of braces."""
    text = " ".join(
        word if re.fullmatch(r"[\w/,{}-]+", word) else shlex.quote(word) for word in words
    )
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def unknown(words: list[str], patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is wrong with a command, or ''."""
    if words[0] == "env" or (words[:1] == ["sudo"] and words[1] == "env"):
        words = words[words.index("python") :]  # after variables
    if words[:3] == ["python", "-m", "lab.emulation"]:
        words = words[words.index("--") + 1 :]
    if words[0] == "tree-attention":
        words = ["python", "-m", "tree_attention", *words[1:]]
    if OWN_PYTHON.fullmatch(words[0]):
        words = ["python", *words[1:]]
    if words[:3] == ["python", "-m", "torch.distributed.run"]:
        words = ["torchrun", *words[3:]]
    if words[:4] == ["python", "-m", "tree_attention", "run"]:  # -n N, and what it runs
        words = ["python", *words[6:]]
    if words[:3] == ["python", "-m", "pytest"]:
        words = words[2:]
    if words[0] == "pytest":
        named = [word for word in words[1:] if word.startswith("tests/")]
        return "" if all((ROOT / name).exists() for name in named) else f"{named} are not all there"
    if words[0] not in ("python", "torchrun"):
        if "/" in words[0] and not words[0].endswith("/bin/pip"):
            return "" if os.access(ROOT / words[0], os.X_OK) else f"{words[0]} is no script"
        return (
            ""
            if words[0].split("/")[-1] in OF_OTHERS
            else f"{words[0]} is no program that is known here"
        )
    if words[1] in ("-c", "setup.py") or {"--help", *OF_THE_READER} & {*words}:
        return ""
    if words[1] == "-m" and words[2] in ("pip", "venv"):
        return ""
    # The arguments are vLLM's, or there are none.
    if words[1] == "-m" and words[2] in ("tree_attention.vllm", "benchmarks.cuda.ablations"):
        return "" if importlib.util.find_spec(words[2]) else f"{words[2]} is no module"
    if words[1] == "examples/passkey-llama/ask_server.py":
        return "" if (ROOT / words[1]).exists() else f"{words[1]} is not there"
    if "tree_attention" in words:
        command = words[words.index("tree_attention") + 1]
        if command not in COMMANDS:
            return f"tree_attention has no command {command}"
    words = words[: words.index(">")] if ">" in words else words
    try:
        check_command(shlex.join(expanded(words)), patch, capsys)
    except AssertionError as error:
        return f"{shlex.join(words)}: {error}"
    return ""


WITH_COMMANDS = [
    # Importing all benchmarks takes seconds.
    pytest.param(page, marks=[pytest.mark.deep] * (name_of(page) == "benchmarks/README.md"))
    for page in WRITTEN_BY_HAND
    if commands(page.read_text())
]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands_of_a_page(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [unknown(words, monkeypatch, capsys) for words in commands(page.read_text())]
    assert not [text for text in wrong if text]


def test_wrong_commands_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (
        *("A=1 python benchmarks/sparse.py --oout DIR", "tree-attention generat --prompt a"),
        *("scripts/no.sh", "pytest tests/no.py && wget x", "python benchmarks/sparse.py --out DIR"),
    )
    page = "```sh\n" + "\n".join(lines) + "\n```\n"
    wrong = [unknown(words, monkeypatch, capsys) for words in commands(page)]
    assert [bool(text) for text in wrong] == [True, True, True, True, True, False]
