# SPDX-License-Identifier: BSD-3-Clause
"""The place of a prepared document, and the facts by which `ask` knows the model that read it."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from .._json import open_regular

INDEX = "index.json"
# Bytes of each weight that are compared: weights of another training differ everywhere.
_SAMPLED = 4096


def place(directory: Path, size: int, rank: int) -> Path:
    """The directory of the cache of this rank's heads, which `size` ranks split."""
    return directory if size == 1 else directory / f"heads-{rank % size}-of-{size}"


def sizes_in(directory: Path) -> list[int]:
    """The numbers of ranks that split the heads of the documents in a directory."""
    whole = [1] * (directory / INDEX).exists()
    names = (path.parent.name for path in directory.glob(f"heads-*-of-*/{INDEX}"))
    found = (re.fullmatch(r"heads-\d+-of-(\d+)", name) for name in names)
    return whole + sorted({int(match[1]) for match in found if match is not None})


def facts_of(arguments: argparse.Namespace, model: Any) -> dict[str, str]:
    """Facts that are equal for a prepared document and the model that answers about it."""
    return {
        "digest of the weights": digest_of_weights(arguments.model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "--weight-dtype": arguments.weight_dtype,
    }


def digest_of_weights(checkpoint: Path) -> str:
    """A digest of the beginning of every weight in the safetensors files of a checkpoint, with the
    names, dtypes and shapes of all: to read every byte takes longer than to load a document."""
    sha = hashlib.sha256()
    for path in sorted(checkpoint.glob("*.safetensors")):
        with open_regular(path) as file:
            size = file.read(8)
            header = file.read(int.from_bytes(size, "little"))
            sha.update(size + header)
            for name, entry in sorted(json.loads(header).items()):
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    file.seek(8 + len(header) + begin)
                    sha.update(file.read(min(_SAMPLED, end - begin)))
    return sha.hexdigest()
