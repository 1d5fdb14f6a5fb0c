# SPDX-License-Identifier: BSD-3-Clause
"""The files of a checkpoint, whose JSON is checked before anything is built from it."""

import os
import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from ..._json import read_json_object
from ..._numbers import shown
from ..._paths import is_of_hub, near_directory
from ...exchange import sentence

# Fields that no model can have at 0 or below.
_POSITIVE = {
    *("num_hidden_layers", "n_layer", "n_layers", "num_attention_heads", "n_head", "n_heads"),
    *("num_key_value_heads", "head_dim", "hidden_size", "n_embd", "d_model"),
    *("intermediate_size", "vocab_size"),
}
# The most that a field may say, by a part of its name. The deepest models that are published have
# 126 layers. In these bounds the weights of a layer have less than the 2^63 bytes of any tensor.
_MOST = {"layer": 1000, "head": 10_000, "expert": 10_000, **dict.fromkeys(_POSITIVE, 1 << 24)}
_MOST_OF_OTHERS = (1 << 63) - 1


# Files that a directory may have in place of safetensors files with transformers' names, by
# pattern, and how to convert them. Files that are often published next to another of these come
# last.
_SAVE = "and then call save_pretrained(directory) once and give that, or parallelize(model)"
_LOAD = "AutoModelForCausalLM.from_pretrained(path{}), " + _SAVE
_OTHER_FILES = {
    "adapter_config.json": "an adapter of peft: load its base model with transformers, merge the "
    f"adapter into it (merge_and_unload of peft), {_SAVE}",
    "model-*-of-*.safetensors": "parts of a checkpoint without model.safetensors.index.json, which "
    "names them: copy or download it as well",
    "model.*safetensors*": "a variant: load it with " + _LOAD.format(", variant=..."),
    "pytorch_model*.bin*": "pickles of torch, which are not read here: load them with "
    + _LOAD.format(""),
    "*.gguf": "GGUF: load it with " + _LOAD.format(", gguf_file=..."),
    "consolidated*": "the weights in their maker's own format: take the checkpoint of "
    "transformers, or convert it with the script that transformers has for the model",
    "tf_model*.h5": "weights of TensorFlow, which transformers < 5 reads (from_tf=True): save them "
    "with it as safetensors",
    "flax_model*.msgpack": "weights of Flax, which transformers < 5 reads (from_flax=True): save "
    "them with it as safetensors",
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Source:
    """Where a checkpoint is: a directory, or a name on the Hub and what reaches it there."""

    path: str
    token: str | bool | None = field(default=None, repr=False)
    revision: str | None = None

    @staticmethod
    def of(path: object, token: object = None, revision: object = None) -> "Source":
        """The source that callers of `from_pretrained` name; a missing directory is an OSError
        before anything asks the Hub for it."""
        what = "from_pretrained: {} must be {}, got {}"
        a_path = "a directory, or a name on the Hugging Face Hub"
        if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
            raise TypeError(what.format("path", a_path, shown(path)))
        if not isinstance(token, str | bool | None):  # whose value is nobody's business
            raise TypeError(what.format("token", "a string, True or None", type(token).__name__))
        if not isinstance(revision, str | None):
            a_revision = "the name of a branch, tag or commit, or None"
            raise TypeError(what.format("revision", a_revision, shown(revision)))
        name = os.path.expanduser(os.fspath(path))
        if not name.strip() or "\0" in name:
            raise ValueError(what.format("path", a_path, shown(path)))
        if os.path.isfile(name):
            raise OSError(
                f"from_pretrained: {name} is a file; give the directory that has it and config.json"
            )
        found = Source(name, token, revision)
        if isinstance(path, os.PathLike) and not os.path.isdir(name):
            raise found.missing()
        if "://" in name and not os.path.isdir(name):
            raise OSError(
                f"from_pretrained: {name} is an address; give the name alone that the model has on "
                "the Hugging Face Hub, such as meta-llama/Llama-3.1-8B"
            )
        return found

    def __str__(self) -> str:
        return self.path

    @property
    def is_of_hub(self) -> bool:
        """True for what may be a name on the Hub."""
        return is_of_hub(self.path)

    @property
    def of_hub(self) -> dict[str, Any]:
        """The keyword arguments of transformers' functions that read files of a checkpoint. What is
        no name of the Hub is looked for in the cache of its client alone, which asks nobody."""
        local = {} if self.is_of_hub else {"local_files_only": True}
        return {"token": self.token, "revision": self.revision, **local}

    def missing(self, said: str = "") -> OSError:
        """The error where there is no such directory; `said` is the Hub's, where it was asked."""
        near = near_directory(Path(self.path))
        way = f"did you mean {near}?"
        if near is None:
            way = "give the directory of a checkpoint, or, as a string, a name on the Hub"
        if said:
            reason = f"no name on the Hugging Face Hub that can be read: {said}"
            meant = "" if near is None else f" {way}"
            return OSError(f"from_pretrained: {self.path} is no directory, and {reason}{meant}")
        owner = self.path.partition("/")[0]
        if self.path.count("/") == 1 and os.path.isdir(owner) and owner.strip("."):
            way += (
                f" As {owner} is a directory here, the Hugging Face Hub is not asked: if it has "
                f"{self.path}, call `hf download {self.path}` first"
            )
        return OSError(f"from_pretrained: there is no directory {self.path}; {way}")


def others(source: Source) -> str:
    """Names the other files of a directory, for the error of a missing one."""
    directory = Path(source.path)
    if not directory.is_dir():
        return f"; where it has weights in another format, load it with transformers, {_SAVE}"
    if any((directory / name).exists() for name in (WEIGHTS, INDEX)):
        return "; copy or download that as well"
    for pattern, meaning in _OTHER_FILES.items():
        found = sorted(file.name for file in directory.glob(pattern))
        if found:
            return f"; {found[0]} is {meaning}"
    if not any(directory.iterdir()):
        return "; the directory is empty"
    return "; copy or download the checkpoint again"


def check_config_file(file: str | os.PathLike[str], what: str) -> None:
    """Raises ValueError, beginning with `what`, if no model can have a size in a config.json."""
    config = read_json_object(file, what)
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict | None):
        raise ValueError(
            f"{what} {os.fspath(file)}: quantization_config must be an object, got "
            f"{reprlib.repr(quantization)}"
        )
    remaining: list[tuple[str, Any]] = [("", config)]
    while remaining:
        name, value = remaining.pop()
        if isinstance(value, dict):
            remaining += value.items()
        elif isinstance(value, list):
            remaining += ((name, each) for each in value)
        elif value is not None and (name in _POSITIVE or type(value) is int):
            most = next((n for part, n in _MOST.items() if part in name), _MOST_OF_OTHERS)
            least = 1 if name in _POSITIVE else -most
            if type(value) is not int or not least <= value <= most:
                raise ValueError(
                    f"{what} {os.fspath(file)}: {name} must be an integer of {least:,} to "
                    f"{most:,}, got {reprlib.repr(value)}"
                )


def files_of(index: str | os.PathLike[str], what: str) -> list[str]:
    """The names of the safetensors files in the index of a checkpoint; errors begin with `what`."""
    names = read_json_object(index, what).get("weight_map")
    found: list[Any] = [*names.values()] if isinstance(names, dict) else [None]
    if not all(isinstance(name, str) and name == Path(name).name for name in found):
        raise ValueError(
            f"{what} {os.fspath(index)}: weight_map must name the file of each weight, in this "
            f"directory, got {reprlib.repr(names)}; copy or download it again"
        )
    return sorted({*found})


def find_file(source: Source, name: str, required: bool = False) -> Path | None:
    """A file of a checkpoint, from the Hub if need be; None if it has no such file.

    Of a required one that no directory here can have, the OSError tells what the Hub said: it may
    not have been reached.
    """
    required = required and not os.path.isdir(source.path)
    try:
        file = cached_file(
            source.path, name, _raise_exceptions_for_missing_entries=required, **source.of_hub
        )
    except OSError as error:
        raise source.missing(sentence(error) if source.is_of_hub else "") from None
    return None if file is None else Path(file)


def opened(source: Source, name: str) -> Any:
    """A safetensors file of a checkpoint, mapped into memory."""
    file = find_file(source, name, required=True)
    if file is None:
        raise OSError(f"from_pretrained: {source} lacks the file {name}, which its index names")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        with file.open("rb") as content:
            is_pointer = content.read(len(_LFS_POINTER)) == _LFS_POINTER
        if is_pointer:
            raise ValueError(
                f"from_pretrained: {file} is a pointer of Git LFS, not the file that it stands "
                f"for: fetch that with git lfs pull in {file.parent}"
            ) from None
        raise ValueError(
            f"from_pretrained: {file} is damaged: {sentence(error)}; copy or download it again"
        ) from None
