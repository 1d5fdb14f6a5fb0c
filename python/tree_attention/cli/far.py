# SPDX-License-Identifier: BSD-3-Clause
"""The options of commands for keys of older tokens in the host's memory."""

import argparse

from .usage import UsageError, tokens_of


def add_far_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--far",
        choices=("cpu",),
        help="Where the keys of older tokens are: in the memory of each GPU's host, whose CPU "
        "attends to them there (default: on the GPU, as all others).",
    )
    parser.add_argument(
        "--near-tokens",
        metavar="TOKENS",
        help="With --far: of how many of the newest tokens, of all ranks together, the keys are on "
        "GPUs, such as 8192 or 8k.",
    )


def check_far_options(arguments: argparse.Namespace) -> None:
    """Raises UsageError for one option without the other, and makes a number of the tokens."""
    if arguments.far is None:
        if arguments.near_tokens is not None:
            raise UsageError("--near-tokens is for --far cpu: give both, or neither")
        return
    if arguments.near_tokens is None:
        raise UsageError(
            "--far cpu needs --near-tokens, the number of newest tokens whose keys stay on the "
            "GPU, for example 8k"
        )
    arguments.near_tokens = tokens_of("--near-tokens", arguments.near_tokens)
