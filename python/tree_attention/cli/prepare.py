# SPDX-License-Identifier: BSD-3-Clause
"""`tree-attention prepare`: reads a document into a directory, about which `ask` asks.

Arguments and files are looked at before torch and transformers are imported, which takes seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .._json import probe_directory
from .document import facts_of, place, sizes_in
from .generate import (
    add_model_options,
    advice,
    cache_options,
    check_model_options,
    check_read_by_all,
    load_model,
    start,
    text_in,
)
from .usage import UsageError, argument_parser, check_checkpoint, is_root

if TYPE_CHECKING:
    import torch

    from .shares import Part


def main(arguments: list[str]) -> int:
    return start(arguments, parse, check, run)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argument_parser(
        "prepare",
        "Reads a document with a model, and writes its key/value cache and its tokens to a "
        "directory, from which ask answers questions without reading the document again.",
        "prepare report.txt --model DIR --out report",
        "prepare report.txt --model DIR --out report --ranks 2 --kv-dtype int8",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="File with the text, in UTF-8.")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="Where to write the result: a directory that all ranks reach; a document that was "
        "prepared there is replaced.",
    )
    add_model_options(parser)
    parser.set_defaults(command="prepare", attention="tree_attention", shares="even")
    return parser.parse_args(arguments)


def check(arguments: argparse.Namespace) -> None:
    """Raises UsageError for options that are wrong, or wrong together."""
    check_model_options(arguments)
    check_checkpoint(arguments.model)
    out = arguments.out
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: this is a file; name a directory")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no directory {out.parent}; create it first")
    if out.resolve() == arguments.model.resolve():
        raise UsageError(f"--out {out}: this is the directory of --model; name another one")
    if others := {*sizes_in(out)} - {arguments.tensor_parallel_size}:
        raise UsageError(
            f"--out {out}: a document is there of --tensor-parallel-size {min(others)}, got "
            f"{arguments.tensor_parallel_size}; remove it, or name another directory"
        )
    check_read_by_all("FILE", arguments.file, arguments.ranks)
    arguments.text = text_in("FILE", arguments.file)
    if not arguments.text.strip():
        raise UsageError(f"FILE {arguments.file}: the document is empty: name a file with a text")
    if is_root():
        try:
            probe_directory(out)
        except OSError as error:  # not after the document was read, which may take hours
            raise UsageError(
                f"--out {out}: it cannot be written to ({error.strerror}); name another directory"
            ) from error


def run(arguments: argparse.Namespace, part: Part, device: torch.device) -> int:
    from ..exchange import ExchangeError
    from .checkpoint import load_config, load_tokenizer, make_greedy, num_positions, pad_token

    tokenizer = load_tokenizer(arguments.model)
    # Not verbose: of a text that is too long it would foretell errors of indices.
    ids = tokenizer(arguments.text, return_tensors="pt", verbose=False)["input_ids"].to(device)
    num_tokens, limit = ids.shape[1], num_positions(load_config(arguments.model))
    if num_tokens == 0:
        raise UsageError(f"FILE {arguments.file}: the document has no tokens")
    if limit is not None and num_tokens >= limit:
        raise UsageError(
            f"FILE {arguments.file}: the document has {num_tokens} tokens, and the model has "
            f"{limit} positions, of which questions need some: shorten the document"
        )
    model = load_model(arguments, part, device)
    make_greedy(model, arguments.model)
    from .. import hf
    from ..hf.cache.snapshot.files import save
    from . import generation

    cache = hf.TreeCache(model.config, **cache_options(arguments, part, model))
    pad = pad_token(tokenizer)
    with generation.Screen(part.world.root, arguments.text, num_tokens, model, tokenizer) as screen:
        try:
            # One token, which is not kept: so the prompt is read in chunks, or split over ranks.
            read = generation.generate(model, ids, cache, max_new_tokens=1, pad_token_id=pad)
        except ExchangeError as error:
            raise ExchangeError(f"{error}. {advice(model, cache)}") from error
    directory = place(arguments.out, arguments.tensor_parallel_size, part.world.rank)
    facts = facts_of(arguments, model)
    try:
        save(cache, directory, ids, facts)
    except OSError as error:
        raise UsageError(f"--out {arguments.out}: {error}") from error
    screen.remarks.print(
        f"{num_tokens:,} tokens read in {read.arrivals[0].seconds:.1f} s, "
        f"{read.kv_bytes / 2**20:.2f} MiB on each rank, in {arguments.out}"
    )
    return 0
