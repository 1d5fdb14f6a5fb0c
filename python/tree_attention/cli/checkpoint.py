# SPDX-License-Identifier: BSD-3-Clause
"""Loading a checkpoint that a user names."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..exchange import ExchangeError
from ..exchange.errors import sentence
from .usage import UsageError

_MAX_NAMES = 3


def load(path: Path, **options: Any) -> Any:
    """The model of a checkpoint, loaded with `options` of transformers' `from_pretrained`.

    Raises:
        UsageError: the checkpoint is damaged or incomplete.
    """
    from transformers import AutoModelForCausalLM

    with damages_named(path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        names = ", ".join(missing[:_MAX_NAMES])
        more = f" and {len(missing) - _MAX_NAMES} more" if len(missing) > _MAX_NAMES else ""
        raise UsageError(
            f"the checkpoint in {path} lacks weights, which would be random numbers: {names}{more};"
            " copy or download it again"
        )
    return model.eval()


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a checkpoint.

    Raises:
        UsageError: transformers is not installed, or the checkpoint is damaged or incomplete.
    """
    try:
        from .. import hf  # noqa: F401  before transformers itself, as it says what to install
    except ImportError as error:
        raise UsageError(str(error)) from error
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # which transformers shows while it loads the weights
    if not (path / "config.json").exists():
        raise UsageError(
            f"no checkpoint in {path}: --model takes a directory with config.json, "
            "*.safetensors and a tokenizer"
        )
    with damages_named(path):
        # Nothing beside the weights is run: neither Python files nor pickles.
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


@contextmanager
def damages_named(path: Path) -> Iterator[None]:
    """Turns errors of loading into one sentence with the name of the checkpoint, but for those of
    other ranks and of models that cannot be split."""
    try:
        yield
    except Exception as error:  # damaged files are errors of every kind, of three libraries
        from ..hf.parallel.plan import CannotSplitError  # needs transformers, which is there now

        if isinstance(error, ExchangeError | CannotSplitError):
            raise
        raise UsageError(f"the checkpoint in {path} does not load: {sentence(error)}") from error
