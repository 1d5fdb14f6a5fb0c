# SPDX-License-Identifier: BSD-3-Clause
"""JSON objects in files of every content and kind, and files that are replaced as a whole."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tree_attention import _json
from tree_attention._json import probe_file, read_json_object, replace_file


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is no JSON: Expecting value"),
        (b'{"a": ', "it is no JSON: Expecting value"),
        (b'{"a": "\xff"}', "it is no JSON: 'utf-8' codec can't decode byte 0xff"),
        ('{"a": 1}'.encode("utf-16"), "it is no JSON: 'utf-8' codec can't decode byte 0xff"),
        (b'{"a": 1%s}' % (b"0" * 5000), "it is no JSON: Exceeds the limit"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"a":' * 100_000, "it is nested too deeply"),
        (b"[1, 2]", "it must hold a JSON object, got list"),
        (b"null", "it must hold a JSON object, got NoneType"),
    ],
)
def test_what_holds_no_object(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "index.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"the index {file}: {reason}"):
        read_json_object(file, "the index")


def test_objects_are_read(tmp_path: Path) -> None:
    file = tmp_path / "index.json"
    file.write_bytes('{"größe": [1, 2.5, null]}'.encode())
    assert read_json_object(str(file), "the index") == {"größe": [1, 2.5, None]}
    (tmp_path / "link").symlink_to(file)
    assert read_json_object(tmp_path / "link", "the index")


def test_large_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_json, "MAX_BYTES", 10)
    file = tmp_path / "index.json"
    file.write_text('{"a": 345}')
    assert read_json_object(file, "the index")
    file.write_text('{"a": 3456}')
    with pytest.raises(ValueError, match=f"the index {file}: it is larger than 10 bytes"):
        read_json_object(file, "the index")


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    """Without waiting for the writer of a pipe."""
    path = {"device": Path("/dev/zero"), "directory": tmp_path, "pipe": tmp_path / "pipe"}[kind]
    if kind == "pipe":
        os.mkfifo(path)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=f"it is no regular file: '{path}'"):
        read_json_object(path, "the index")
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(FileNotFoundError):
        read_json_object(tmp_path / "nothing", "the index")


def test_files_are_replaced_as_a_whole(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    replace_file(file, "grün")
    before = file.open(encoding="utf-8")
    probe_file(link)
    replace_file(link, "new")
    assert link.is_symlink() and file.read_text() == "new"
    assert before.read() == "grün"  # a reader has all of the old one
    before.close()
    with mock.patch("os.fsync", side_effect=OSError("full")), pytest.raises(OSError, match="full"):
        replace_file(file, "newer")
    assert file.read_text() == "new" and {*tmp_path.iterdir()} == {file, link}


@pytest.mark.deep
def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    """Output that is piped or redirected, and devices."""
    program = "from tree_attention._json import *; probe_file('/dev/stdout')"
    program += "; replace_file('/dev/stdout', 'text')"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b"text"
    with (tmp_path / "redirected").open("w+") as file:
        subprocess.run(command, stdout=file, check=True)
        assert file.read() == "text"  # in the very file that the shell has opened
    probe_file("/dev/null")
    replace_file("/dev/null", "text")
    for path in ("/dev/full", "/proc/version", "/proc/nothing"):
        with pytest.raises(OSError):
            probe_file(path)
    with pytest.raises(OSError, match="No space left on device"):
        replace_file("/dev/full", "text")
