# SPDX-License-Identifier: BSD-3-Clause
"""The shapes of models that `plan` is asked for: by name, or as `hf.enable` takes them."""

import difflib
from pathlib import Path
from typing import Any

from .._loader import why_no_transformers
from ..planning.models import NAMED, Model


def find_model(name: str, near_tokens: int | None = None) -> Model:
    """Return the named shape, or the shape of a directory with config.json; with `near_tokens` the
    keys of older tokens are on the host."""
    if name in NAMED:
        return _with_far_keys(NAMED[name], near_tokens)
    path = Path(name)
    if not (path / "config.json").is_file():
        shape = name.rsplit("/", 1)[-1].lower()  # of what the hub calls OWNER/NAME
        near = difflib.get_close_matches(shape, NAMED, n=1, cutoff=0.7)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"{name} is no directory with config.json, and the named shapes are "
            f"{', '.join(NAMED)}{meant}"
        )
    if (reason := why_no_transformers()) is not None:
        raise ValueError(f"{name}: {reason}")
    from ..hf.shape import one_line  # not above: named shapes need no torch

    try:
        from transformers import AutoConfig

        from ..weights.checkpoint.files import check_config_file

        check_config_file(path / "config.json", "the configuration")
        config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the classes of transformers' checks are of many kinds
        raise ValueError(f"{name}/config.json cannot be read: {one_line(error)}") from error
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return from_config(path.resolve().name, config, stored, near_tokens)


def from_config(name: str, config: Any, stored: int = 0, near_tokens: int | None = None) -> Model:
    """Return the shape of a configuration's model, which must be one that `hf.enable` takes;
    without `stored` bytes, weights are bf16."""
    from .. import hf
    from ..hf.shape import shape_of

    options: Any = {} if near_tokens is None else {"far": "cpu", "near_tokens": near_tokens}
    try:
        model = shape_of(name, config, stored, lambda x: hf.disable(hf.enable(x, **options)))
    except ValueError as error:
        raise ValueError(f"{name} cannot be planned: {error}") from error
    return _with_far_keys(model, near_tokens)


def _with_far_keys(model: Model, near_tokens: int | None) -> Model:
    return model if near_tokens is None else model.with_far_keys(near_tokens)
