# SPDX-License-Identifier: BSD-3-Clause
"""Files and texts that commands read and write: bytes that are no text, full disks, pipes."""

import errno
import json
import os
from pathlib import Path
from unittest import mock

import pytest

from tree_attention.__main__ import main

pytest.importorskip("transformers")


def run(checkpoint: Path, *arguments: str) -> int:
    return main(["generate", "--model", str(checkpoint), "--max-new-tokens", "3", *arguments])


def test_prompts_that_are_no_text(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkpoint, "--prompt", "a\udcff") == 2
    error = "generate: --prompt must be UTF-8: 'utf-8' codec can't decode byte 0xff in position 1"
    assert capsys.readouterr().err.startswith(error)
    assert run(checkpoint, "--prompt", "a\ud800") == 2  # which no command line has
    assert "--prompt must be UTF-8" in capsys.readouterr().err
    file = tmp_path / "prompt"
    file.write_bytes(b"a\xff")
    assert run(checkpoint, "--prompt-file", str(file)) == 2
    assert (
        f"--prompt-file {file} must be UTF-8: 'utf-8' codec can't decode" in capsys.readouterr().err
    )


def test_a_byte_order_mark_is_no_part_of_the_prompt(checkpoint: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "prompt", tmp_path / "out.json"
    file.write_bytes(b"\xef\xbb\xbfabc")
    assert run(checkpoint, "--prompt-file", str(file), "--json", str(out)) == 0
    assert json.loads(out.read_text())["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["generate", "--model", "/nowhere", "--prompt", "a"], "--json"),
        (["calibrate"], "--out"),
    ],
)
def test_full_devices_are_found_before_the_work(
    capsys: pytest.CaptureFixture[str], arguments: list[str], option: str
) -> None:
    assert main([*arguments, option, "/dev/full"]) == 2
    output = capsys.readouterr()
    assert f"{option} /dev/full: this file cannot be written (No space left" in output.err
    assert output.out == ""


def test_a_disk_that_fills_up_leaves_the_old_file(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    file.write_text("old")
    with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        assert run(checkpoint, "--prompt", "a", "--json", str(file)) == 2
    assert f"--json {file}: this file cannot be written (No space left" in capsys.readouterr().err
    assert file.read_text() == "old" and [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ('{"tokens": "abc"}', "tokens must be a list of integers, got 'abc'"),
        ('{"tokens": [1, 2.5]}', r"tokens must be a list of integers, got [1, 2.5]"),
        (None, "it is no regular file"),  # a pipe that nobody writes to
    ],
)
def test_tokens_of_another_run_that_are_none(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    reason: str,
) -> None:
    file = tmp_path / "tokens.json"
    if content is None:
        os.mkfifo(file)
    else:
        file.write_text(content)
    assert run(checkpoint, "--prompt", "a", "--same-tokens-as", str(file)) == 2
    error = f"generate: --same-tokens-as {file}: {reason}; name a file that --json wrote\n"
    assert capsys.readouterr().err == error
