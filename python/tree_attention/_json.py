# SPDX-License-Identifier: BSD-3-Clause
"""JSON objects in files, and files that are replaced as a whole."""

import errno
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 100_000_000  # as many as safetensors allows the header of a file


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file; refuses a pipe, which would wait for its writer, and a device."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return open(handle, "rb")


def read_json_object(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """Reads the JSON object in a file; `what` is its kind, with which an error begins."""
    where = f"{what} {os.fspath(path)}"
    with open_regular(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{where}: it is larger than {MAX_BYTES:,} bytes")
    try:
        found = json.loads(content.decode(), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError(f"{where}: it is nested too deeply") from None
    except ValueError as error:  # also of UTF-8, and of integers with thousands of digits
        raise ValueError(f"{where}: it is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: it must hold a JSON object, got {type(found).__name__}")
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it gives a name twice")
    return found


def replace_file(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text to a file as a whole: an interrupted write leaves what was there.

    What is no regular file, such as a pipe or a terminal, is written to.
    """
    path = Path(path)
    if not _is_replaced(path):
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()  # a link stays one
    unfinished = _beside(target)
    try:
        with unfinished.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def probe_file(path: str | os.PathLike[str]) -> None:
    """Raises OSError where `replace_file` would, as far as that shows beforehand.

    Only trying tells: permissions do not hold for root, nor do they say all.
    """
    path = Path(path)
    if path.is_fifo():
        return  # opening it would wait for its reader
    if path.exists():
        handle = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            os.write(handle, b"")  # which a device that is full refuses
        finally:
            os.close(handle)
    if _is_replaced(path):
        target = path.resolve()
        probe = _beside(target) if target.exists() else target
        with probe.open("xb", buffering=0) as file:
            try:
                file.write(b"\n")  # which a disk that is full refuses
            finally:
                probe.unlink()


def probe_directory(path: Path) -> None:
    """Raises OSError where no file can be written to a directory, which need not exist yet."""
    is_new = not path.exists()
    path.mkdir(exist_ok=True)
    try:
        probe_file(_beside(path / "probe"))
    finally:
        if is_new:
            path.rmdir()


def _is_replaced(path: Path) -> bool:
    # /dev/stdout may be a file that the shell has opened and goes on writing to.
    in_system = path.absolute().parts[1:2] in (("dev",), ("proc",))
    return not path.exists() or (path.is_file() and not in_system)


def _beside(target: Path) -> Path:
    return target.with_name(f".{secrets.token_hex(8)}.tmp")
