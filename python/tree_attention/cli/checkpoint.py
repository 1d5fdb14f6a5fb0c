# SPDX-License-Identifier: BSD-3-Clause
"""Loading a checkpoint that a user names."""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._json import read_json_object
from .._memory import is_out_of_memory
from ..exchange import ExchangeError, sentence
from .usage import UsageError, check_checkpoint

_TOKENS = "bos_token_id", "eos_token_id", "pad_token_id"
# Other keys of generation_config.json that change no token, and values that ask for nothing.
_REMARKS = "_from_model_config", "transformers_version", "use_cache"
_DEFAULTS = None, False, 1
# Nothing in the directory is run: neither Python files nor pickles.
_ITS_OWN: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load(path: Path, **options: Any) -> Any:
    """The model of a checkpoint, loaded with `options` of `from_pretrained`, or UsageError."""
    from ..weights.checkpoint.reading import some
    from ..weights.text import class_to_load

    config = load_config(path)
    with damages_named(path):
        loaded: Any = class_to_load(config).from_pretrained(
            path,
            **_ITS_OWN,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise UsageError(
            f"the checkpoint in {path} lacks weights, which would be random numbers: "
            f"{some(missing)}; copy or download it again"
        )
    if extra := sorted(info["unexpected_keys"]):
        raise UsageError(
            f"the checkpoint in {path} has weights that the model of its config.json lacks: "
            f"{some(extra)}; copy or download both again"
        )
    return model.eval()


def load_config(path: Path) -> Any:
    """The configuration of a checkpoint, or UsageError."""
    from transformers import AutoConfig

    with damages_named(path):
        return AutoConfig.from_pretrained(path, **_ITS_OWN)


def is_quantised(path: Path) -> bool:
    """True if a checkpoint has weights of 8 or 4 bits in a format of `hf.from_pretrained`."""
    from ..weights.checkpoint.formats import check_format

    with damages_named(path):
        config = read_json_object(path / "config.json", "the configuration")
    quantization = config.get("quantization_config")
    try:
        check_format(path, quantization or {})
    except ValueError:
        return False
    return bool(quantization)


def make_greedy(model: Any, path: Path) -> list[str]:
    """Makes a model generate the likeliest tokens of one sequence, whatever its checkpoint says;
    returns the fields of generation_config.json that therefore count for nothing."""
    from transformers import GenerationConfig

    file, fields = path / "generation_config.json", dict[str, Any]()
    if file.is_file():
        with damages_named(path):
            fields = read_json_object(file, "the defaults of generation in")
    kept = {name: getattr(model.generation_config, name) for name in _TOKENS}
    for name, value in kept.items():
        ids = value if isinstance(value, list) else [value]
        are_tokens = ids and all(type(x) is int and -(1 << 63) <= x < 1 << 63 for x in ids)
        if value is not None and not are_tokens:
            raise UsageError(
                f"the checkpoint in {path}: {name} of its defaults of generation must be the "
                f"number of a token or a list of them, got {reprlib.repr(value)}"
            )
    model.generation_config = GenerationConfig(**kept)
    return sorted(
        name
        for name, value in fields.items()
        if name not in (*_TOKENS, *_REMARKS) and (value is True or value not in _DEFAULTS)
    )


def num_positions(config: Any) -> int | None:
    """The tokens that a model's text may have, or None where its configuration names no limit."""
    from ..weights.text import text_config

    limit: int | None = getattr(text_config(config), "max_position_embeddings", None)
    return limit


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a checkpoint, or UsageError."""
    try:
        from .. import hf  # noqa: F401  before transformers itself, as it says what to install
    except ImportError as error:
        raise UsageError(str(error)) from error
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from ..weights.checkpoint.files import check_config_file

    logging.disable_progress_bar()  # which transformers shows while it loads the weights
    check_checkpoint(path)
    with damages_named(path):
        check_config_file(path / "config.json", "the configuration")
        return AutoTokenizer.from_pretrained(path, **_ITS_OWN)


def pad_token(tokenizer: Any) -> int | None:
    """The id of padding, or of the end of a text where a tokenizer has none for padding."""
    pad: int | None = tokenizer.pad_token_id
    return tokenizer.eos_token_id if pad is None else pad


@contextmanager
def damages_named(path: Path) -> Iterator[None]:
    """Turns errors of loading into one sentence with the name of the checkpoint. Errors of other
    ranks, of models that cannot be split, and of memory stay as they are."""
    try:
        yield
    except Exception as error:  # damaged files are errors of every kind, of three libraries
        from ..weights.plan import CannotSplitError  # needs transformers, which is there now

        if isinstance(error, ExchangeError | CannotSplitError) or is_out_of_memory(error):
            raise
        raise UsageError(f"the checkpoint in {path} does not load: {sentence(error)}") from error
