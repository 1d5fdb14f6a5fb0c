# SPDX-License-Identifier: BSD-3-Clause
"""`tree-attention calibrate`: times exchanges on the user's own ranks, for "auto"."""

from pathlib import Path

from .._environment import COSTS_VARIABLE
from .usage import UsageError, add_timeout, argument_parser, check_can_be_written, check_seconds


def main(arguments: list[str]) -> int:
    parser = argument_parser(
        "calibrate",
        "Times whole exchanges of every strategy between the ranks of torchrun, measures how fast "
        "each host reads memory, and writes a table. "
        "Strategy 'auto' takes the fastest by that table in jobs of the same ranks and nodes, if "
        f"every rank has {COSTS_VARIABLE}=FILE in its environment.",
        "run -n 2 -m tree_attention calibrate --out costs.json",
        "run -n 4 -m tree_attention calibrate --seconds 0.2 --out quick.json",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("exchange_costs.json"),
        metavar="FILE",
        help="Where to write the result: a file for the table (default: exchange_costs.json).",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="Device of the tensors. cuda exchanges over NCCL (default: cpu).",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="Seconds to measure each strategy with each size (default: 1).",
    )
    add_timeout(parser)
    parsed = parser.parse_args(arguments)
    check_can_be_written("--out", parsed.out)
    if parsed.out.suffix == ".png":
        raise UsageError(f"--out {parsed.out}: name the table; its picture gets the suffix .png")
    check_seconds("--seconds", parsed.seconds)
    from .calibration import measure

    measure(parsed.device, parsed.seconds, parsed.out, parsed.timeout)
    return 0
