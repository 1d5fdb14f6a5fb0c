# SPDX-License-Identifier: BSD-3-Clause
"""The prose of the passkey model: Jane Austen's novels (public domain) out of a Debian package.

`r-cran-janeaustenr` ships the six novels as Project Gutenberg has them, in one file of R objects.
R is not needed: each object is a compressed vector of lines.
"""

from __future__ import annotations

import re
import struct
import subprocess
import zlib
from pathlib import Path

PACKAGE = "r-cran-janeaustenr"
RDB = Path("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
TRAINING = ("EMMA", "MANSFIELD PARK", "PRIDE AND PREJUDICE", "SENSE AND SENSIBILITY")
HELD_OUT = ("NORTHANGER ABBEY", "PERSUASION")


def find_package(download_to: Path) -> Path:
    """The package's data file: installed, downloaded before, or downloaded now."""
    for path in (Path("/") / RDB, download_to / RDB):
        if path.exists():
            return path
    download_to.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["apt-get", "download", PACKAGE], cwd=download_to, check=True)
        archive = max(download_to.glob(f"{PACKAGE}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", str(archive), str(download_to)], check=True)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise SystemExit(
            f"The training text comes from Debian's package {PACKAGE}, which is neither installed "
            f"nor could be downloaded ({error}). On Debian or Ubuntu: 'apt-get update', then run "
            f"this again, or 'apt-get install {PACKAGE}'. Elsewhere unpack the .deb and name its "
            f"folder: --text-package DIR (it holds {RDB})."
        ) from error
    return download_to / RDB


def _lines(serialized: bytes) -> list[str]:
    """The strings of one R character vector in XDR serialization (R Internals, section 1.8)."""
    if serialized[:2] != b"X\n" or struct.unpack_from(">i", serialized, 2) != (3,):
        raise ValueError("not an R object in XDR serialization, version 3")
    (encoding_length,) = struct.unpack_from(">i", serialized, 14)
    at = 18 + encoding_length
    flags, count = struct.unpack_from(">ii", serialized, at)
    if flags & 0xFF != 16:
        raise ValueError("not a character vector")
    at += 8
    lines = []
    for _ in range(count):
        (length,) = struct.unpack_from(">i", serialized, at + 4)
        at += 8
        lines.append(serialized[at : at + max(length, 0)].decode("utf-8"))
        at += max(length, 0)
    return lines


def _paragraphs(lines: list[str]) -> str:
    """One line per paragraph, without the marks of emphasis of the plain-text edition."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines))
    joined = (" ".join(block.replace("_", "").split()) for block in blocks)
    return "\n".join(block for block in joined if block) + "\n"


def read_novels(rdb: Path) -> dict[str, str]:
    """Title in capitals -> text, for each novel in the package's data file."""
    data = rdb.read_bytes()
    novels = {}
    at = 0
    while at < len(data):
        decompressor = zlib.decompressobj()  # each object: its compressed size, then zlib data
        lines = _lines(decompressor.decompress(data[at + 4 :]))
        at = len(data) - len(decompressor.unused_data)
        title = lines[0].strip().upper()
        if title in TRAINING + HELD_OUT:
            novels[title] = _paragraphs(lines)
    missing = set(TRAINING + HELD_OUT) - set(novels)
    if missing:
        raise ValueError(f"{rdb} lacks {', '.join(sorted(missing))}")
    return novels


def excerpt(novel: str, characters: int) -> str:
    """Whole paragraphs from the first chapter on, about `characters` of them."""
    body = novel[re.search(r"^chapter (1|i)\b", novel, re.IGNORECASE | re.MULTILINE).start() :]
    return body[: body.index("\n", characters) + 1]
