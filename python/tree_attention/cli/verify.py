# SPDX-License-Identifier: BSD-3-Clause
"""`tree-attention verify`: whether the library is right on this machine and ranks."""

from pathlib import Path

from .usage import A_CHECKPOINT, add_timeout, argument_parser, check_checkpoint


def main(arguments: list[str]) -> int:
    parser = argument_parser(
        "verify",
        "Checks the operators against float64, the ranks of torchrun against each other and "
        "generated tokens against HuggingFace's.",
        "verify",
        "run -n 2 -m tree_attention verify --model DIR --timeout 60",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help=f"Model: a {A_CHECKPOINT}; its tokens are checked as well (default: none).",
    )
    add_timeout(parser)
    parsed = parser.parse_args(arguments)
    if parsed.model is not None:
        check_checkpoint(parsed.model)  # before the other checks, which take a minute
    from .verification import run

    return run(parsed.model, parsed.timeout)
